"""Bounds of the logits of one row, and of the mass of tokens whose logits are known within them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.sampling import distribution
from lmhead.screen import screen_kernels
from lmhead.screen.candidates import Candidates, Pairs

# Maximum number of tokens that may win by their upper bounds; more are not decided.
_MOST = 1024
# More than all roundings of a sum, relative to it.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class LogitBounds:
    """A logit lies in scale · lower + shift - slack ... scale · upper + shift + slack.

    Attributes:
        lower, upper: (1, V) float32.
    """

    lower: Tensor
    upper: Tensor
    scale: float
    shift: float
    slack: float  # of roundings, tiny

    @classmethod
    def of(cls, found: Candidates) -> LogitBounds:
        """Return the bounds of the candidates of one row."""
        p, base = found.pointwise, float(found.states.base)
        if p.bounded:
            return cls(*found.bounds(), 1.0, 0.0, 0.0)
        approx, radius = found.around()
        slack = 2.0**-48 * (p.scale * abs(base) + abs(p.shift))
        return cls(approx - radius, approx + radius, p.scale, p.scale * base + p.shift, slack)

    def without(self, ids: Tensor) -> LogitBounds:
        """Return the bounds of the other tokens."""
        if len(ids) == 0:
            return self
        lower, upper = (row.index_fill(1, ids, -math.inf) for row in (self.lower, self.upper))
        return LogitBounds(lower, upper, self.scale, self.shift, self.slack)

    def log_mass(self, beta: float) -> tuple[float, float]:
        """Return the least and the largest possible log Σ exp(β z) over all tokens."""
        return (
            self._log_sum(self.lower, beta, -1),
            self._log_sum(self.upper, beta, 1),
        )

    def _log_sum(self, row: Tensor, beta: float, sign: int) -> float:
        largest, _ = distribution.row_max(row)
        if float(largest) == -math.inf:
            return -math.inf
        factor = _one(beta * self.scale)
        mass = distribution.softmax_sums(row, factor[None], largest)[0, 0]
        total = float(factor * largest + mass.log()) + beta * (self.shift + sign * self.slack)
        return total + sign * _ROUNDING * (1 + abs(total))

    def gumbel_argmax(self, beta: float, keys: Tensor) -> Tensor:
        """Return the token with the largest upper bound of β z + noise, (1,); -1 for none."""
        if float(self.upper.amax()) == -math.inf:
            return torch.tensor([-1])
        return distribution.gumbel_argmax(self.upper, _one(beta * self.scale), keys)

    def gumbel_above(self, beta: float, keys: Tensor, score: float) -> Tensor | None:
        """Return the tokens whose β z + noise may reach a score, (K,); None if too many."""
        least = score - beta * (self.shift + self.slack)
        least -= _ROUNDING * (1 + abs(least))
        counts, ids = distribution.gumbel_above(
            self.upper, _one(beta * self.scale), keys, _one(least), _MOST
        )
        return None if int(counts) > _MOST else ids[0, : int(counts)]


def _one(x: float) -> Tensor:
    return torch.tensor([x], dtype=torch.float64)


Range = tuple[float, float]
_FEW_ROUNDINGS = 1e-12  # more than that of a few float64 operations, relative to what is added
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
        slack = _FEW_ROUNDINGS * (1 + beta * (p.scale * abs(base) + abs(p.shift)))
        slack += _FEW_ROUNDINGS * max(abs(x) if math.isfinite(x) else 0.0 for x in (low, high))
        ranges.append((low + shift - slack, high + shift + slack))
    return ranges


def _near(found: Candidates, without: Tensor) -> Pairs:
    """Return the tokens that may be near the top, other than `without`."""
    near = found.reaching(found.approx.amax(1).double() - _NEAR)
    return near.keep(~torch.isin(near.ids, without))
