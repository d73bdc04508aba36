"""Gradients with respect to logits whose vocabulary is not the last dimension: (B, V, T)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lazy_and_dense import backward, ids, twins
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::lmhead.PerformanceWarning")


class Cubed(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx: Any, logits: Any) -> Any:
        ctx.save_for_backward(logits * 1.0)
        return logits**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        made: Tensor = grad * 3 * logits**2
        return made


def weights(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def backward_of_transposed(z: Any) -> None:
    z.transpose(1, 2).backward(weights(2, 13, 3))


def backward_of_permuted(z: Any) -> None:
    z.permute(2, 0, 1).backward(weights(13, 2, 3))


def backward_of_derived(z: Any) -> None:
    (z.transpose(1, 2) * 2).tanh().backward(weights(2, 13, 3))


def backward_after_a_change_of_shape_in_place(z: Any) -> None:
    z.transpose_(1, 2)
    z.backward(weights(2, 13, 3))


def hook(z: Any) -> None:
    turned = z.transpose(1, 2)
    turned.register_hook(lambda grad: grad * weights(13, 1))
    backward(F.cross_entropy(turned, ids(2, 3)))


def hook_on_derived(z: Any) -> None:
    turned = z.transpose(1, 2) * weights(13, 3)
    turned.register_hook(lambda grad: grad * weights(13, 1))
    backward(turned.sigmoid().sum() + turned.logsumexp(1).sum())


def gradient_written_in_place(z: Any) -> None:
    turned = z.permute(2, 0, 1)

    def scale(grad: Any) -> None:
        grad[3] *= 5

    turned.register_hook(scale)
    backward(turned.sigmoid().sum())


def retained(z: Any) -> Any:
    turned = z.transpose(1, 2)
    turned.retain_grad()
    backward(F.cross_entropy(turned, ids(2, 3)))
    return turned.grad


def retained_and_summed(z: Any) -> Any:
    turned = z.transpose(1, 2)
    turned.retain_grad()
    backward(F.cross_entropy(turned, ids(2, 3)) + turned.sigmoid().square().sum() * 2)
    return turned.grad


def differentiated_by_it(z: Any) -> Any:
    turned = z.transpose(1, 2)
    if hasattr(turned, "materialize"):
        turned.retain_grad()
    return torch.autograd.grad(turned.sigmoid().square().sum(), turned)[0]


def own_function(z: Any) -> None:
    backward((Cubed.apply(z.transpose(1, 2) * 1.5) * weights(2, 13, 3)).sum())  # type: ignore[no-untyped-call]


def one_row(z: Any) -> None:
    z[:1, :1].transpose(1, 2).backward(weights(1, 13, 1))


def no_rows(z: Any) -> None:
    z[:0].transpose(1, 2).backward(weights(0, 13, 3))


CASES: list[Callable[[Any], Any]] = [
    backward_of_transposed, backward_of_permuted, backward_of_derived,
    backward_after_a_change_of_shape_in_place, hook, hook_on_derived, gradient_written_in_place,
    retained, retained_and_summed, differentiated_by_it, own_function, one_row, no_rows,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_as_on_a_tensor(case: Callable[[Any], Any]) -> None:
    found = []
    both = twins(2, 3)
    for z in (both.lazy, both.dense):
        for leaf in both.leaves:
            leaf.grad = None
        result = case(z)
        grads = [leaf.grad for leaf in both.leaves]
        found.append([torch.zeros(()) if t is None else t.clone() for t in (*grads, result)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-11)
