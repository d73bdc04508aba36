"""What users do to logits, on dense and lazy ones: the same numbers and gradients, or an error.

Each case was a wrong number or a crash once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead import LMHead

V = 40
pytestmark = pytest.mark.filterwarnings("ignore::lmhead.PerformanceWarning")
torch.manual_seed(11)
GIVEN = torch.randn(2, 3, V)
IDS = torch.randint(V, (2, 3))


def pair(grad: bool) -> list[tuple[Tensor, Tensor, LMHead]]:
    made = []
    for lazy in (False, True):
        torch.manual_seed(5)
        head, hidden = LMHead(8, V), torch.randn(2, 3, 8, requires_grad=grad)
        with torch.no_grad():
            head.weight.normal_()
        with torch.set_grad_enabled(grad):
            logits = head(hidden)
            made.append((logits if lazy else logits.materialize() * 1, hidden, head))
    return made


def new_axis(z: Any) -> Any:
    w = GIVEN[:, None]
    return [z[:, None] * w, z[0, None], z[:, -1, None], z[:, -1][:, None], z[None, :, None]]


def new_axis_written(z: Any) -> Any:
    z[:, :, None][..., 0] = 8.0
    return z * 1


def clone_of_built(z: Any) -> Any:
    z.sort(-1)
    c = z.clone()
    c.cumsum_(-1)
    return z * 1


def array_of_a_clone(z: Any) -> Any:
    z.sort(-1)
    z.detach().clone().numpy()[:] = 0
    return z * 1


def all_rows_of_built(z: Any) -> Any:
    z.sort(-1)
    c = z[[0, 1]]
    c.cumsum_(-1)
    return z * 1


def casts(z: Any) -> Any:
    z = z.detach()
    return [z.long() / 2, z.bool().float(), (z / 2).int().float(), (z * 1e5).half().float().isinf()]


def rounded(z: Any) -> Any:
    return z.bfloat16().float()


def assigned(z: Any) -> Any:
    z.copy_(GIVEN)
    y = z * 2
    z.cumsum_(-1)
    return y


def deep_copied(z: Any) -> Any:
    c = copy.deepcopy(z.detach())
    y = c * 2
    c.cumsum_(-1)
    return [y, c * 1]


def weighted_squares(z: Any) -> Any:
    weight = GIVEN.abs()
    return [
        loss(z, GIVEN, weight=weight, reduction=reduction)  # type: ignore[call-arg]
        for loss in (F.mse_loss, F.l1_loss)
        for reduction in ("mean", "sum", "none")
    ]


def matrix_norms(z: Any) -> Any:
    return [torch.linalg.norm(z[0], 1), torch.linalg.norm(z, 2, dim=(1, 2)), torch.linalg.norm(z)]


def detached_view_of_built(z: Any) -> Any:
    v = z[1:]
    v.sort(-1)
    v.detach().add_(1)
    return z * 1


def relu_of_built_view(z: Any) -> Any:
    v = z[0]
    v.sort(-1)
    F.relu(v, inplace=True)
    return z * 1


def expanded_view_of_built(z: Any) -> Any:
    v = z.expand(2, 2, 3, V)
    v.cumsum(-1)
    z.zero_()
    return v * 1


def flat_copy_of_transposed(z: Any) -> Any:
    z.transpose(0, 1).reshape(-1).zero_()
    return z * 1


def flat_view_and_a_join(z: Any) -> Any:
    v = z.view(-1)
    torch.cat([z, z])
    with torch.no_grad():
        z.mul_(1.5)
    return v * 1


def contiguous_column(z: Any) -> Any:
    c = z[..., 5].contiguous()
    c.zero_()
    return z * 1


def smallest_with_nan(z: Any) -> Any:
    return z.detach().masked_fill(GIVEN > 2, torch.nan).min(-1).values.isnan()


def plus(z: Any) -> Any:
    y = +z
    y.add_(1)
    return z * 1


def by_keyword(z: Any) -> Any:
    return [
        torch.logsumexp(input=z, dim=-1), torch.topk(input=z, k=2).values, torch.sum(input=z, dim=1)
    ]  # fmt: skip


def stacked_after_an_array(z: Any) -> Any:
    z.detach().numpy()
    return torch.stack([z, z])


def column_of_integers(z: Any) -> Any:
    z[..., 0] = z.argmax(-1)
    return z * 1


CASES: list[Callable[[Any], Any]] = [
    new_axis, new_axis_written, clone_of_built, array_of_a_clone, all_rows_of_built, casts, rounded,
    assigned, deep_copied, weighted_squares, matrix_norms, detached_view_of_built,
    flat_view_and_a_join, relu_of_built_view, expanded_view_of_built, flat_copy_of_transposed,
    contiguous_column, smallest_with_nan, plus, by_keyword, stacked_after_an_array,
    column_of_integers,
]  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["constants", "gradients"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_the_same_numbers(case: Callable[[Any], Any], grad: bool) -> None:
    results = []
    for z, hidden, head in pair(grad):
        with torch.set_grad_enabled(grad):
            made = case(z)
            values = list(made) if isinstance(made, list) else [made]
            smooth = [t for t in values if t.requires_grad]
            if smooth:
                torch.autograd.backward(sum((t * t).sum() for t in smooth))
        numbers = [t.detach() * 1 for t in values]
        tensors = (hidden, head.weight)
        results.append([*numbers, *(_gradient(t) for t in tensors if grad)])
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(
            np.asarray(b, np.float64), np.asarray(a, np.float64), rtol=2e-4, atol=2e-4
        )


def _gradient(t: Tensor) -> Tensor:
    """The gradient; 0 where nothing depends on the tensor."""
    return torch.zeros_like(t) if t.grad is None else t.grad


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_a_tensor_that_changes_after_it_was_joined(join: Callable[..., Tensor]) -> None:
    (_, _, _), (z, _, _) = pair(False)
    given = GIVEN.clone()
    joined = join([z, given])
    given.zero_()
    with pytest.raises(RuntimeError, match="modified in place"):
        joined.sum(-1)


def test_a_column_of_built_logits_that_change() -> None:
    (_, _, _), (z, _, _) = pair(False)
    z.sort(-1)
    column = z[..., 5]
    z.cumsum_(-1)
    with pytest.raises(RuntimeError, match="select it again"):
        column.sum()


# Hooks that change the gradient of lazy logits in place -----------------------------------------


def clamped(g: Tensor) -> Tensor:
    return g.clamp_(-0.01, 0.01)


def tripled_copy(g: Tensor) -> Tensor:
    g = g.clone()
    g.mul_(3)
    return g


def one_token(g: Tensor) -> None:
    g[..., 3] = 0


def one_row(g: Tensor) -> None:
    g[0].zero_()


def through_data(g: Tensor) -> None:
    g.data.mul_(3)


def through_a_view(g: Tensor) -> None:
    g.view(-1, V).mul_(2)


def twice(g: Tensor) -> Tensor:
    g += g.clone()
    return g


@pytest.mark.parametrize(
    "hook", [clamped, tripled_copy, one_token, one_row, through_data, through_a_view, twice],
    ids=lambda h: h.__name__,
)  # fmt: skip
def test_hooks_that_write_to_the_gradient(hook: Callable[[Tensor], Any]) -> None:
    results = []
    for z, hidden, head in pair(True):
        z.register_hook(hook)  # type: ignore[no-untyped-call]
        torch.autograd.backward(F.cross_entropy(z.view(-1, V), IDS.view(-1)))
        results.append((hidden.grad, head.weight.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def test_retained_gradients_are_tensors_of_their_own() -> None:
    results = []
    for z, _, _ in pair(True):
        z.retain_grad()
        torch.autograd.backward(z.logsumexp(-1).sum() + z.pow(2).sum())
        assert z.grad is not None
        z.grad.clone().zero_()
        z.grad += z.grad * 2
        results.append(z.grad * 1)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection() -> None:
    (_, _, _), (z, hidden, _) = pair(True)
    with torch.autograd.detect_anomaly(check_nan=True):
        torch.autograd.backward(z.logsumexp(-1).sum())
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())
