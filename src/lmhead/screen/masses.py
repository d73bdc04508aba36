"""Between which numbers the mass of words lies that are known within bounds only.

In:  candidates of one hidden state, words to leave out, some β.
Out: for each β the least and the largest that log Σ exp(β z) over the other words can be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lmhead.screen import kernels
from lmhead.screen.candidates import Candidates, Pairs
from lmhead.screen.sketch import Sketch

Range = tuple[float, float]
_ROUNDING = 1e-12  # more than that of a few float64 operations, relative to what is added
# Of "4+4", words this close to the top, in units of the logits, are worth all of their bits.
_NEAR = 10.0


def log_masses(found: Candidates, without: Tensor, betas: Sequence[float]) -> list[Range]:
    """Per β the range of log Σ exp(β z) over all words but `without`, (K,) ids."""
    p = found.pointwise
    if p.bounded:  # through tanh a bound is not a distance any more
        sketch = Sketch.of(found).without(without)
        return [sketch.log_mass(beta) for beta in betas]
    factors = torch.tensor([beta * p.scale for beta in betas], dtype=torch.float64)
    approx = found.approx
    parts: list[Tensor] = []
    if found.copy.low is not None:
        near = _near(found, without)
        both, radius = found.refined(near)
        parts = [((factors[:, None] * (both + sign * radius)).logsumexp(1)) for sign in (-1.0, 1.0)]
        without = torch.cat([without, near.ids])
    row = approx[0]
    left_out = row.index_select(0, without)
    try:  # for a moment, these words are masked
        row.index_fill_(0, without, -math.inf)
        ends = list(kernels.masses(found.copy, approx, found.top, found.states, factors))
    finally:
        row.index_copy_(0, without, left_out)
    if parts:
        ends = [torch.logaddexp(end, part) for end, part in zip(ends, parts, strict=True)]
    base = float(found.states.base)
    ranges = []
    for beta, low, high in zip(betas, ends[0].tolist(), ends[1].tolist(), strict=True):
        shift = beta * (p.scale * base + p.shift)
        slack = _ROUNDING * (1 + beta * (p.scale * abs(base) + abs(p.shift)))
        slack += _ROUNDING * max(abs(x) if math.isfinite(x) else 0.0 for x in (low, high))
        ranges.append((low + shift - slack, high + shift + slack))
    return ranges


def _near(found: Candidates, without: Tensor) -> Pairs:
    """The words that may be near the top, other than `without`."""
    near = found.reaching(found.approx.amax(1).double() - _NEAR)
    return near.keep(~torch.isin(near.ids, without))
