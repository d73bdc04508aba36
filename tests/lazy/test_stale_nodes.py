"""Gradients that enter at an object after a write through a view of it, its base, or a tensor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lazy_and_dense import backward, twins
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lmhead import LMHead

pytestmark = pytest.mark.filterwarnings("ignore::lmhead.PerformanceWarning")

FACTOR = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
ADDED = torch.randn(1, 3, 13, dtype=torch.float64, requires_grad=True)


class Squared(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx: Any, logits: Any) -> Any:
        ctx.save_for_backward(logits * 1.0)
        return (logits * logits).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        made: Tensor = 2 * grad * logits
        return made


def squared(z: Any) -> None:
    backward(Squared.apply(z))  # type: ignore[no-untyped-call]


def weights(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def of_hook(z: Any, read: Any = None) -> None:
    z.grad_fn  # noqa: B018 (torch fails without it)
    z.register_hook(lambda grad: grad * weights(*grad.shape))
    backward((z if read is None else read).sigmoid().sum())


def retained(z: Any, read: Any = None) -> Any:
    z.retain_grad()
    backward((z if read is None else read).sigmoid().sum() + z.logsumexp(-1).sum())
    return z.grad


# Ways to write through another object ---------------------------------------------------------


def by_view(z: Any) -> Any:
    z[:, :-1].mul_(FACTOR)
    return z


def by_views(z: Any) -> Any:
    z[0].mul_(FACTOR)
    z[:, 1].add_(FACTOR)
    z[..., :5] *= 2
    return z


def by_base(z: Any) -> Any:
    view = z[1]
    z.mul_(FACTOR)
    return view


def by_base_of_transposed(z: Any) -> Any:
    view = z.transpose(1, 2)
    z.mul_(FACTOR)
    z[0].zero_()
    return view


def by_mask(z: Any) -> Any:
    z = z.clone()
    z[z.detach() > 0] *= FACTOR
    return z


def by_cumulative_sum(z: Any) -> Any:
    z = z.clone()
    z.cumsum_(-1)
    return z


def by_cumulative_sum_of_a_view(z: Any) -> Any:
    z[0].cumsum_(-1)
    return z


def by_added_rows(z: Any) -> Any:
    z = z.clone()
    view = z[1]
    z.index_add_(0, torch.tensor([1]), ADDED)
    z.mul_(2)
    z.index_add_(0, torch.tensor([0]), ADDED)
    return view


def by_many_views(z: Any) -> Any:
    views = [z[i % 2, i % 3] for i in range(20)]
    z.mul_(FACTOR)
    views[0].grad_fn  # noqa: B018 (torch fails without it)
    views[0].mul_(2)
    return views[-1]


def by_view_without_gradient(z: Any) -> Any:
    with torch.no_grad():
        z[0].mul_(2)
    return z


def by_a_tensor_of_its_memory(z: Any) -> Any:
    z = z.clone()
    z.diagonal(dim1=0, dim2=1).mul_(FACTOR)
    return z


WRITES = [
    by_view, by_views, by_base, by_base_of_transposed, by_mask, by_cumulative_sum,
    by_cumulative_sum_of_a_view, by_added_rows, by_many_views, by_view_without_gradient,
]  # fmt: skip


# Ways to read the gradient --------------------------------------------------------------------


def by_backward(z: Any) -> None:
    z.backward(weights(*z.shape))


def by_autograd_backward(z: Any) -> None:
    torch.autograd.backward([z], [weights(*z.shape)])


def by_gradient(z: Any) -> Tensor:
    (made,) = torch.autograd.grad([z], [FACTOR], [weights(*z.shape)], allow_unused=True)
    return torch.zeros(()) if made is None else made


def by_function(z: Any) -> None:
    squared(z.view_as(z))


def by_function_of_itself(z: Any) -> None:
    z.requires_grad  # noqa: B018
    squared(z)


def by_checkpoint(z: Any) -> None:
    z.requires_grad  # noqa: B018
    backward(checkpoint(lambda z: z.sigmoid().sum(), z, use_reentrant=True))


def by_clone(z: Any) -> None:
    squared(z.clone())


READS = [
    by_backward, by_autograd_backward, by_gradient, by_function, by_function_of_itself,
    by_checkpoint, by_clone,
]  # fmt: skip


def both(case: Callable[[Any], Any], *, trained: bool = True) -> list[list[Tensor]]:
    """Return result and gradients of a function, of lazy and of dense logits."""
    found = []
    logits = twins(2, 3, trained=trained)
    leaves = [*logits.leaves, FACTOR, ADDED]
    for z in (logits.lazy, logits.dense):
        for leaf in leaves:
            leaf.grad = None
        result = case(z)
        grads = [leaf.grad for leaf in leaves]
        found.append(
            [torch.zeros(()) if t is None else t.detach().clone() for t in (*grads, result)]
        )
    return found


def assert_equal(found: list[list[Tensor]]) -> None:
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("write", [*WRITES, by_a_tensor_of_its_memory])
def test_as_on_a_tensor(write: Callable[[Any], Any], read: Callable[[Any], Any]) -> None:
    assert_equal(both(lambda z: read(write(z))))


@pytest.mark.parametrize("read", [of_hook, retained])
@pytest.mark.parametrize("write", WRITES)
def test_hooks_after_a_write(write: Callable[[Any], Any], read: Callable[[Any], Any]) -> None:
    assert_equal(both(lambda z: read(write(z))))


@pytest.mark.parametrize("read", [by_backward, by_gradient, by_function, by_checkpoint])
@pytest.mark.parametrize("write", [by_view, by_base, by_added_rows, by_many_views])
def test_constants(write: Callable[[Any], Any], read: Callable[[Any], Any]) -> None:
    assert_equal(both(lambda z: read(write(z)), trained=False))


@pytest.mark.parametrize("write", [by_view, by_views, by_base, by_base_of_transposed])
def test_a_function_that_is_called_at_once(write: Callable[[Any], Any]) -> None:
    """torch does not ask the object before it calls the function."""
    assert_equal(both(lambda z: squared(write(z))))


def test_a_function_of_one_of_many_views_raises() -> None:
    views = list(twins(20).lazy)
    views[0].mul_(2)
    with pytest.raises(RuntimeError, match="written to through another object"):
        squared(views[1])
    squared(views[1].view(-1))


# Objects with hooks or retain_grad() ----------------------------------------------------------


def retained_before_a_write(z: Any) -> Any:
    z = z.clone()
    z.retain_grad()
    turned = z.transpose(0, 1)
    z.mul_(2)
    backward(z.sum() + (turned * turned).sum())
    return z.grad


def retained_before_a_write_through_a_view(z: Any) -> Any:
    z = z.clone()
    z.retain_grad()
    turned = z.transpose(0, 1)
    turned.mul_(2)
    backward(z.logsumexp(-1).sum() + (turned * turned).sum())
    return z.grad


def retained_after_a_write(z: Any) -> Any:
    z = z.clone()
    turned = z.transpose(0, 1)
    z.mul_(2)
    return retained(z, turned)


def hook_before_a_write_through_a_view(z: Any) -> None:
    z.register_hook(lambda grad: grad * weights(2, 3, 13))
    z[0].mul_(2)
    backward(z.sigmoid().sum())


def hook_and_views_of_both_times(z: Any) -> None:
    first = z[0]
    z.mul_(2)
    z.register_hook(lambda grad: grad * weights(2, 3, 13))
    second = z[1]
    z.exp_()
    backward(first.sigmoid().sum() + second.sum() + z.logsumexp(-1).sum())


def hook_of_a_view_before_a_write(z: Any) -> None:
    view = z[0]
    view.register_hook(lambda grad: grad * 10)  # torch does not call it after the write
    z.mul_(2)
    view.grad_fn  # noqa: B018
    backward(view.sigmoid().sum() + view.sort(-1)[0].sin().sum())


def view_retained_before_a_write(z: Any) -> Any:
    view = z[0]
    view.retain_grad()
    z.mul_(2)
    view.grad_fn  # noqa: B018
    backward(view.sigmoid().sum() + (z * z).sum())
    return view.grad


def retained_then_a_view_is_built(z: Any) -> Any:
    z = z.clone()
    z.retain_grad()
    turned = z.transpose(0, 1)
    backward(turned.diagonal(dim1=0, dim2=1).square().sum() + z.logsumexp(-1).sum())
    return z.grad


def retained_then_a_view_is_built_and_written(z: Any) -> Any:
    z = z.clone()
    z.retain_grad()
    turned = z.transpose(0, 1)
    turned[0].cumsum_(-1)
    backward(turned.sort(-1)[0].square().sum() + (z.logsumexp(-1) * FACTOR).sum())
    return z.grad


def hook_after_a_write_to_what_was_built(z: Any) -> None:
    z = z.clone()
    z.cumsum_(-1)
    view = z[0]
    z.mul_(2)
    z.register_hook(lambda grad: grad * weights(2, 3, 13))
    z.cumsum_(-1)
    backward(view.sort(-1)[0].sin().sum() + z.sort(-1)[0].sin().sum())


def retained_before_a_write_to_a_column(z: Any) -> Any:
    z = z.clone()
    z.retain_grad()
    column = z[..., 3]
    column.exp_()
    backward(column.square().sum() + z.sigmoid().sum())
    return z.grad


@pytest.mark.parametrize(
    "case",
    [
        retained_before_a_write_to_a_column,
        retained_then_a_view_is_built_and_written, hook_after_a_write_to_what_was_built,
        retained_before_a_write, retained_before_a_write_through_a_view, retained_after_a_write,
        hook_of_a_view_before_a_write, view_retained_before_a_write,
        hook_before_a_write_through_a_view, hook_and_views_of_both_times,
        retained_then_a_view_is_built,
    ],
)  # fmt: skip
def test_hooks(case: Callable[[Any], Any]) -> None:
    assert_equal(both(case))


def test_hooks_and_writes_to_a_tensor_that_shares_the_memory() -> None:
    z = twins(2, 3).lazy.clone()
    z.retain_grad()
    z.diagonal(dim1=0, dim2=1)
    with pytest.raises(RuntimeError, match="cumsum_ is not supported on lazy logits with hooks"):
        z.cumsum_(-1)
    z = by_a_tensor_of_its_memory(twins(2, 3).lazy)
    with pytest.raises(RuntimeError, match="is not supported on lazy logits that were built"):
        z.retain_grad()


def test_results_of_a_view_pass_by_an_object_that_gets_hooks_later() -> None:
    z = twins(2, 3).lazy.clone()
    view = z[0]
    z.mul_(2)
    total = view.sum()
    with pytest.raises(RuntimeError, match="must be called before lazy logits are used"):
        z.retain_grad()
    backward(total)


# Learned values ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [
        lambda d: d.index_add_(0, torch.tensor([0]), ADDED),
        lambda d: d.masked_scatter_(d > 0, ADDED.expand(2, 3, 13)),
        lambda d: d[0].cumsum_(-1).mul_(FACTOR),
        lambda d: d.__setitem__(d > 0, ADDED.expand(2, 3, 13)[d > 0]),
    ],
)
def test_learned_values_are_not_written_to_detached_logits(write: Callable[[Any], Any]) -> None:
    z = twins(2, 3).lazy
    with pytest.raises(RuntimeError, match="cannot give a gradient to detached lazy logits"):
        write(z.detach())


def values_are_kept_under_no_grad(z: Any) -> Any:
    z = z.clone()
    z.index_add_(0, torch.tensor([0]), ADDED)
    assert z.requires_grad
    with torch.no_grad():
        z.mul_(2)
    backward(z.square().sum() + z[0].cumsum(-1).sum())
    return z


def values_are_added_to_what_was_built(z: Any) -> Any:
    z = z.clone()
    before = z * 2
    z[0].cumsum_(-1)
    z[0].sort(-1)
    z.index_add_(0, torch.tensor([1]), ADDED)
    z[1].mul_(FACTOR)
    backward((z * before).sigmoid().sum())
    return z.detach().sort(-1)[0]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "case", [values_are_kept_under_no_grad, values_are_added_to_what_was_built]
)
def test_learned_values_in_built_logits(case: Callable[[Any], Any], trained: bool) -> None:
    assert_equal(both(case, trained=trained))


def test_learned_values_are_not_written_to_exported_memory() -> None:
    z = twins(2, 3, trained=False).lazy
    z.numpy()
    with pytest.raises(RuntimeError, match="were exported"):
        z.index_add_(0, torch.tensor([0]), ADDED)


def test_views_of_constants_require_a_gradient_after_a_learned_write() -> None:
    head = LMHead(5, 13, dtype=torch.float64).requires_grad_(False)
    z = head(weights(2, 3, 5))
    views = [z[0] for _ in range(20)]
    z.mul_(FACTOR)
    assert all(view.requires_grad for view in views)
    z = head(weights(2, 3, 5))
    z[0].index_add_(0, torch.tensor([0, 1, 2]), ADDED[0])
    assert z.requires_grad
    loss = F.cross_entropy(z[1], torch.tensor([1, 2, 3]))
    (made,) = torch.autograd.grad(loss + z[0].sum(), ADDED)
    assert torch.allclose(made, torch.ones_like(made))


# Other changes between the call and the gradient ----------------------------------------------


def test_logits_that_were_built_under_no_grad_have_gradients() -> None:
    def of(z: Any) -> None:
        with torch.no_grad():
            z.materialize() if hasattr(z, "materialize") else z.clone()
        built = z.materialize() if hasattr(z, "materialize") else z.clone()
        backward((built + z.cumsum(-1)).square().sum())

    assert_equal(both(of))


@pytest.mark.parametrize("name", ["weight", "operand"])
@pytest.mark.parametrize("derived", [False, True])
def test_a_tensor_that_was_modified_before_the_gradient(name: str, derived: bool) -> None:
    case = twins(2, 3)
    factor = torch.ones(13, dtype=torch.float64)
    z = case.lazy.tanh() if derived else case.lazy
    if name == "operand":
        z = z * factor
    with torch.no_grad():
        (case.head.weight if name == "weight" else factor).mul_(2)
    with pytest.raises(RuntimeError, match="modified in place"):
        z.backward(weights(2, 3, 13))


def test_a_write_after_one_under_no_grad_to_logits_with_hooks() -> None:
    z = LMHead(5, 7)(torch.randn(4, 5, requires_grad=True))
    z.register_hook(lambda g: g * 2)
    view = z.view(2, 2, 7)
    with torch.no_grad():
        z.div_(1.3)
    with pytest.raises(RuntimeError, match="under no_grad"):
        view[..., 3] = -2.0
