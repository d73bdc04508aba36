"""Decisions on paths: against the textbook, with gradients, on every kind of tree."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_close
from torch import Tensor

from lmhead import reference as ref
from lmhead.vocab.row_pairs import pair_products, row_sums
from lmhead.vocab.tree import Tree
from lmhead.vocab.tree_factors import TreeFactors
from lmhead.vocab.tree_files import read_tree
from lmhead.vocab.tree_makers import balanced, huffman
from lmhead.vocab.tree_paths import Forks
from vocab.trees import branches, chain, rows

TREES: dict[str, Tree] = {
    "huffman": huffman(1 / np.arange(1, 18)),
    "huffman of 4": huffman(1 / np.arange(1, 18), arity=4),
    "balanced": balanced(13),
    "balanced of 3": balanced(13, arity=3),
    "uneven": read_tree([[0, 1, 2, 3, 4], [5, [6, 7]], 8], 9),
    "one fork": read_tree(list(range(12)), 12),
    "one word": balanced(1),
    "two words": balanced(2),
    "chain": chain(14),
}
EVERY = pytest.mark.parametrize("tree", TREES.values(), ids=TREES)


def parameters(
    tree: Tree, width: int = 5, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Any:
    """Hidden states, weight and bias, of uneven size."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(4, width, generator=random, dtype=torch.float64)
    weight = torch.randn(tree.vocab - 1, width, generator=random, dtype=torch.float64)
    bias = torch.randn(tree.vocab - 1, generator=random, dtype=torch.float64)
    return tuple(t.to(dtype).requires_grad_() for t in (hidden, weight, bias))


def textbook(tree: Tree) -> ref.DecisionTree:
    return ref.DecisionTree(branches(tree), rows(tree))


def pairs(tree: Tree) -> tuple[Tensor, Tensor]:
    """Every token for every hidden state."""
    return torch.arange(4).repeat_interleave(tree.vocab), torch.arange(tree.vocab).repeat(4)


