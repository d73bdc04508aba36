"""A token that does not count counts for nothing, whatever its hidden state holds."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from torch import Tensor, nn

from lmhead import LMHead
from lmhead.vocab import AdaptiveHead, HierarchicalHead, SampledLoss

Loss = Callable[..., Tensor]
TARGETS = torch.tensor([3, -100, 45, 7, -100])


def adaptive() -> nn.Module:
    return AdaptiveHead(8, 50, cutoffs=[10, 20], bias=True)


def tree() -> nn.Module:
    return HierarchicalHead(8, 50, tree="balanced", arity=3)


def sampled(method: Any) -> Callable[[], nn.Module]:
    return lambda: SampledLoss(LMHead(8, 50, bias=True), num_samples=10, method=method, seed=0)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "adaptive": adaptive,
    "tree": tree,
    "sampled softmax": sampled("sampled_softmax"),
    "nce": sampled("nce"),
}


def loss_of(module: nn.Module, hidden: Tensor, targets: Tensor, **options: Any) -> Tensor:
    if isinstance(module, SampledLoss):
        module.step.zero_()
        loss: Tensor = module(hidden, targets, reduction=options["reduction"])
        return loss
    return F.cross_entropy(module(hidden), targets, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_a_nan_in_an_ignored_row_goes_nowhere(
    make: Callable[[], nn.Module], smoothing: float, reduction: str
) -> None:
    torch.manual_seed(0)
    module = make().double()
    keep = TARGETS != -100
    hidden = torch.randn(5, 8, dtype=torch.float64)
    broken = hidden.clone()
    broken[~keep] = math.nan
    found = []
    for states, targets in ((hidden[keep], TARGETS[keep]), (broken, TARGETS)):
        module.zero_grad()
        states.requires_grad_()
        options = {"reduction": reduction, "label_smoothing": smoothing}
        loss = loss_of(module, states, targets, **options)
        (loss * (1 + loss.detach())).sum().backward()  # type: ignore[no-untyped-call]
        grads = [p.grad for p in module.parameters()]
        found.append((loss.detach(), states.grad, grads))
    (loss, grad, grads), (other, other_grad, other_grads) = found
    assert other_grad is not None
    assert_close(other[keep] if reduction == "none" else other, loss, atol=1e-12)
    assert_close(other_grad[keep], grad, atol=1e-12)  # type: ignore[arg-type]
    assert not other_grad[~keep].any()
    for x, y in zip(other_grads, grads, strict=True):
        assert_close(x, y, atol=1e-12)  # type: ignore[arg-type]
