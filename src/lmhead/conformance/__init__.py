"""Conformance cases for losses, samplers and decoding: the bugs that implementations had.

Each case checks one implementation against the float64 definitions of `lmhead.reference`.

    python -m lmhead.conformance --implementation torch|lmhead|transformers|liger|cce|module:name

Read in this order: `case`, `loss_cases`, `sampler_cases`, `decode_cases`, `implementations`.
"""

from lmhead.conformance import decode_cases, loss_cases, sampler_cases
from lmhead.conformance.case import CASES, Case, Result, run_cases
from lmhead.conformance.implementations import Implementation, named

__all__ = ["CASES", "Case", "Implementation", "Result", "named", "run_cases"]

# Importing them registers their cases; in reports they come in this order.
for _module in (loss_cases, sampler_cases, decode_cases):
    for _name in [name for name in CASES if getattr(_module, name, None) is CASES[name].check]:
        CASES[_name] = CASES.pop(_name)
