"""Certified decode: read a quantized copy of the weight, prove the answer, rescore a few rows.

In:  a head and hidden states.
Out: the token, or the top k, of the float64 logits: the same as full precision, always.

    quantized_weight `QuantizedWeight`: the copy of the weight, and its error per row
    build_copy       make it from a weight
    copy_cache       make it once per weight, and keep it in the cache folder
    states           hidden states as integers, and their error
    screen_kernels   products, bounds and selection, in the compiled core or as torch operations
    memory_reading   how the core reads the copy, measured once per machine
    huge_pages       memory of large copies
    candidates       approximate logits with bounds, and the k best tokens from them
    screened_head    `ScreenedHead`: argmax and top-k, with a certificate
    screened_scores  `ScreenedScores`: what a screened head gives to lazy logits
    store            the copy as a file

Sampling from the bounds is in `lmhead.sampling`.

docs/certified.md has the proof.
"""

from lmhead.screen.candidates import Candidates
from lmhead.screen.screened_head import (
    Certificate,
    Interval,
    ScreenedArgmax,
    ScreenedHead,
    ScreenedSample,
    ScreenedTopK,
    ScreenReport,
    Verification,
)

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
