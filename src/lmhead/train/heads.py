"""The one place that knows which head and which loss the settings ask for.

In:  a `TrainConfig`, the model's head.
Out: a function (hidden (B, T, D), targets (B, T), num_items) -> loss / num_items.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from lmhead.functional import linear_cross_entropy
from lmhead.head import LMHead
from lmhead.train.config import TrainConfig

Criterion = Callable[[Tensor, Tensor, int], Tensor]


def make_loss(config: TrainConfig, head: nn.Module) -> Criterion:
    """What is minimised: cross-entropy, label smoothing and z-loss as the settings say."""
    assert isinstance(head, LMHead)

    def exact(hidden: Tensor, targets: Tensor, num_items: int) -> Tensor:
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

    def dense(hidden: Tensor, targets: Tensor, num_items: int) -> Tensor:
        logits = F.linear(hidden, head.weight, head.bias).flatten(0, 1)
        total = F.cross_entropy(
            logits, targets.flatten(), reduction="sum", label_smoothing=config.label_smoothing
        )
        if config.z_loss:
            total = total + config.z_loss * logits.logsumexp(-1).square().sum()
        return total / num_items

    return dense if config.loss == "dense" else exact