def best_tokens(forks: Forks, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return TreeFactors(forks, lambda: 0.0).top(hidden, k)


@EVERY
def test_log_prob_and_gradients_are_the_textbooks(tree: Tree) -> None:
    hidden, weight, bias = parameters(tree)
    token, words = pairs(tree)
    log_p = Forks(weight, bias, tree).token_log_prob(hidden, token, words)
    upstream = torch.randn(len(words), dtype=torch.float64)
    (log_p * upstream).sum().backward()  # type: ignore[no-untyped-call]
    arrays = tuple(t.detach().numpy() for t in (hidden, weight, bias))
    expected = np.empty(len(words))
    grads = tuple(np.zeros_like(a) for a in arrays)
    for i, (n, word) in enumerate(zip(token.tolist(), words.tolist(), strict=True)):
        given = arrays[0][n], *arrays[1:], textbook(tree), word
        expected[i] = ref.word_log_prob(*given)
        back = ref.word_log_prob_backward(float(upstream[i]), *given)
        assert back.bias is not None
        grads[0][n] += back.x
        grads[1][...] += back.weight
        grads[2][...] += back.bias
    assert_close(log_p, expected, atol=1e-12)
    for name, got, want in zip(
        ["hidden", "weight", "bias"], (hidden, weight, bias), grads, strict=True
    ):
        assert_close(got.grad, want, atol=1e-11, what=name)


@EVERY
def test_first_and_second_derivatives(tree: Tree) -> None:
    token, words = torch.tensor([0, 1, 1, 3]), torch.tensor([0, tree.vocab - 1, 0, tree.vocab // 2])

    def log_prob(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return Forks(weight, bias, tree).token_log_prob(hidden, token, words)

    if tree.vocab <= 12:
        assert torch.autograd.gradgradcheck(log_prob, parameters(tree, 2))
    assert torch.autograd.gradcheck(log_prob, parameters(tree, 3))


@EVERY
@pytest.mark.parametrize("exact", [False, True])
def test_all_tokens_at_once_and_one_by_one(tree: Tree, exact: bool) -> None:
    hidden, weight, bias = parameters(tree)
    forks = Forks(weight, bias, tree)
    single = forks.token_log_prob(hidden, *pairs(tree)).reshape(4, tree.vocab)
    every = forks.all_log_probs(hidden, exact=exact)
    assert_close(every, single, atol=1e-13)
    if exact:
        assert torch.equal(every, single), "sums run in one order"
    assert_close(every.exp().sum(1), torch.ones(4), atol=1e-13)
    mass = torch.rand(tree.vocab, dtype=torch.float64)
    weighted = forks.sum_log_probs(hidden, forks.masses_below(mass))
    assert_close(weighted, (every * mass).sum(1), atol=1e-11)


@EVERY
def test_gradients_of_all_tokens(tree: Tree) -> None:
    def every(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return Forks(weight, bias, tree).all_log_probs(hidden)

    def weighted(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        forks = Forks(weight, bias, tree)
        return forks.sum_log_probs(hidden, forks.masses_below(torch.ones(tree.vocab)))

    for function in (every, weighted):
        assert torch.autograd.gradcheck(function, parameters(tree, 2))


@pytest.mark.both_cores
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_and_sums_in_every_type(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(50, 37, generator=random).to(dtype).requires_grad_()
    y = torch.randn(30, 37, generator=random).to(dtype).requires_grad_()
    a = torch.randint(50, (700,), generator=random)
    b = torch.randint(29, (700,), generator=random)  # row 29 has no pair
    b[:300] = 3  # and row 3 very many
    c = torch.randn(700, generator=random, dtype=torch.float64)
    x64, y64 = (t.detach().double().requires_grad_() for t in (x, y))
    products = pair_products(x, y, a, b)
    plain = (x64[a] * y64[b]).sum(-1)
    assert_close(products, plain.detach(), atol=1e-12, dtype=torch.float64)
    (products * c).sum().backward()  # type: ignore[no-untyped-call]
    (plain * c).sum().backward()  # type: ignore[no-untyped-call]
    # A rounding to the type of the gradient, on top of those of float32 sums.
    bound = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    for got, true in ((x, x64), (y, y64)):
        assert got.grad is not None
        assert true.grad is not None
        assert_close(got.grad, true.grad, atol=2e-5, rtol=bound, dtype=dtype)
    assert not y.grad[29].any()  # type: ignore[index]
    sums = row_sums(c, x.detach(), a, b, 30)
    assert_close(sums, y.grad, atol=0.0, dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.both_cores
def test_a_pair_does_not_depend_on_the_others() -> None:
    x, y = torch.randn(8, 33), torch.randn(9, 33)
    a, b = torch.randint(8, (100,)), torch.randint(9, (100,))
    together = pair_products(x, y, a, b)
    alone = torch.cat([pair_products(x, y, a[i : i + 1], b[i : i + 1]) for i in range(100)])
    assert torch.equal(together, alone)
    order = torch.randperm(100)
    assert torch.equal(pair_products(x, y, a[order], b[order]), together[order])


@pytest.mark.both_cores
def test_a_sparse_gradient_is_the_dense_one() -> None:
    x, a, b = torch.randn(8, 33), torch.randint(8, (100,)), torch.randint(5, (100,)) * 3
    grads = []
    for sparse in (False, True):
        y = torch.ones(1000, 33, requires_grad=True)
        pair_products(x, y, a, b, sparse=sparse).square().sum().backward()  # type: ignore[no-untyped-call]
        assert y.grad is not None
        assert y.grad.is_sparse == sparse
        grads.append(y.grad)
    assert grads[1].coalesce().values().shape == (5, 33)
    assert torch.equal(grads[0], grads[1].to_dense())


@pytest.mark.both_cores
@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_search_finds_what_a_sort_finds(tree: Tree, dtype: torch.dtype) -> None:
    hidden, weight, bias = parameters(tree, 6, dtype)
    forks = Forks(weight, bias, tree)
    values, ids = forks.all_log_probs(hidden, exact=True).sort(dim=1, descending=True, stable=True)
    for k in {1, min(3, tree.vocab), tree.vocab}:
        found = best_tokens(forks, hidden, k)
        assert torch.equal(found[1], ids[:, :k])
        assert_close(found[0], values[:, :k], atol=1e-12, dtype=torch.float64)


@pytest.mark.both_cores
@pytest.mark.parametrize("size", [0.0, 0.3, 3.0])
def test_a_thousand_states(size: float) -> None:
    """Flat and peaked distributions; with size 0 whole levels tie."""
    tree = huffman(1 / np.arange(1, 301))
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(1000, 16, generator=random)
    weight = size * torch.randn(299, 16, generator=random)
    forks = Forks(weight, None, tree)
    ids = forks.all_log_probs(hidden, exact=True).sort(dim=1, descending=True, stable=True)[1]
    assert torch.equal(best_tokens(forks, hidden, 10)[1], ids[:, :10])


@pytest.mark.both_cores
def test_ties_go_to_the_lowest_id_also_across_subtrees() -> None:
    tree = read_tree([[7, 6, 5], [[4, 3], [2, 1, 0]]], 8)
    forks = Forks(torch.zeros(7, 2), None, tree)
    values, ids = best_tokens(forks, torch.ones(1, 2), 8)
    assert ids.tolist() == [[5, 6, 7, 3, 4, 0, 1, 2]]
    bias = torch.tensor([0.0] * 7)
    # All tokens at 1/8: the order of ids, though no subtree holds neighbours.
    even = read_tree([[[7, 0], [3, 5]], [[1, 6], [2, 4]]], 8)
    assert best_tokens(Forks(torch.zeros(7, 2), bias, even), torch.ones(1, 2), 3)[1].tolist() == [
        [0, 1, 2]
    ]
    assert_close(values[0, 0], math.log(1 / 6), atol=1e-12)


@pytest.mark.both_cores
def test_tokens_of_probability_0_come_last_in_the_order_of_ids() -> None:
    tree = balanced(8)
    bias = torch.tensor([-math.inf, *[0.0] * 6])  # the first branch of the root is closed
    values, ids = best_tokens(Forks(torch.zeros(7, 2), bias, tree), torch.ones(1, 2), 8)
    assert ids.tolist() == [[4, 5, 6, 7, 0, 1, 2, 3]]
    assert_close(values.exp(), torch.tensor([[0.25] * 4 + [0.0] * 4]), atol=1e-15)


@pytest.mark.both_cores
@pytest.mark.parametrize("tree", [balanced(9), balanced(9, arity=3)], ids=["2", "3"])
def test_a_nan_is_no_token(tree: Tree) -> None:
    hidden = torch.ones(3, 4)
    hidden[1, 2] = math.nan
    forks = Forks(torch.randn(8, 4), None, tree)
    values, ids = best_tokens(forks, hidden, 2)
    assert ids[1].tolist() == [-1, -1]
    assert values[1].isnan().all()
    assert (ids[[0, 2]] >= 0).all()
    log_p = forks.token_log_prob(hidden, torch.arange(3), torch.tensor([4, 4, 4]))
    assert log_p.isnan().tolist() == [False, True, False]
    assert forks.all_log_probs(hidden).isnan().all(1).tolist() == [False, True, False]


@pytest.mark.both_cores
def test_a_nan_is_no_token_even_where_there_is_one() -> None:
    forks = Forks(torch.empty(0, 2), None, balanced(1))
    values, ids = best_tokens(forks, torch.tensor([[1.0, 2.0], [math.nan, 0.0]]), 1)
    assert ids.tolist() == [[0], [-1]]
    assert_close(values, torch.tensor([[0.0], [math.nan]]), equal_nan=True)


@pytest.mark.parametrize("tree", [huffman([1, 2, 3]), read_tree([0, 1, 2], 3)], ids=["2", "3"])
def test_far_from_0_without_overflow(tree: Tree) -> None:
    hidden = torch.tensor([[1e4]], requires_grad=True)
    weight = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    log_p = Forks(weight, None, tree).token_log_prob(
        hidden, torch.zeros(3, dtype=torch.long), torch.arange(3)
    )
    assert log_p.isfinite().all()
    assert_close(log_p.exp().sum(), 1.0, atol=1e-12)
    assert float(log_p.detach().min()) in (-1e8, -2e8)
    log_p.sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


@pytest.mark.both_cores
def test_deep_chains() -> None:
    tree = chain(2000)
    weight = (0.1 * torch.randn(1999, 8)).requires_grad_()
    hidden = torch.randn(3, 8)
    forks = Forks(weight, None, tree)
    log_p = forks.all_log_probs(hidden)
    assert_close(log_p.exp().sum(1), torch.ones(3), atol=1e-5)
    words = torch.tensor([0, 1000, 1999])
    single = forks.token_log_prob(hidden, torch.arange(3), words)
    assert_close(single, log_p.double().gather(1, words[:, None])[:, 0], rtol=1e-5)
    single.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
    ids = forks.all_log_probs(hidden, exact=True).sort(dim=1, descending=True, stable=True)[1]
    assert torch.equal(best_tokens(forks, hidden, 5)[1], ids[:, :5])


@pytest.mark.parametrize("arity", [2, 10])
def test_a_hundred_thousand_tokens_sum_to_1(arity: int) -> None:
    tree = huffman(1 / np.arange(1, 100_001), arity=arity)
    weight = 0.3 * torch.randn(99_999, 16)
    log_p = Forks(weight, None, tree).all_log_probs(3 * torch.randn(2, 16))
    assert_close(log_p.double().exp().sum(1), torch.ones(2), atol=1e-5)


@EVERY
def test_functional_transforms(tree: Tree) -> None:
    hidden, weight, bias = parameters(tree)
    token, words = torch.arange(4), torch.tensor([0, tree.vocab - 1, 0, tree.vocab // 2])

    def loss(w: Tensor) -> Tensor:
        return Forks(w, bias.detach(), tree).token_log_prob(hidden.detach(), token, words).sum()

    (expected,) = torch.autograd.grad(loss(weight), weight)
    assert_close(torch.func.grad(loss)(weight.detach()), expected, atol=1e-12)
