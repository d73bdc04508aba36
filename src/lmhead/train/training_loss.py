"""The loss of a training batch, as the settings choose it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lmhead.head import LMHead
from lmhead.loss import linear_cross_entropy
from lmhead.train.train_config import TrainConfig
from lmhead.vocab import SampledLoss

# (hidden (B, T, D), targets (B, T), num_items, batch number) -> sum of losses / num_items
LossFunction = Callable[[Tensor, Tensor, int, int], Tensor]


def make_loss(config: TrainConfig, head: nn.Module, frequencies: Callable[[], Any]) -> LossFunction:
    """Return cross-entropy with the label smoothing and z-loss of the settings.

    `frequencies` returns the count of each token in the training data (for "sampled").
    """
    smoothing = config.label_smoothing

    def dense(hidden: Tensor, targets: Tensor, num_items: int, _: int) -> Tensor:
        rows = hidden.flatten(0, 1)
        logits = F.linear(rows, head.weight, head.bias) if isinstance(head, LMHead) else head(rows)
        total = F.cross_entropy(
            logits, targets.flatten(), reduction="sum", label_smoothing=smoothing
        )
        # The logits of a factored head are log-probabilities: logsumexp and z-loss are 0.
        if config.z_loss and isinstance(head, LMHead):
            total = total + config.z_loss * logits.logsumexp(-1).square().sum()
        return total / num_items

    if not isinstance(head, LMHead):
        return dense
    if config.head == "sampled":
        return _sampled(config, head, frequencies())

    def exact(hidden: Tensor, targets: Tensor, num_items: int, _: int) -> Tensor:
        return linear_cross_entropy(
            hidden,
            head.weight,
            targets,
            bias=head.bias,
            label_smoothing=smoothing,
            z_loss=config.z_loss,
            num_items=num_items,
            grad_filter=config.grad_filter or None,
        )

    return dense if config.loss == "dense" else exact


def _sampled(config: TrainConfig, head: LMHead, frequencies: Any) -> LossFunction:
    sampled = SampledLoss(
        head,
        num_samples=config.samples,
        proposal="unigram",
        frequencies=frequencies + 1,  # a token that never occurred can still be drawn
        seed=config.seed,
    )

    def loss(hidden: Tensor, targets: Tensor, num_items: int, number: int) -> Tensor:
        sampled.step.fill_(number)  # a resumed run draws the same tokens
        mean: Tensor = sampled(hidden.flatten(0, 1), targets.flatten())
        return mean * (targets.numel() / num_items)

    return loss
