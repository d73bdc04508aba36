"""Arithmetic on `LazyLogits`: dtypes, scalars and soft-capping written out, all without logits."""

import copy
import warnings
from typing import Any

import pytest
import torch
from compare import assert_close
from lazy_and_dense import Twins, as_function, assert_same, twins
from torch_watch import Allocations

from lmhead import LMHead, PerformanceWarning

B, T, V = 2, 3, 13


@pytest.fixture
def case() -> Twins:
    return twins(B, T)


def nothing_like_logits() -> Allocations:
    """Nothing as large as the logits may come to exist."""
    return Allocations(limit=B * T * V)


@pytest.mark.parametrize(
    "convert",
    [
        "z.float()",
        "z.double()",
        "z.to(torch.float32)",
        "z.to(dtype=torch.float32)",
        "z.to('cpu')",
        "z.to('cpu', torch.float32)",
        "z.to(device='cpu', dtype=torch.float32, copy=True)",
        "z.to(torch.zeros(1, dtype=torch.float32))",
        "z.cpu()",
        "z.clone()",
    ],
)
def test_conversions_stay_lazy(case: Twins, convert: str) -> None:
    with nothing_like_logits():
        as_function(convert)(case.lazy)
    assert_same(case, as_function(convert), lazy=True, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float_after_a_half_head_is_exact_to_float32(dtype: torch.dtype) -> None:
    case = twins(B, T, dtype=dtype, trained=False)
    truth = Twins(copy.deepcopy(case.head).double(), case.hidden.double()).dense.float()
    assert case.lazy.dtype == dtype
    ours = case.lazy.float()
    assert ours.dtype == torch.float32
    assert_close(ours.logsumexp(-1), truth.logsumexp(-1), rtol=1e-5, atol=1e-5, dtype=torch.float32)
    assert case.lazy.logsumexp(-1).dtype == dtype


SCALARS = [
    "z * 0.5",
    "2 * z",
    "z / 0.7",
    "z + 3",
    "3.0 + z",
    "z - 1",
    "1 - z",
    "-z",
    "z * -2",
    "(z + 1) * 2 - 3",
    "(z * 2 + 1) / 4 - 2",
    "torch.mul(z, 3)",
    "torch.div(z, 3)",
    "z.mul(3).div(2).add(1).sub(0.5)",
    "(z[:, -1] / 2).float().double() * 3",
]
SOFTCAPS = [
    "torch.tanh(z / 4) * 4",
    "4 * (z / 4).tanh()",
    "4 * torch.tanh(z / 4) / 0.5 + 1",
    "4 * torch.tanh(2 * z / 4)",
    "torch.tanh(z)",
]
UNUSUAL = [
    "torch.tanh(z * 2 + 1) * 3 - 1",
    "5 * torch.tanh((4 * torch.tanh(z / 4)) / 5)",
    "-4 * torch.tanh(z / 4)",
    "z * tensor(2.0)",
    "z / torch.full((2, 3, 1), 0.5)",
    "z * 0",
    "z ** 2",
]


def ask_both(case: Twins, arithmetic: str, *, lazy: bool | None) -> None:
    assert_same(case, as_function(arithmetic), lazy=lazy, rtol=1e-6, atol=1e-6)
    assert_same(case, as_function(f"({arithmetic}).double().logsumexp(-1)"), rtol=1e-6, atol=1e-6)
    assert_same(case, as_function(f"({arithmetic}).argmax(-1)"))


@pytest.mark.parametrize("arithmetic", SCALARS + SOFTCAPS)
def test_scalars_and_softcapping_written_out_stay_lazy(case: Twins, arithmetic: str) -> None:
    with nothing_like_logits():
        as_function(arithmetic)(case.lazy)
    ask_both(case, arithmetic, lazy=True)


@pytest.mark.parametrize("arithmetic", SCALARS)
def test_scalars_after_the_softcap_of_the_head_stay_lazy(arithmetic: str) -> None:
    case = twins(B, T, softcap=3.0, scale=1.5)
    with nothing_like_logits():
        as_function(arithmetic)(case.lazy)
    ask_both(case, arithmetic, lazy=True)


@pytest.mark.parametrize("arithmetic", SOFTCAPS + UNUSUAL)
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["plain", "softcap"])
def test_anything_else_is_right_whatever_it_costs(arithmetic: str, softcap: float | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        ask_both(twins(B, T, softcap=softcap, scale=1.5), arithmetic, lazy=None)


def test_in_place_spelling_rebinds() -> None:
    def tempered(z: Any) -> Any:
        z /= 0.7
        z *= 2
        z += 1
        z -= 0.5
        return z.logsumexp(-1)

    assert_same(twins(B, T, trained=False), tempered)


def test_operations_leave_their_operand_alone(case: Twins) -> None:
    lazy = case.lazy
    before = lazy.logsumexp(-1)
    _ = lazy * 3, torch.tanh(lazy), lazy[0], lazy.float(), lazy.view(-1, V), -lazy
    assert_close(lazy.logsumexp(-1), before)


def test_values_that_are_used_twice_at_each_step_are_visited_once() -> None:
    """A chain of 40 steps, each of which uses the one before twice: 2^40 paths to the head."""
    head, hidden = LMHead(6, 20), torch.randn(3, 6, requires_grad=True)
    weight = head.weight.detach().clone().requires_grad_()
    dense_hidden = hidden.detach().clone().requires_grad_()
    z, dense = head(hidden), dense_hidden @ weight.T
    for _ in range(40):
        z, dense = torch.sigmoid(z) + z * 0.9, torch.sigmoid(dense) + dense * 0.9
    made = torch.autograd.grad(z.sum(), [hidden, head.weight])
    wanted = torch.autograd.grad(dense.sum(), [dense_hidden, weight])
    assert_close(made[0], wanted[0], atol=1e-4)
    assert_close(made[1], wanted[1], atol=1e-4)
