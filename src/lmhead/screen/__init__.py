"""Certified decode: read a quantized copy of the weight, prove the answer, rescore a few rows.

In:  a head and hidden states.
Out: the token, or the top k, of the float64 logits: the same as full precision, always.

    rotation    an orthogonal map that spreads every coordinate over all
    directions  the mean row and the leading directions of a weight
    copy        the quantized copy of the weight, and how far it is off, row by row
    states      hidden states as whole numbers, and how far those are off
    kernels     products, bounds and selection, in the compiled core or as torch operations
    limits      the elementwise map between the linear layer and the logits, in the bounds
    candidates  approximate logits with bounds for all words, and the words that reach a limit
    decide      from bounds to the k best words
    sketch      the logits of one row between two rows of numbers
    sample      a sampler's token from the bounds; `batch` for all rows
    head        `ScreenedHead`: argmax and top-k, with a certificate as in `answers`
    store       the copy as a file

docs/certified.md has the proof.
"""

from lmhead.screen.answers import (
    Certificate,
    Interval,
    ScreenedArgmax,
    ScreenedSample,
    ScreenedTopK,
    Verification,
)
from lmhead.screen.candidates import Candidates
from lmhead.screen.head import ScreenedHead

__all__ = [
    "Candidates",
    "Certificate",
    "Interval",
    "ScreenedArgmax",
    "ScreenedHead",
    "ScreenedSample",
    "ScreenedTopK",
    "Verification",
]
