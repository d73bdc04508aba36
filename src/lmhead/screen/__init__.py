"""Certified decode: read a quantized copy of the weight, prove the answer, rescore a few rows.

In:  a head and hidden states.
Out: the token, or the top k, of the float64 logits: the same as full precision, always.

    rotation         an orthogonal map that spreads every coordinate over all
    directions       the mean row and the leading directions of a weight
    copy             the quantized copy of the weight, and its error per row
    states           hidden states as integers, and their error
    screen_kernels   products, bounds and selection, in the compiled core or as torch operations
    growing_maps     the elementwise map between the linear layer and the logits, in the bounds
    candidates       approximate logits with bounds, and the tokens that reach a limit
    decide           from bounds to the k largest logits
    screened_head    `ScreenedHead`: argmax and top-k, with a certificate as in `certificates`
    screened_scores  `ScreenedScores`: what a screened head gives to lazy logits
    store            the copy as a file

Sampling from the bounds is in `lmhead.sampling`.

docs/certified.md has the proof.
"""

from lmhead.screen.candidates import Candidates
from lmhead.screen.certificates import (
    Certificate,
    Interval,
    ScreenedArgmax,
    ScreenedSample,
    ScreenedTopK,
    ScreenReport,
    Verification,
)
from lmhead.screen.screened_head import ScreenedHead

__all__ = [
    "Candidates",
    "Certificate",
    "Interval",
    "ScreenReport",
    "ScreenedArgmax",
    "ScreenedHead",
    "ScreenedSample",
    "ScreenedTopK",
    "Verification",
]
