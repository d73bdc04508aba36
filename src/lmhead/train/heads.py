"""The loss that the settings ask for.

In:  a `TrainConfig`, the model's head (see `lmhead.models.heads` for all kinds).
Out: a function (hidden (B, T, D), targets (B, T), num_items, number) -> loss / num_items, for the
     batch of that number, counted from the beginning of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lmhead.functional import linear_cross_entropy
from lmhead.head import LMHead
from lmhead.train.config import TrainConfig
from lmhead.vocab import SampledLoss

Criterion = Callable[[Tensor, Tensor, int, int], Tensor]


def make_loss(config: TrainConfig, head: nn.Module, frequencies: Callable[[], Any]) -> Criterion:
    """What is minimised: cross-entropy, label smoothing and z-loss as the settings say."""
    if config.head == "sampled":
        return _sampled(config, head, frequencies())
    if not isinstance(head, LMHead):
        return _factored(config, head)
    return _dense(config, head) if config.loss == "dense" else _exact(config, head)


def _exact(config: TrainConfig, head: LMHead) -> Criterion:
    def loss(hidden: Tensor, targets: Tensor, num_items: int, _: int) -> Tensor:
        return linear_cross_entropy(
            hidden,
            head.weight,
            targets,
            bias=head.bias,
            label_smoothing=config.label_smoothing,
            z_loss=config.z_loss,
            num_items=num_items,
            grad_filter=config.grad_filter or None,
        )

    return loss


def _dense(config: TrainConfig, head: LMHead) -> Criterion:
    def loss(hidden: Tensor, targets: Tensor, num_items: int, _: int) -> Tensor:
        logits = F.linear(hidden, head.weight, head.bias).flatten(0, 1)
        total = F.cross_entropy(
            logits, targets.flatten(), reduction="sum", label_smoothing=config.label_smoothing
        )
        if config.z_loss:
            total = total + config.z_loss * logits.logsumexp(-1).square().sum()
        return total / num_items

    return loss


def _factored(config: TrainConfig, head: nn.Module) -> Criterion:
    """Its logits are normalised: their logsumexp is 0, and so is a z-loss."""

    def loss(hidden: Tensor, targets: Tensor, num_items: int, _: int) -> Tensor:
        total = F.cross_entropy(
            head(hidden.flatten(0, 1)),
            targets.flatten(),
            reduction="sum",
            label_smoothing=config.label_smoothing,
        )
        return total / num_items

    return loss


def _sampled(config: TrainConfig, head: nn.Module, frequencies: Any) -> Criterion:
    assert isinstance(head, LMHead)
    sampled = SampledLoss(
        head,
        num_samples=config.samples,
        proposal="unigram",
        frequencies=frequencies + 1,  # a word that never came may come
        seed=config.seed,
    )

    def loss(hidden: Tensor, targets: Tensor, num_items: int, number: int) -> Tensor:
        sampled.step.fill_(number)  # a run that goes on draws the same words
        mean: Tensor = sampled(hidden.flatten(0, 1), targets.flatten())
        return mean * (targets.numel() / num_items)

    return loss
