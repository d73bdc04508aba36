"""Bounds on the mass of tokens whose logits are known within bounds.

In:  candidates of one hidden state, tokens to leave out, some β.
Out: for each β the least and the largest possible log Σ exp(β z) over the other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lmhead.sampling.logit_bounds import LogitBounds
from lmhead.screen import screen_kernels
from lmhead.screen.candidates import Candidates, Pairs

Range = tuple[float, float]
_ROUNDING = 1e-12  # more than that of a few float64 operations, relative to what is added
# Of "4+4", tokens this close to the top, in units of the logits, are refined with all bits.
_NEAR = 10.0


def log_masses(found: Candidates, without: Tensor, betas: Sequence[float]) -> list[Range]:
    """Return, per β, the range of log Σ exp(β z) over all tokens but `without`, (K,) ids."""
    p = found.pointwise
    if p.bounded:  # through tanh a bound is not a distance any more
        bounds = LogitBounds.of(found).without(without)
        return [bounds.log_mass(beta) for beta in betas]
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
    try:  # mask these tokens temporarily
        row.index_fill_(0, without, -math.inf)
        ends = list(screen_kernels.masses(found.copy, approx, found.top, found.states, factors))
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
    """Return the tokens that may be near the top, other than `without`."""
    near = found.reaching(found.approx.amax(1).double() - _NEAR)
    return near.keep(~torch.isin(near.ids, without))
