"""Code that writes through columns and views, attaches hooks, or builds logits before the loss.

Each function is called on lazy logits (2, 3, 13) and on dense ones; values and gradients agree.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lazy_and_dense import Twins, assert_same, gradients, ids, twins
from torch import Tensor

from lmhead import LMHead

pytestmark = pytest.mark.filterwarnings("ignore::lmhead.PerformanceWarning")

SNIPPETS: dict[str, Callable[[Any], Any]] = {}


def snippet(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    SNIPPETS[function.__name__] = function
    return function


def row_mask() -> Tensor:
    return torch.tensor([[True, False, True], [False, True, True]])


# Columns: logits[..., id] --------------------------------------------------------------------


@snippet
def add_one_column_to_another(z: Any) -> Any:
    z[..., 0] += z[..., 1]
    return z.logsumexp(-1)


@snippet
def scale_a_column(z: Any) -> Any:
    column = z[..., 0]
    column.mul_(2).exp_()
    return column + z.logsumexp(-1)


@snippet
def write_through_a_view_of_a_column(z: Any) -> Any:
    z[..., 0].view(-1).zero_()
    z[..., 1].unsqueeze(-1).fill_(3.0)
    z[..., 2][0].sub_(1.0)
    z[..., 3][row_mask()] = 5.0
    return z.logsumexp(-1)


@snippet
def column_after_the_logits_were_built(z: Any) -> Any:
    column = z[0, 0, 2]
    z[0, 0].tolist()
    return column * 2


@snippet
def write_a_column_after_the_logits_were_built(z: Any) -> Any:
    column = z[..., 2]
    z.sort(-1)
    column.view(-1).mul_(3)
    return z.sum(-1)


# Built before the loss -----------------------------------------------------------------------


@snippet
def sorted_under_no_grad_before_the_loss(z: Any) -> Any:
    with torch.no_grad():
        z.sort(-1)
    return z.logsumexp(-1)


@snippet
def numpy_under_no_grad_before_the_loss(z: Any) -> Any:
    with torch.no_grad():
        z.numpy()
    return z.logsumexp(-1)


@snippet
def sorted_under_inference_mode_before_the_loss(z: Any) -> Any:
    with torch.inference_mode():
        z.sort(-1)
    return z.logsumexp(-1)


@snippet
def view_sorted_under_no_grad_before_the_loss(z: Any) -> Any:
    y = z[:, :-1]
    with torch.no_grad():
        y.cumsum(-1)
    return y.logsumexp(-1).sum() + z.logsumexp(-1)


@snippet
def cast_by_type_before_the_loss(z: Any) -> Any:
    z.type(torch.float32).logsumexp(-1)
    return z.type(z.dtype).sum(-1) + z.logsumexp(-1)


# Hooks ---------------------------------------------------------------------------------------


@snippet
def hook_and_sort(z: Any) -> Any:
    z.register_hook(lambda grad: grad * 2)
    return z.sort(-1)[0][..., :3].sum(-1) + z.logsumexp(-1)


@snippet
def hook_after_sort(z: Any) -> Any:
    top = z.sort(-1)[0][..., -1]
    z.register_hook(lambda grad: grad * 2)
    return top + z.logsumexp(-1)


@snippet
def hook_before_an_in_place_change(z: Any) -> Any:
    z.register_hook(lambda grad: grad * 3)
    z.mul_(2)
    z[..., 0] = 1.0
    return z.logsumexp(-1)


@snippet
def hook_on_a_view_that_is_sorted(z: Any) -> Any:
    y = z[:, :-1]
    y.register_hook(lambda grad: grad * 2)
    return y.sort(-1)[0][..., 0].sum() + y.logsumexp(-1).sum() + z.logsumexp(-1)


@snippet
def hook_on_the_whole_and_a_part_sorted(z: Any) -> Any:
    z.register_hook(lambda grad: grad * 2)
    return z[:, -1].sort(-1)[0][..., 0].sum() + z.logsumexp(-1)


@snippet
def hook_after_metrics(z: Any) -> Any:
    hits = (z.argmax(-1) == 3).sum() + (z > 0).sum()
    z.register_hook(lambda grad: grad * 2)
    return z.logsumexp(-1) + hits


# Shapes in place -----------------------------------------------------------------------------


@snippet
def shape_in_place(z: Any) -> Any:
    z.transpose_(0, 1)
    z.unsqueeze_(0)
    z[0, 0] = 0.0
    z.squeeze_()
    z.swapaxes_(0, 1)
    return z.logsumexp(-1)


@snippet
def shape_of_a_view_in_place(z: Any) -> Any:
    last = z[:, -1:]
    last.squeeze_(1)
    last.add_(1.0)
    return z.logsumexp(-1).sum() + last.logsumexp(-1)


@snippet
def matrix_transposed_in_place(z: Any) -> Any:
    y = z[0]
    y.t_()
    return y.logsumexp(0)


# Other tensors, rewritten later --------------------------------------------------------------


@snippet
def bias_rewritten(z: Any) -> Any:
    bias = torch.zeros(13, dtype=z.dtype)
    bias[0] = 5.0
    y = z + bias
    bias.zero_()
    return y.logsumexp(-1)


@snippet
def negative_of_a_difference(z: Any) -> Any:
    one = z[:1, :1]
    return torch.rsub(torch.ones(1, 1, 13, dtype=z.dtype), one).logsumexp(-1)


# One row, no row -----------------------------------------------------------------------------


@snippet
def one_row_built_by_parts(z: Any) -> Any:
    one = z[:1, :1].clone()
    total = one[0, 0].sort()[0][-1] + one[0].sort(-1)[0][..., -1] + one.sort(-1)[0][..., -1]
    return total + one.logsumexp(-1)


@snippet
def no_rows(z: Any) -> Any:
    none = z[:0]
    both = torch.cat([none * 2, none]).logsumexp(-1)
    return both.sum() + torch.stack([none, none]).mean(0).logsumexp(-1).sum() + z.logsumexp(-1)


# Reductions ----------------------------------------------------------------------------------


@snippet
def mean_of_rows_with_different_counts(z: Any) -> Any:
    limit = torch.linspace(-1, 3, 6, dtype=z.dtype).view(2, 3, 1)
    holes = z.masked_fill(z > z.mean(-1, keepdim=True) + limit, torch.nan)
    return holes.nanmean() + holes.nanmean((0, 2)) + holes.nanmean(-1)


@snippet
def loss_of_two_spatial_dimensions(z: Any) -> Any:
    images = z.permute(0, 2, 1).unflatten(2, (3, 1))
    return F.cross_entropy(images, ids(2, 3).view(2, 3, 1), reduction="none")


@snippet
def bernoulli_of_every_token(z: Any) -> Any:
    every: Any = torch.distributions.Bernoulli(logits=z)
    return every.entropy().sum(-1)


@snippet
def rows_written_twice(z: Any) -> Any:
    z[torch.tensor([0, 0])] = 1.0
    return z.logsumexp(-1)


@snippet
def data_replaced(z: Any) -> Any:
    z.data = z.data * 2
    return z.logsumexp(-1)


@pytest.mark.parametrize("name", SNIPPETS)
def test_as_on_a_tensor(name: str) -> None:
    assert_same(twins(2, 3), SNIPPETS[name])


@pytest.mark.parametrize("name", ["no_rows", "one_row_built_by_parts"])
def test_without_gradients(name: str) -> None:
    assert_same(twins(2, 3, trained=False), SNIPPETS[name])


def test_the_gradient_of_logits_includes_what_was_built() -> None:
    def of(z: Any) -> Tensor:
        z.retain_grad()
        (z.sort(-1)[0][..., :3].sum() + z.logsumexp(-1).sum()).backward()
        made: Tensor = z.grad.clone()
        return made

    case = twins(2, 3)
    assert torch.allclose(of(case.lazy), of(case.dense), rtol=0, atol=1e-12)


def test_hooks_come_before_the_first_use() -> None:
    """Results that passed by the object would not reach the hook: an error says so."""
    for name, given in (("register_hook", (Tensor.neg,)), ("retain_grad", ())):
        z = twins(2, 3).lazy
        doubled = z * 2
        with pytest.raises(RuntimeError, match="must be called before lazy logits are used"):
            getattr(z, name)(*given)
        getattr(doubled, name)(*given)  # not used yet


def test_a_view_with_hooks_is_not_written_to() -> None:
    y = twins(2, 3).lazy.view(-1, 13)
    y.register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match="with hooks"):
        y.div_(2)


def test_logits_with_hooks_that_were_written_to_elsewhere() -> None:
    z = twins(2, 3).lazy
    view = z.view(-1, 13)
    view.register_hook(lambda grad: grad)
    with torch.no_grad():
        z.mul_(2)
    with pytest.raises(RuntimeError, match="written to through another object"):
        view.logsumexp(-1)


@pytest.mark.parametrize("name", ["resize_", "set_", "as_strided_"])
def test_memory_that_is_not_there(name: str) -> None:
    z = twins(2, 3, trained=False).lazy
    given: Any = {"resize_": (2,), "set_": (torch.ones(2).double(),), "as_strided_": ((2,), (1,))}[
        name
    ]
    with pytest.raises(RuntimeError, match=f"{name}.* is not supported on lazy logits"):
        getattr(z, name)(*given)


def test_data_of_another_shape() -> None:
    z = twins(2, 3, trained=False).lazy
    with pytest.raises(RuntimeError, match="must keep shape"):
        z.data = torch.zeros(2, 13)


def test_results_into_given_tensors() -> None:
    case = twins(2, 3, trained=False)

    def of(z: Any) -> list[Tensor]:
        values, places = torch.empty(0, dtype=z.dtype), torch.empty(0, dtype=torch.int64)
        top = torch.topk(z, 2, out=(values, places))
        largest = torch.max(z, -1, out=(values.new_empty(0), places.new_empty(0)))
        return [values, places, *top, *largest, torch.stack([z, z], out=None).sum(-1)]

    for ours, theirs in zip(of(case.lazy), of(case.dense), strict=True):
        assert ours.shape == theirs.shape
        assert torch.allclose(ours.double(), theirs.double(), rtol=0, atol=1e-11)


def test_collated_for_a_data_loader() -> None:
    case = twins(2, 3, trained=False)
    rows = torch.utils.data.default_collate([{"logits": row} for row in case.lazy])["logits"]
    assert torch.allclose(rows.sum(-1), case.dense.sum(-1), rtol=0, atol=1e-11)


def test_a_tensor_indexed_by_a_comparison() -> None:
    case = twins(2, 3)
    full = torch.randn(2, 3, 13, dtype=torch.float64)
    assert torch.equal(full[case.lazy > 0], full[case.dense > 0])
    assert torch.equal(full.masked_fill(case.lazy > 0, 0.0), full.masked_fill(case.dense > 0, 0.0))


def test_the_type_of_logits() -> None:
    z = twins(2, 3, dtype=torch.float32).lazy
    assert z.type() == "torch.FloatTensor"
    assert z.type("torch.DoubleTensor").dtype == torch.float64


def _loss_and_metric(case: Twins, z: Any) -> list[Tensor]:
    with torch.no_grad():
        z.argsort(-1)
    return gradients(F.cross_entropy(z.view(-1, 13), ids(6)), case.leaves)


def test_a_metric_that_builds_does_not_cost_the_gradient() -> None:
    case = twins(2, 3)
    for ours, theirs in zip(
        _loss_and_metric(case, case.lazy), _loss_and_metric(case, case.dense), strict=True
    ):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_the_memory_of_a_column_cannot_be_written_to() -> None:
    """A write to it would not reach the logits: NumPy refuses, and there is no pointer."""
    head = LMHead(8, 37, bias=False)
    with torch.no_grad():
        z = head(torch.randn(5, 8))
        array = z[:, 7].numpy()
        assert array.shape == (5,)
        with pytest.raises(ValueError, match="read-only"):
            array += 1
        copy = array.copy()
        copy += 1
        z[:, 7].add_(1)
        assert abs(z[:, 7].numpy() - copy).max() < 1e-6
        for column in (z[:, 7], z[2:, 7].view(-1), z[0, 7]):
            for expose in (lambda c: c.data_ptr(), np.from_dlpack, lambda c: c.untyped_storage()):
                with pytest.raises(RuntimeError, match="copy it"):
                    expose(column)
            assert column.clone().data_ptr() != 0
