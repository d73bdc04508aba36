"""The guard itself: it must catch what plain torch does, or the tests that lean on it are empty."""

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_watch import (
    Allocations,
    TooLargeError,
    count_products,
    no_operation,
    no_tensor_of,
    peak_elements,
)

N, D, V = 12, 4, 30


def leaves() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(N, D, requires_grad=True)
    weight = torch.randn(V, D, requires_grad=True)
    return hidden, weight, torch.randint(V, (N,))


def test_eager_logits_are_caught() -> None:
    hidden, weight, targets = leaves()
    with (
        pytest.raises(TooLargeError, match="allocated 360 elements for shape"),
        no_tensor_of(N, V),
    ):
        F.cross_entropy(F.linear(hidden, weight), targets)


@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.empty(V, N),
        lambda: torch.zeros(3, 4, V),
        lambda: torch.empty(V * N, dtype=torch.bool),
        lambda: torch.empty(N + 1, V)[0],
        lambda: torch.ones(1).expand(N, V).contiguous(),
        lambda: torch.mm(torch.ones(N, D), torch.ones(D, V), out=torch.empty(0)),
    ],
    ids=["transposed", "three dimensions", "mask", "a slice of it", "expanded copy", "out="],
)
def test_every_way_to_allocate_is_caught(build: Callable[[], Tensor]) -> None:
    with pytest.raises(TooLargeError), no_tensor_of(N, V):
        build()


def test_backward_is_watched_too() -> None:
    small = torch.ones(N, 1, requires_grad=True)
    total = (small.expand(N, V) * 2).sum()
    with pytest.raises(TooLargeError), no_tensor_of(N, V):
        torch.autograd.backward(total)


def test_a_swallowed_failure_still_fails() -> None:
    with pytest.raises(TooLargeError), no_tensor_of(N, V), suppress(AssertionError):
        torch.empty(N, V)


def test_views_and_in_place_results_pass() -> None:
    big = torch.zeros(N, V)
    with no_tensor_of(N, V) as watch:
        big.add_(1).view(-1)[3:].exp_()
        torch.ones(1).expand(N, V)
        torch.exp(big, out=big)
    assert watch.largest == 1


def test_one_element_less_passes() -> None:
    with no_tensor_of(N, V) as watch:
        torch.empty(N * V - 1)
    assert watch.largest == N * V - 1


def test_no_operation() -> None:
    tensor = torch.ones(3)
    with no_operation():
        assert tensor.shape == (3,)
    with pytest.raises(AssertionError, match=r"aten\.add"), no_operation():
        tensor + 1


def test_peak_elements() -> None:
    hidden, weight, _ = leaves()
    assert peak_elements(lambda: F.linear(hidden, weight)) == N * V
    with Allocations() as watch:
        pass
    assert watch.largest == 0


def test_eager_training_costs_three_products() -> None:
    hidden, weight, targets = leaves()
    forward = count_products(lambda: F.linear(hidden, weight), N, D, V)
    both = count_products(
        lambda: torch.autograd.backward(F.cross_entropy(F.linear(hidden, weight), targets)), N, D, V
    )
    assert (forward, both) == (1, 3)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: x @ w.T,
        lambda x, w: torch.zeros(N, V).addmm_(x, w.T),
        lambda x, w: torch.addmm(torch.zeros(V), x, w.T),
        lambda x, w: torch.mm(x, w.T, out=torch.empty(N, V)),
        lambda x, w: torch.bmm(x[None], w.T[None]),
        lambda x, w: torch.baddbmm(torch.zeros(1, N, V), x[None], w.T[None]),
        lambda x, w: torch.stack([w @ row for row in x]),
        lambda x, w: torch.einsum("nd,vd->nv", x, w),
        F.linear,
    ],
    ids=["@", "addmm_", "addmm", "out=", "bmm", "baddbmm", "mv", "einsum", "linear"],
)
def test_every_spelling_of_a_product_counts(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    hidden, weight, _ = leaves()
    with torch.no_grad():
        assert count_products(lambda: product(hidden, weight), N, D, V) == 1
