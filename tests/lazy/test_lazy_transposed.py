"""`F.cross_entropy(logits.transpose(1, 2), targets)`: sequences as torch wants them, still lazy."""

from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from torch_watch import no_tensor_of

from lmhead import LMHead


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("spelling", ["transpose", "permute", "torch.transpose"])
@pytest.mark.parametrize("soft", [False, True])
def test_loss_of_transposed_logits(reduction: str, spelling: str, soft: bool) -> None:
    torch.manual_seed(0)
    head = LMHead(8, 30, dtype=torch.float64)
    hidden = torch.randn(40, 7, 8, dtype=torch.float64)
    targets = torch.randint(30, (40, 7))
    if soft:
        targets = torch.randn(40, 30, 7, dtype=torch.float64).softmax(1)
    else:
        targets[0, :3] = -100
    dense = F.cross_entropy(
        F.linear(hidden, head.weight).transpose(1, 2), targets, reduction=reduction
    )
    (expected,) = torch.autograd.grad(dense.sum(), head.weight)
    logits = head(hidden)
    turned: Any = {
        "transpose": logits.transpose(1, 2),
        "permute": logits.permute(0, 2, 1),
        "torch.transpose": torch.transpose(cast(Any, logits), 1, -1),
    }[spelling]
    assert turned.shape == (40, 30, 7)
    # Probabilities (N, V, L) have to be turned, which copies them.
    with nullcontext() if soft else no_tensor_of(40 * 7, 30):
        loss = F.cross_entropy(turned, targets, reduction=reduction)
        (gradient,) = torch.autograd.grad(loss.sum(), head.weight)
    assert_close(loss, dense, atol=1e-12)
    assert_close(gradient, expected, atol=1e-12)


def test_dimensions_swap_and_nothing_is_built() -> None:
    head = LMHead(8, 30)
    hidden = torch.randn(4, 7, 8)
    logits, dense = head(hidden), F.linear(hidden, head.weight)
    assert logits.transpose(0, 1).argmax(-1).equal(dense.transpose(0, 1).argmax(-1))
    turned = logits.transpose(1, 2)
    assert "not computed" in repr(turned)
    assert_close(turned.amax(1), dense.amax(-1), atol=1e-6)
    with pytest.raises(ValueError, match=r"targets must have shape \(4, 7\)"):
        F.cross_entropy(turned, torch.zeros(4, 8, dtype=torch.long))
