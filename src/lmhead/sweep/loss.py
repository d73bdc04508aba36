"""Losses as weighted sums of a sweep's answers: one formula for every option.

    loss = Σ_n  lse_n · lse  -  picked_n · z[target]  -  mixed_n · Σ_v mix_v z_v
                -  softened_n · Σ_v soft_v weight_v z_v  +  squared_n · lse²

The five weights per token carry the options: label smoothing, class weights, reduction, z-loss,
ignored tokens. Where they come from is in `functional`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lmhead.sweep.questions import RowAnswers
from lmhead.sweep.source import Rows


class RowLoss(NamedTuple):
    """The weights, (N,) each, in float64; None for 0."""

    lse: Tensor
    picked: Tensor | None = None
    mixed: Tensor | None = None
    softened: Tensor | None = None
    squared: Tensor | None = None

    def at(self, rows: Rows) -> RowLoss:
        """The weights of some tokens."""
        return self.map(lambda weight: weight[rows])

    def map(self, change: Callable[[Tensor], Tensor]) -> RowLoss:
        """Change every weight that is there; a tensor that stands twice, once."""
        changed = {id(w): w for w in self if w is not None}
        changed = {key: change(w) for key, w in changed.items()}
        return RowLoss(*(None if w is None else changed[id(w)] for w in self))  # type: ignore[arg-type]

    def rows(self, answers: RowAnswers) -> Tensor:
        """The loss of each token, (N,)."""
        assert answers.lse is not None
        total = self.lse * answers.lse
        if self.picked is not None:
            assert answers.picked is not None
            total = total - _product(self.picked, answers.picked[:, 0])
        if self.mixed is not None:
            assert answers.mixed is not None
            total = total - self.mixed * answers.mixed
        if self.softened is not None:
            assert answers.softened is not None
            total = total - _product(self.softened, answers.softened)
        if self.squared is not None:
            total = total + self.squared * answers.lse.square()
        return total

    def gradients(self, answers: RowAnswers) -> RowAnswers:
        """The gradient of Σ rows with respect to the answers."""
        assert answers.lse is not None
        lse = self.lse
        if self.squared is not None:
            lse = lse + 2 * self.squared * answers.lse
        return RowAnswers(
            lse=lse,
            picked=None if self.picked is None else -self.picked[:, None],
            mixed=None if self.mixed is None else -self.mixed,
            softened=None if self.softened is None else -self.softened,
        )


def _product(weight: Tensor, value: Tensor) -> Tensor:
    """Weight · value, and 0 where the weight is 0 though the value is infinite."""
    return torch.where(weight == 0, 0.0, weight * value)
