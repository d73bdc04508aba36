"""Lower and upper bounds of the logits of one row, as two rows of float32 numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.sampling import row_kernels
from lmhead.screen.candidates import Candidates

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
        largest, _ = row_kernels.row_max(row)
        if float(largest) == -math.inf:
            return -math.inf
        factor = _one(beta * self.scale)
        mass = row_kernels.softmax_sums(row, factor[None], largest)[0, 0]
        total = float(factor * largest + mass.log()) + beta * (self.shift + sign * self.slack)
        return total + sign * _ROUNDING * (1 + abs(total))

    def gumbel_argmax(self, beta: float, keys: Tensor) -> Tensor:
        """Return the token with the largest upper bound of β z + noise, (1,); -1 for none."""
        if float(self.upper.amax()) == -math.inf:
            return torch.tensor([-1])
        return row_kernels.gumbel_argmax(self.upper, _one(beta * self.scale), keys)

    def gumbel_above(self, beta: float, keys: Tensor, score: float) -> Tensor | None:
        """Return the tokens whose β z + noise may reach a score, (K,); None if too many."""
        least = score - beta * (self.shift + self.slack)
        least -= _ROUNDING * (1 + abs(least))
        counts, ids = row_kernels.gumbel_above(
            self.upper, _one(beta * self.scale), keys, _one(least), _MOST
        )
        return None if int(counts) > _MOST else ids[0, : int(counts)]


def _one(x: float) -> Tensor:
    return torch.tensor([x], dtype=torch.float64)
