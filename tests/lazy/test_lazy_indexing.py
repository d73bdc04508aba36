"""Selecting from `LazyLogits`: rows stay lazy, columns compute only their rows of the weight."""

import pytest
import torch
from compare import assert_close
from lazy_and_dense import Twins, as_function, assert_same, materialized, twins
from torch_watch import Allocations, count_products

B, T, V = 2, 3, 13
MASK = "tensor([[True, False, True], [False, False, True]])"


@pytest.fixture
def case() -> Twins:
    return twins(B, T)


def nothing_like_logits() -> Allocations:
    """Nothing as large as the logits may come to exist."""
    return Allocations(limit=B * T * V)


# --- leading dimensions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "select",
    [
        "z[:, -1]",
        "z[:, -1, :]",
        "z[:, -1:, :]",
        "z[..., :-1, :]",
        "z[:, 1:]",
        "z[..., -1, :]",
        "z[0]",
        "z[1, 2]",
        "z[::2]",
        "z[...]",
        "z[:]",
        "z[None]",
        f"z[{MASK}]",
        "z[:, tensor([True, False, True])]",
        f"z[{MASK}.any(1)]",
        "z[tensor([1, 0, 1])]",
        "z[[1, 0]]",
        "z[:, tensor([2, 0])]",
        "z[torch.arange(2), tensor([2, 0])]",
        "z[torch.arange(2), -1]",
        f"z[{MASK} & False]",
        "z[2:]",
    ],
)
def test_leading_selection_stays_lazy(case: Twins, select: str) -> None:
    with nothing_like_logits():
        as_function(select)(case.lazy)
    assert_same(case, as_function(select), lazy=True)
    assert_same(case, as_function(f"{select}.logsumexp(-1)"), lazy=False)


@pytest.mark.parametrize(
    "reshape",
    [
        "z.view(-1, V)",
        "z.view(6, V)",
        "z.view((6, V))",
        "z.view(3, 2, V)",
        "z.view(-1, z.size(-1))",
        "z.reshape(-1, V)",
        "z.reshape((3, -1, z.shape[-1]))",
        "torch.reshape(z, (-1, V))",
        "z.flatten(0, 1)",
        "z.flatten(0, -2)",
        "z.flatten(end_dim=-2)",
        "torch.flatten(z, 0, 1)",
        "z.contiguous()",
        "z.unsqueeze(0)",
        "z[:, :1].squeeze(1)",
        "z[..., :-1, :].contiguous().view(-1, V)",
        "z.view(-1, V)[1:5].view(2, 2, V)",
        "z[:, -1].view(2, 1, V).view(2, V)",
    ],
)
def test_views_of_the_leading_dimensions_stay_lazy(case: Twins, reshape: str) -> None:
    with nothing_like_logits():
        as_function(reshape)(case.lazy)
    assert_same(case, as_function(reshape), lazy=True)
    assert_same(case, as_function(f"{reshape}.logsumexp(-1)"), lazy=False)


def test_a_view_that_does_not_fit_is_refused(case: Twins) -> None:
    for shape in [(5, V), (-1, V + 1), (-1, -1, V)]:
        with pytest.raises((RuntimeError, ValueError)):
            case.lazy.view(*shape)


def test_an_index_that_does_not_exist_is_refused(case: Twins) -> None:
    for index in [2, (0, 3), (0, 0, V), (0, 0, 0, 0), torch.tensor([5]), (..., torch.tensor([V]))]:
        with pytest.raises(IndexError):
            case.lazy[index]


def test_iteration_ends(case: Twins) -> None:
    rows = list(zip(case.lazy, case.dense, strict=True))
    assert len(rows) == B
    for ours, theirs in rows:
        assert_close(materialized(ours), theirs, rtol=1e-12, atol=1e-12)


# --- columns of the vocabulary --------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns",
    [
        "z[..., tensor([4, 0, 12, 4])]",
        "z[..., [4, 0, 12]]",
        "z[:, :, tensor([1])]",
        "z[:, -1, tensor([3, -1])]",
        "z[..., 7]",
        "z[..., -1]",
        "z[..., 2:5]",
        "z[1, 2, 4]",
        "z[..., tensor([[1, 2], [3, 4]])]",
        "z[..., torch.arange(V) < 3]",
        "z.view(-1, V)[torch.arange(6), tensor([1, 2, 3, 4, 5, 12])]",
        "z[:, tensor([0, 2]), tensor([5, -1])]",
        "z[1:, tensor([0, 2, 2]), tensor([5, 1, 5])]",
        "z[tensor([0, 1]), :, tensor([12, 3])]",
        f"z[{MASK}, tensor([4, 4, 0])]",
        "z[0, tensor([[1], [2]]), tensor([[3, 4, 5]])]",
        "z[None, tensor([1, 0]), 0, tensor([7, 8])]",
        "z[tensor([1, 1]), tensor([0, 2]), torch.arange(13) < 2]",
        "z[[], 0, []]",
        "z.gather(-1, ids(2, 3, 4))",
        "z.gather(2, ids(2, 3, 1)).squeeze(-1)",
        "torch.gather(z, -1, ids(2, 3, 2))",
    ],
)
def test_vocabulary_columns(case: Twins, columns: str) -> None:
    assert_same(case, as_function(columns))


def test_vocabulary_columns_compute_only_those_rows_of_the_weight() -> None:
    tokens, size, vocab = 6, 5, 4000
    case = twins(tokens, hidden_size=size, vocab=vocab, dtype=torch.float32)
    few = torch.tensor([3999, 0, 17])
    with torch.no_grad():
        lazy = case.lazy
        with Allocations(limit=vocab):
            _ = lazy[..., few]
            _ = lazy[..., 17]
        products = count_products(lambda: lazy[..., few], tokens, size, vocab)
    assert products <= 3 / vocab * 1.05
