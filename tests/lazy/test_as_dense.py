"""What users do to logits, on dense and lazy ones: the same numbers and gradients, or an error.

Each case was a wrong number or a crash once.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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


def names_of_numpy(z: Any) -> Any:
    return [
        torch.sum(a=z, axis=-1),  # type: ignore[call-overload]
        z.mean(axis=-1, keepdims=True),
        torch.add(x1=z, x2=GIVEN),  # type: ignore[call-overload]
        torch.cat([z, GIVEN], axis=0),  # type: ignore[call-arg]
    ]


def integers_of_numpy(z: Any) -> Any:
    n = np.int64
    return [z.topk(n(2), n(-1)).values, z.narrow(n(1), n(1), n(2)) * 1, z.sum(n(2))]


def drawn_in_place(z: Any) -> Any:
    torch.manual_seed(3)
    F.dropout(z, 0.5, True, True)
    F.rrelu(z, 0.1, 0.9, True, True)
    return z * 1


def spread_without_correction(z: Any) -> Any:
    found = torch.std_mean(z, dim=(0, 2), correction=None)
    return [*found, z.std((0, 1), correction=0), z.var(dim=(1, 2), correction=None), z.var(0)]


def entries_of_broadcast_rows(z: Any) -> Any:
    return [
        torch.take_along_dim(z[:1], IDS[..., None], -1),
        torch.take_along_dim(z[:, :1], IDS[..., None], 2),
        torch.take_along_dim(z, IDS[..., None] - V, 2),
    ]


def joined_vectors(z: Any) -> Any:
    v = (GIVEN[0, 0] * 1).requires_grad_(z.requires_grad)
    return torch.cat([z[0, 0], v])


def no_tokens(z: Any) -> Any:
    e, none = z[..., :0], GIVEN[..., :0]
    return [
        e + none, torch.where(none > 0, e, none), e * GIVEN[..., :1], torch.cat([none, z], -1),
        torch.cat([z, e, none], -1),
    ]  # fmt: skip


def noise_in_the_order_of_memory(z: Any) -> Any:
    torch.manual_seed(3)
    return [torch.rand_like(z.mT), torch.randn_like(z.transpose(0, 1))]


def compared_with_masks(z: Any) -> Any:
    mask = GIVEN > 0
    found = [z > mask, z == mask, mask < z.exp(), z.softmax(-1) >= mask[..., :1], z != mask[0, 0]]
    return [t * 1 for t in found]


def vectors_of_low_precision(z: Any) -> Any:
    b = GIVEN[0, 0].bfloat16()
    return [z / 0.7 + b, b - z * 0.3, (z / 0.7 - b).logsumexp(-1)]


def classes_in_the_middle(z: Any) -> Any:
    ids = torch.arange(2 * V).view(2, V) % 3
    return [F.cross_entropy(z, ids), F.cross_entropy(z, GIVEN.softmax(1))]


def dimensions_by_name(z: Any) -> Any:
    y = z[:1].clone()
    y.squeeze_(dim=0)
    y.transpose_(dim0=0, dim1=1)
    return y * 1


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


def equal_entries_share_a_gradient(z: Any) -> Any:
    # 2 in some entries, more in one row than in another.
    z = torch.where(GIVEN > 1, z - z.detach() + 2, z.sin())
    return [z.max(), z.amax(), z.amax(-1), z.amax((0, -1)), (-z).amin((1, 2), keepdim=True),
            torch.linalg.vector_norm(1 + z.relu(), torch.inf, dim=(-1, 0))]  # fmt: skip


def largest_is_nan(z: Any) -> Any:
    y = z.masked_fill(GIVEN > 2, torch.nan)
    # The gradient of y is 0 where torch.max found a NaN, and that of z where y was replaced.
    return [y.max().nan_to_num(nan=1.0) + z.sum(), y.min().nan_to_num(nan=1.0) * 3]


def other_values(z: Any) -> Any:
    z.copy_(GIVEN)
    return z * 1


def own_values_doubled(z: Any) -> Any:
    z.copy_(z.detach() * 2)
    return z * 1


def zeros(z: Any) -> Any:
    z.view(-1, V).zero_()
    return z + 1


def numpy_indices(z: Any) -> Any:
    i = np.arange(2)
    picked = [z[i, i], z[..., np.int64(3)] * 1, z[i, i, i + 3], z[np.array([True, False])]]
    z[i, i, i + 3] = 9.0
    z[..., np.int64(5)].zero_()
    return [*picked, z * 1]


def lists_as_indices(z: Any) -> Any:
    picked = [z[[0, 1], [1, 0]], z[[True, False]], z[[0, 1], :, [3, 4]], z[0][True, 0]]
    z[[True, False], [1], [2]] = 2.0
    return [*picked, z * 1]


def masked_and_turned(z: Any) -> Any:
    y = z.masked_fill(torch.arange(V) == 0, -torch.inf)
    return [y.min(-1).values.isinf(), (-y)[..., 0].isposinf(), (1 - y)[..., 0].isposinf(),
            (y * -2.0)[..., 0].isposinf(), (y * 0)[..., 0].isnan()]  # fmt: skip


def low_precision_divisor(z: Any) -> Any:
    return [z / torch.full((1, 1, 1), 3.0, dtype=torch.bfloat16), z / torch.tensor(3)]


def places_of_equal_entries(z: Any) -> Any:
    return [z.clamp(0, 0).max(-1).indices, z.sign().min(-1).indices, (z > 0).max(-1).indices]


def kl_of_a_broadcast_input(z: Any) -> Any:
    given = torch.zeros(V).log_softmax(-1)
    return F.kl_div(given, z.softmax(-1), reduction="batchmean")


def written_without_gradients(z: Any) -> Any:
    with torch.no_grad():
        t = z / 2
        t[..., 0] = -1.0
        d = z.clone()
        d.div_(2)
    return [t.logsumexp(-1), d.logsumexp(-1)]


def flat_copy_of_a_stack(z: Any) -> Any:
    s = torch.stack([z, z], -1)
    return [s.flatten() * 1, s.reshape(-1, V, 2) * 1]


def norms_of_zeros(z: Any) -> Any:
    y = z * torch.tensor([[1.0], [0.0], [1.0]])
    return [(z * 0).norm() + z.sum(), y.norm(dim=(-1,)), (z * 0).std(), (z * 0).std((0, 2))]


def hooks_of_a_column(z: Any) -> Any:
    c = z[..., 3]
    if c.requires_grad:
        c.register_hook(lambda g: g * 10)
    return c * 1


def reused_indices(z: Any) -> Any:
    i, q = IDS[..., None].clone(), torch.tensor([0.25, 0.75])
    return [z.sigmoid().gather(-1, i) * 1, z.sigmoid().quantile(q, -1)]


def keywords(z: Any) -> Any:
    return [
        z.permute(dims=(1, 0, 2)), z.flip(dims=(0,)), z[:1].expand(size=(4, 3, V)),
        z.repeat(repeats=(2, 1, 1)), z.swapaxes(axis0=0, axis1=1), z.narrow(1, 1, 2),
        torch.where(condition=GIVEN > 0, input=z, other=0.0), z.index_select(-1, torch.tensor(2)),
        *z.split_with_sizes(split_sizes=[1, 1]),
        torch.concat([z, z], axis=0),  # type: ignore[call-arg]
    ]  # fmt: skip


def learned_operands_of_constants(z: Any) -> Any:
    t, b = torch.tensor(1.3, requires_grad=True), torch.zeros(V, requires_grad=True)
    with torch.enable_grad():
        z = z.detach()
        cooled, raised = (z / t).sigmoid(), z + b
        loss = cooled.sum() + cooled.square().amax() + raised.std(-1).sum() + (z * t).norm()
        loss = loss + F.binary_cross_entropy_with_logits(raised, (z > 0).float())
        return list(torch.autograd.grad(loss, [t, b]))


def pairs_of_unequal_counts(z: Any) -> Any:
    values = torch.ones(3, requires_grad=True)
    z = z.clone().view(-1, V)
    with torch.enable_grad():
        written = z.clone()
        written[torch.tensor([0, 0, 1]), torch.tensor([1, 2, 3])] = values
        (grad,) = torch.autograd.grad(written.sum(), values, retain_graph=True)
    z[torch.tensor([2, 2, 2, 4]), torch.tensor([5, 6, 7, 8])] += 1.0
    return [grad, z * 1]


def rows_that_are_no_distribution(z: Any) -> Any:
    z = (z.detach() + torch.tensor([0.0, -torch.inf, torch.inf])[:, None]).view(-1, V)
    rows = [z.log_softmax(-1), z.softmax(-1), z.argmax(-1), z.logsumexp(-1)]
    return [*rows, F.cross_entropy(z, IDS.view(-1), reduction="none")]


def equal_values(z: Any) -> Any:
    z = z.detach().fill_(1.0)
    return [z.median(-1).values, z.nanmedian(-1).values, z.mode(-1).values]


def no_gradient_of_masked_tokens(z: Any) -> Any:
    masked = torch.arange(V) < 3
    return z.masked_fill(masked, -torch.inf).softmax(0)[..., 3:]


def copies_of_constants(z: Any) -> Any:
    t = torch.asarray(z.detach(), copy=True)
    t.mul_(2)
    return [t * 1, t.square().sum(-1)]


CASES: list[Callable[[Any], Any]] = [
    new_axis, new_axis_written, clone_of_built, array_of_a_clone, all_rows_of_built, casts, rounded,
    assigned, deep_copied, weighted_squares, matrix_norms, detached_view_of_built,
    flat_view_and_a_join, relu_of_built_view, expanded_view_of_built, flat_copy_of_transposed,
    contiguous_column, smallest_with_nan, plus, by_keyword, stacked_after_an_array,
    column_of_integers, equal_entries_share_a_gradient, largest_is_nan, other_values,
    own_values_doubled, zeros, numpy_indices, lists_as_indices, masked_and_turned,
    low_precision_divisor, places_of_equal_entries, kl_of_a_broadcast_input,
    written_without_gradients, flat_copy_of_a_stack, norms_of_zeros, hooks_of_a_column,
    reused_indices, keywords, names_of_numpy, integers_of_numpy, drawn_in_place,
    spread_without_correction, entries_of_broadcast_rows, classes_in_the_middle, dimensions_by_name,
    joined_vectors, no_tokens, noise_in_the_order_of_memory, compared_with_masks,
    vectors_of_low_precision, learned_operands_of_constants, pairs_of_unequal_counts,
    rows_that_are_no_distribution, equal_values, no_gradient_of_masked_tokens, copies_of_constants,
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
        numbers.append(torch.tensor([t.requires_grad for t in values]))
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


def flat(z: Any) -> Any:
    return F.cross_entropy(z.view(-1, V), IDS.view(-1))


def cooler(z: Any) -> Any:
    return F.cross_entropy(z.div_(0.7)[:, 1:].reshape(-1, V), IDS[:, 1:].reshape(-1))


def written_through_a_view(z: Any) -> Any:
    with torch.no_grad():
        before = z.detach()
    z.view(-1, V).mul_(2)
    return F.cross_entropy(z.view(-1, V), IDS.view(-1)) + before.logsumexp(-1).sum()


def doubled_by_a_hook(z: Any) -> Any:
    z.register_hook(lambda g: 2 * g)
    z[0].add_(1)
    return z.log_softmax(-1).gather(-1, IDS[..., None]).sum()


def joined(z: Any) -> Any:
    return torch.cat([z, z]).sum() + torch.stack([z, z * 2]).logsumexp(0).sum()


def read_as_an_array(z: Any) -> Any:
    return z.detach().numpy().sum() * z.pow(2).mean()


@pytest.mark.parametrize(
    "loss", [flat, cooler, written_through_a_view, doubled_by_a_hook, joined, read_as_an_array],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_logits_of_a_reentrant_checkpoint(loss: Callable[[Any], Any]) -> None:
    results = []
    for kind in (torch.nn.Linear, LMHead):
        torch.manual_seed(5)
        head, hidden = kind(8, V, bias=False), torch.randn(2, 3, 8, requires_grad=True)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        found = loss(checkpoint(head, hidden, use_reentrant=True))
        found.backward()
        results.append([found.detach(), hidden.grad, *(p.grad for p in head.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-4, atol=2e-5)


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_softmax_without_a_dimension() -> None:
    (a, _, _), (b, _, _) = pair(False)
    for dense, lazy in ((a, b), (a[0], b[0]), (a[0, 0], b[0, 0])):
        torch.testing.assert_close(F.softmax(lazy) * 1, F.softmax(dense))
        torch.testing.assert_close(F.log_softmax(lazy) * 1, F.log_softmax(dense))


def test_gradients_with_a_graph_are_counted_once() -> None:
    def of_one_call(head: Any, hidden: Tensor) -> Any:
        z = head(hidden)
        return ((z / 2).sigmoid() * z.sigmoid()).sum()

    def of_two_calls(head: Any, hidden: Tensor) -> Any:
        return (head(hidden).sigmoid() * head(2 * hidden).sigmoid()).sum()

    for loss in (of_one_call, of_two_calls):
        results = []
        for kind in (torch.nn.Linear, LMHead):
            torch.manual_seed(5)
            head, hidden = kind(8, V, bias=True), torch.randn(2, 3, 8, requires_grad=True)
            with torch.no_grad():
                for parameter in head.parameters():
                    parameter.copy_(torch.randn(parameter.shape))
            tensors = [hidden, *head.parameters()]
            first = torch.autograd.grad(loss(head, hidden), tensors, create_graph=True)
            second = torch.autograd.grad([(g * g).sum() for g in first], tensors)
            results.append([*first, *second])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4)


def test_indices_and_targets_that_change_before_the_backward_pass() -> None:
    """Torch raises; the gradient is that of the indices as they were."""
    for loss in (
        lambda z, i: z.sigmoid().gather(-1, i[..., None]).sum(),
        lambda z, i: z.log_softmax(-1).gather(-1, i[..., None]).sum(),
        lambda z, i: F.cross_entropy(z.sigmoid().view(-1, V), i.view(-1)),
        lambda z, i: F.cross_entropy(z.view(-1, V), i.view(-1)),
    ):
        results = []
        for change in (False, True):
            (_, _, _), (z, hidden, _) = pair(True)
            ids = IDS.clone()
            found = loss(z, ids)
            if change:
                ids.zero_()
            torch.autograd.backward(found)
            results.append(hidden.grad)
        torch.testing.assert_close(results[1], results[0])


def test_what_is_refused() -> None:
    (_, _, _), (z, _, _) = pair(True)
    w = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"clone\(\) them first"):
        z.detach().mul_(w)
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        torch.exp(z, out=torch.empty(2, 3, V))
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.exp(z.detach(), out=torch.empty(2, 3, V, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="exceeds dimension size"):
        z.narrow(1, 2, 2)
    z.retain_grad()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(z.logsumexp(-1).sum(), z, create_graph=True)
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(z.detach())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda z: z.squeeze(5),
        lambda z: z.unsqueeze(9),
        lambda z: z.permute(0, 1, 5),
        lambda z: z.movedim(0, 4),
        lambda z: z.movedim((0, 1), (1, 1)),
        lambda z: z.flatten(2, 0),
        lambda z: z.narrow(1, 3, 1),
        lambda z: z.sum((0, 0)),
        lambda z: z.chunk(0),
        lambda z: z.split(0, 1),
        lambda z: z.split(-1, 1),
        lambda z: z.__setitem__(0, torch.zeros(4)),
        lambda z: z.__setitem__((..., [1, 2]), torch.zeros(3)),
        lambda z: z[..., :1].squeeze_(),
    ],
)
def test_impossible_dimensions(wrong: Callable[[Any], Any]) -> None:
    for z, _, _ in pair(False)[1:]:
        with pytest.raises((IndexError, RuntimeError)):
            wrong(z)


def test_reductions_over_rows_warn_of_nothing() -> None:
    (_, _, _), (z, _, _) = pair(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        z.std(0), z.var((0, 1)), torch.std_mean(z, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reductions_keep_half_precision(dtype: torch.dtype) -> None:
    head = LMHead(8, V, dtype=dtype)
    z = head(torch.randn(2, 3, 8, dtype=dtype, requires_grad=True))
    made = [z.max(), z.min(), z.amax((0, 2)), z.norm(p=torch.inf), *torch.aminmax(z)]
    assert {t.dtype for t in made} == {dtype}
    soft = torch.rand(6, V)
    assert F.cross_entropy(z.view(-1, V), soft).dtype == torch.float32
    assert torch.cat([z, torch.tensor([])]).dtype == torch.float32


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


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, h: torch.func.jacrev(f)(h),
        lambda f, h: torch.func.vjp(f, h)[1](torch.ones(3, V)),
        lambda f, h: torch.func.vjp(f, h)[0] * 1,
        lambda f, h: torch.func.vmap(f)(h),
    ],
    ids=["jacrev", "vjp", "result of vjp", "vmap"],
)
def test_logits_as_result_of_a_transformed_function(transform: Callable[..., Any]) -> None:
    head, hidden = LMHead(8, V), torch.randn(3, 8)
    with pytest.raises(RuntimeError, match=r"return logits\.materialize\(\)"):
        transform(lambda h: head(h) * 2, hidden)
    ours = transform(lambda h: (head(h) * 2).materialize(), hidden)
    dense = transform(lambda h: F.linear(h, head.weight) * 2, hidden)
    torch.testing.assert_close(ours, dense)


@pytest.mark.parametrize("reduction", ["sum", "batchmean"])
def test_losses_of_two_heads_under_autocast(reduction: str) -> None:
    torch.manual_seed(0)
    head, a, b = LMHead(16, V), torch.randn(6, 16), torch.randn(6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        results = []
        for z, w in ((head(a), head(b)), (F.linear(a, head.weight), F.linear(b, head.weight))):
            divergence = F.kl_div(z.log_softmax(-1), w.softmax(-1), reduction=reduction)
            loss = F.cross_entropy(z, w.softmax(-1), reduction=reduction.removeprefix("batch"))
            results.append((divergence, loss))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=1e-3)


# Constants ----------------------------------------------------------------------------------------


def test_logits_made_of_constants_have_no_gradient_later() -> None:
    head, hidden, factor = LMHead(8, V), torch.randn(3, 8), torch.ones(V)
    head.requires_grad_(False)
    constant: Any = head(hidden)
    multiplied: Any = (constant.tanh() * factor).tanh()
    for t in (*head.parameters(), hidden, factor):
        t.requires_grad_(True)
    for z in (constant, multiplied):
        assert not z.requires_grad
        assert not z.sigmoid().sum().requires_grad
        assert not z.logsumexp(-1).requires_grad
    torch.autograd.backward((head(hidden.detach()) * multiplied).sigmoid().sum())
    assert head.weight.grad is not None
    assert (hidden.grad, factor.grad) == (None, None)


@pytest.mark.parametrize("options", [(0.0, True), (0.0, True, True), (0.3, False), (1.0, False)])
def test_dropout_of_nothing_returns_the_logits_themselves(options: Any) -> None:
    for z, _, _ in pair(True):
        assert F.dropout(z, *options) is z


def test_dropout_checks_the_probability() -> None:
    for z, _, _ in pair(False):
        with pytest.raises(ValueError, match="has to be between 0 and 1"):
            F.dropout(z, 2.0, False)


def test_a_retained_gradient_passed_to_other_logits() -> None:
    results = []
    for z, _, head in pair(True):
        other = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        dense = type(z) is Tensor
        z.retain_grad()
        torch.autograd.backward(z.sigmoid().sum(), retain_graph=True)
        head.weight.grad = None
        y: Any = F.linear(other, head.weight) if dense else head(other)
        torch.autograd.backward(y, z.grad, retain_graph=True)
        torch.autograd.backward(y * 3, z.grad)
        torch.autograd.backward(z, z.grad)
        results.append((head.weight.grad, other.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
