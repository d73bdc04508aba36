"""Gradients made together with log-probabilities, while all rows turn out to have the same weight.

The gradient of a sum of log-probabilities needs three products, if it is made while the tiles of
logits are there; asked for later, it makes them again: four. A supervised trainer sums them, a
policy gradient weights every row. Which it will be is known in the backward pass alone, so a caller
that expects a sum says so by an `EqualRows`, and one backward pass that was none ends it.
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
    """Gradients of Σ log p of the targets: of the forward pass, for the first backward pass."""

    def __init__(self, guess: EqualRows, flags: tuple[bool, ...]) -> None:
        self.guess, self.flags = guess, flags
        self.gradients: tuple[Tensor | None, ...] | None = None

    def take(self, upstream: RowSums) -> tuple[Tensor | None, ...] | None:
        """Return the gradients for those of the answers; None if they must be made again."""
        gradients, self.gradients = self.gradients, None
        if gradients is None or torch.is_grad_enabled():
            return None
        factor = _common_factor(upstream)
        if factor is None:
            self.guess.expected = False
            return None
        for g in gradients:
            if g is not None:
                g.mul_(factor)
        return gradients


def upstream_ahead(answers: RowSums) -> RowSums:
    """Return the gradients of Σ log p with respect to some answers."""
    ones = torch.ones_like(answers.picked)
    return RowSums(lse=-ones[:, 0], picked=ones)


def _common_factor(upstream: RowSums) -> float | None:
    """Return what every log p is multiplied by in the loss; None where there is no such number."""
    given = [name for name in RowSums._fields if getattr(upstream, name) is not None]
    if given != ["lse", "picked"] or len(upstream.lse) == 0:
        return None
    factor = upstream.picked[0, 0]
    equal = (upstream.picked == factor).all() & (upstream.lse == -factor).all()
    return float(factor) if bool(equal) else None
