"""The logits of one hidden state as the screen knows them: between two rows of float32 numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.sampling import rows
from lmhead.screen.candidates import Candidates

# Words that may be ahead in a race by their upper bounds before it is given up.
_MOST = 1024
# More than all roundings of a sum, relative to it.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Sketch:
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
    def of(cls, found: Candidates) -> Sketch:
        """From the candidates of one row."""
        p, base = found.pointwise, float(found.states.base)
        if p.bounded:
            return cls(*found.bounds(), 1.0, 0.0, 0.0)
        approx, radius = found.around()
        slack = 2.0**-48 * (p.scale * abs(base) + abs(p.shift))
        return cls(approx - radius, approx + radius, p.scale, p.scale * base + p.shift, slack)

    def without(self, ids: Tensor) -> Sketch:
        """The other words."""
        if len(ids) == 0:
            return self
        lower, upper = (row.index_fill(1, ids, -math.inf) for row in (self.lower, self.upper))
        return Sketch(lower, upper, self.scale, self.shift, self.slack)

    def log_mass(self, beta: float) -> tuple[float, float]:
        """The least and the largest that log Σ exp(β z) over all words can be."""
        return (
            self._log_sum(self.lower, beta, -1),
            self._log_sum(self.upper, beta, 1),
        )

    def _log_sum(self, row: Tensor, beta: float, sign: int) -> float:
        largest, _ = rows.top(row)
        if float(largest) == -math.inf:
            return -math.inf
        factor = _one(beta * self.scale)
        mass = rows.mass(row, factor[None], largest)[0, 0]
        total = float(factor * largest + mass.log()) + beta * (self.shift + sign * self.slack)
        return total + sign * _ROUNDING * (1 + abs(total))

    def favourite(self, beta: float, keys: Tensor) -> Tensor:
        """The word that wins the race by its upper bound, (1,); -1 if there is none."""
        if float(self.upper.amax()) == -math.inf:
            return torch.tensor([-1])
        return rows.race(self.upper, _one(beta * self.scale), keys)

    def contenders(self, beta: float, keys: Tensor, score: float) -> Tensor | None:
        """The words whose β z + noise may reach a score, (K,); None if they are too many."""
        least = score - beta * (self.shift + self.slack)
        least -= _ROUNDING * (1 + abs(least))
        counts, ids = rows.contenders(self.upper, _one(beta * self.scale), keys, _one(least), _MOST)
        return None if int(counts) > _MOST else ids[0, : int(counts)]


def _one(x: float) -> Tensor:
    return torch.tensor([x], dtype=torch.float64)
