"""Gradients computed together with log-probabilities, if all rows are expected to weigh the same.

The gradient of a sum of log-probabilities takes three products if it is computed while the tiles of
logits are in memory, and four later. A supervised trainer sums log-probabilities, a policy gradient
weights every row; which of the two is known only in the backward pass. A caller that expects a sum
passes an `EqualRows`; the first backward pass with unequal weights sets its `expected` to False.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.scores.row_loss import RowSums


@dataclass(eq=False)
class EqualRows:
    """The expectation that each log-probability of a sweep has the same gradient.

    Attributes:
        expected: False after a backward pass in which the gradients were not equal.
    """

    expected: bool = True


class GradientsAhead:
    """Gradients of Σ log p of the targets, from the forward pass for the first backward pass."""

    def __init__(self, equal_rows: EqualRows, flags: tuple[bool, ...]) -> None:
        self.equal_rows, self.flags = equal_rows, flags
        self.gradients: tuple[Tensor | None, ...] | None = None

    def take(self, upstream: RowSums) -> tuple[Tensor | None, ...] | None:
        """Return the gradients, given those of the answers; None if they must be recomputed."""
        gradients, self.gradients = self.gradients, None
        if gradients is None or torch.is_grad_enabled():
            return None
        factor = _common_factor(upstream)
        if factor is None:
            self.equal_rows.expected = False
            return None
        for g in gradients:
            if g is not None:
                g.mul_(factor)
        return gradients


def upstream_ahead(answers: RowSums) -> RowSums:
    """Return the gradients of Σ log p with respect to the answers."""
    ones = torch.ones_like(answers.picked)
    return RowSums(lse=-ones[:, 0], picked=ones)


def _common_factor(upstream: RowSums) -> float | None:
    """Return the common weight of all log p in the loss; None if their weights differ."""
    names = [name for name in RowSums._fields if getattr(upstream, name) is not None]
    if names != ["lse", "picked"] or len(upstream.lse) == 0:
        return None
    factor = upstream.picked[0, 0]
    equal = (upstream.picked == factor).all() & (upstream.lse == -factor).all()
    return float(factor) if bool(equal) else None
