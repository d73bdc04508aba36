"""Loops that record hundreds of operations: the numbers of dense logits, in moderate time.

Programs whose evaluation was recursive, or whose parts were computed once for each use, would not
end here, or raise a RecursionError.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead import LMHead

D, V = 4, 7


def one_row(z: Any, n: int) -> Any:
    for _ in range(n):
        z[0].add_(0.01)
    return z


def one_row_by_operator(z: Any, n: int) -> Any:
    for _ in range(n):
        z[0] += 0.01
    return z


def overlapping_rows(z: Any, n: int) -> Any:
    for _ in range(n):
        z[:2] += z[1:3] * 1e-3
    return z


def every_row(z: Any, n: int) -> Any:
    for i in range(n):
        z[i % len(z)] /= 0.99
    return z


def every_token(z: Any, n: int) -> Any:
    for i in range(n):
        z[..., i % V] = z[0, 0].detach() * 1e-3
    return z


def overlapping_tokens(z: Any, n: int) -> Any:
    for _ in range(n):
        z[:, 1:] += z[:, :-1] * 1e-3
    return z


def rows_and_tokens(z: Any, n: int) -> Any:
    for i in range(n):
        z[i % 3] *= 0.99
        z[:, 2] = 0.3
    return z


def processors(z: Any, n: int) -> Any:
    for _ in range(n):
        z = z / 1.01
        z = z.masked_fill(z < -0.5, -1.0)
    return z


def functions(z: Any, n: int) -> Any:
    for _ in range(n):
        z = (z * 1.01).tanh()
    return z


def normalised(z: Any, n: int) -> Any:
    for _ in range(n):
        z = z.log_softmax(-1)
    return z


def multiples(z: Any, n: int) -> Any:
    z = z.tanh()
    for _ in range(n):
        z = z * 1.001
    return z


def over_rows(z: Any, n: int) -> Any:
    for _ in range(n // 3):
        z -= z.mean(0, keepdim=True) * 0.1
    return z


def joined(z: Any, n: int) -> Any:
    for _ in range(n // 3):
        z = torch.cat([z[:1] * 0.99, z[1:]])
    return z


LOOPS = (
    one_row, one_row_by_operator, overlapping_rows, every_row, every_token, overlapping_tokens,
    rows_and_tokens, processors, functions, normalised, multiples, over_rows, joined,
)  # fmt: skip


def _results(loop: Callable[[Any, int], Any], n: int, *, rows: int, lazy: bool) -> list[Tensor]:
    torch.manual_seed(0)
    head = LMHead(D, V, dtype=torch.float64)
    hidden = torch.randn(rows, D, dtype=torch.float64, requires_grad=True)
    factor = torch.ones(V, dtype=torch.float64, requires_grad=True)
    logits = head(hidden) if lazy else F.linear(hidden, head.weight, head.bias)
    made = loop(logits * factor, n)
    constant = made.detach().sum(-1)
    made.sin().sum().backward()
    gradients = [hidden.grad, head.weight.grad, factor.grad]
    return [made.sum(), constant, *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loop(loop: Callable[[Any, int], Any]) -> None:
    dense, lazy = (_results(loop, 150, rows=4, lazy=lazy) for lazy in (False, True))
    torch.testing.assert_close(lazy, dense)


@pytest.mark.parametrize("loop", [one_row, functions], ids=lambda loop: loop.__name__)
def test_two_thousand_operations(loop: Callable[[Any, int], Any]) -> None:
    dense, lazy = (_results(loop, 2000, rows=4, lazy=lazy) for lazy in (False, True))
    torch.testing.assert_close(lazy, dense)


def test_hidden_states_are_freed_with_the_results_of_selections() -> None:
    head, freed = LMHead(8, 50), []

    def step() -> None:
        hidden = torch.randn(6, 8, requires_grad=True)
        freed.append(weakref.ref(hidden))
        z: Any = head(hidden)
        z[0] = 0.0
        z[1:].mul_(3.0)
        joined = torch.cat([z, z * 2])[[0, 7, 3]]
        torch.autograd.backward(z.logsumexp(-1).sum() + joined.sigmoid().sum())

    gc.disable()
    try:
        step()
        step()
        assert [hidden() for hidden in freed] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "rows", [slice(None, -1), [2, 0], torch.tensor([True, False, True, True]), (slice(1, 3), 0)]
)
def test_selections_within_transforms(rows: Any) -> None:
    head, x = LMHead(D, V), torch.randn(4, D)

    def loss(z: Any) -> Any:
        return z[rows].logsumexp(-1).sum() if type(rows) is not tuple else z[rows].sum()

    ours = torch.func.grad(lambda a: loss(head(a)))(x)
    dense = torch.func.grad(lambda a: loss(F.linear(a, head.weight)))(x)
    torch.testing.assert_close(ours, dense)
