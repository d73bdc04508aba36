"""Targets that a mask of the vocabulary forbids: their logits are constants, as in torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from torch import Tensor

from lmhead import LMHead

MASK = torch.zeros(11, dtype=torch.bool)
MASK[[2, 5]] = True
TARGETS = torch.tensor([2, 3, 5])  # the first and the last are masked
LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "log-probability": lambda z: z.log_softmax(-1).gather(-1, TARGETS[:, None]),
    "logit less logsumexp": lambda z: z.gather(-1, TARGETS[:, None]) - z.logsumexp(-1)[:, None],
    "cross-entropy": lambda z: F.cross_entropy(z, TARGETS),
    "cross-entropy of rows": lambda z: F.cross_entropy(z, TARGETS, reduction="none"),
    "of a multiple": lambda z: F.cross_entropy(2 * z, TARGETS, reduction="sum"),
}


@pytest.mark.parametrize("mask", [MASK, MASK.expand(3, 11).clone()], ids=["tokens", "rows"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_masked_target_has_no_gradient_of_its_own(name: str, mask: Tensor) -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 4, dtype=torch.float64) for n in (3, 11))
    head = LMHead(4, 11, dtype=torch.float64)
    head.weight.data.copy_(weight)
    found = []
    for lazy in (False, True):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        leaf = head.weight if lazy else w
        z: Any = (head(h) if lazy else F.linear(h, w)).masked_fill(mask, -torch.inf)
        value = LOSSES[name](z)
        found.append((value.detach(), *torch.autograd.grad(value.sum(), [h, leaf])))
    for theirs, ours in zip(*found, strict=True):
        assert_close(ours, theirs, atol=1e-12)
