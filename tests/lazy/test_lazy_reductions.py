"""Reductions over the vocabulary together with other dimensions, or over those alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lmhead import LMHead
from lmhead.lazy import LazyLogits

EXPRESSIONS = [
    "z.std(dim=(1, 2))",
    "z.var(dim=(0, 2), keepdim=True)",
    "z.var(dim=(1, 2), unbiased=False)",
    "z.var(dim=(0, 1, 2), keepdim=True)",
    "z.std()",
    "z.argmax()",
    "z.argmin()",
    "z.argmax(dim=None)",
    "z[0, 0].argmax()",
    "z.argmax(0)",
    "z.max(0).values",
    "z.max(1).indices",
    "z.min(0, keepdim=True).values",
    "z.log_softmax(-1).logsumexp(-1)",
    "torch.special.entr(z.softmax(-1)).sum(-1)",
]


def value_and_gradients(expression: str, z: Any, leaves: list[Tensor]) -> list[Tensor]:
    made = eval(expression, {"z": z, "torch": torch})
    if isinstance(made, LazyLogits):
        made = torch.stack([made[..., i] for i in range(made.shape[-1])], -1)
    if not made.requires_grad:
        return [made]
    return [made.detach(), *torch.autograd.grad(made.sin().sum(), leaves)]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_as_a_tensor_without_building_it(expression: str) -> None:
    torch.manual_seed(0)
    head = LMHead(8, 17, dtype=torch.float64)
    hidden = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    leaves = [hidden, head.weight]
    ours = value_and_gradients(expression, head(hidden), leaves)
    theirs = value_and_gradients(expression, hidden @ head.weight.T, leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


THRESHOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "softmax": lambda a, _: a.softmax(-1),
    "log_softmax": lambda a, _: a.log_softmax(-1) * 1.5,
    "sum": lambda a, b: a + b,
    "contrast": lambda a, b: a.log_softmax(-1) - 0.5 * b.log_softmax(-1),
    "cubes": lambda a, _: a.pow(3),
}


@pytest.mark.parametrize("program", THRESHOLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_threshold_from_topk_keeps_k_tokens(program: str, dtype: torch.dtype) -> None:
    """The k-th largest is not below itself, whatever the shape of the products behind each."""
    torch.manual_seed(0)
    n, vocab, size, k = 200, 3000, 64, 10
    heads = [LMHead(size, vocab, bias=False, dtype=dtype) for _ in range(2)]
    with torch.no_grad():
        for head in heads:
            head.max_bytes = 2**20
        a, b = (head(4 * torch.randn(n, size, dtype=dtype)) for head in heads)
        values = THRESHOLDS[program](a, b)
        limit = values.topk(k).values[:, -1:]
        assert (values >= limit).sum(-1).tolist() == [k] * n
        assert (values == limit).sum(-1).tolist() == [1] * n
        assert (limit > values).sum(-1).tolist() == [vocab - k] * n
        kept = values.masked_fill(values < limit, 0.0)
        assert kept.count_nonzero(-1).tolist() == [k] * n
