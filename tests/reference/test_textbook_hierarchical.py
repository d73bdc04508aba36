"""Hierarchical softmax: a distribution whatever the tree, with the right gradients."""

import numpy as np
import pytest
from compare import assert_close
from finite_differences import assert_gradient
from hypothesis import given
from hypothesis import strategies as st

from lmhead import reference as ref

counts_of_words = st.lists(st.integers(0, 1000), min_size=1, max_size=20)


@given(counts_of_words, st.integers(0, 2**32 - 1), st.sampled_from([0.1, 1.0, 30.0]))
def test_leaves_sum_to_1(counts: list[int], seed: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    tree = ref.huffman_tree(counts)
    p = ref.leaf_probabilities(rng.normal(size=3), size * rng.normal(size=(tree.forks, 3)), tree)
    assert p.shape == (len(counts),)
    assert (p >= 0).all()
    assert_close(p.sum(), np.float64(1.0), rtol=1e-13)


@given(counts_of_words)
def test_a_huffman_tree_is_within_one_question_of_the_entropy(counts: list[int]) -> None:
    n = np.array(counts, dtype=float) + 1
    p = n / n.sum()
    tree = ref.huffman_tree(n)
    lengths = np.array([len(path) for path in tree.paths])
    entropy_in_bits = -(p * np.log2(p)).sum()
    assert entropy_in_bits - 1e-9 <= (p * lengths).sum() < entropy_in_bits + 1
    assert (2.0**-lengths).sum() == 1.0  # Kraft: every fork has both its branches


def test_the_product_along_the_path() -> None:
    rng = np.random.default_rng(0)
    tree = ref.huffman_tree([5, 1, 2, 3])
    hidden, weight = rng.normal(size=3), rng.normal(size=(3, 3))
    for word, path in enumerate(tree.paths):
        product = 1.0
        for fork, sign in path:
            left = float(ref.sigmoid(weight[fork] @ hidden))
            product *= left if sign > 0 else 1 - left
        log_prob = ref.leaf_log_prob(hidden, weight, tree, word)
        assert np.exp(log_prob) == pytest.approx(product)


def test_two_words_are_a_softmax_of_two() -> None:
    tree = ref.huffman_tree([1, 2])
    hidden, weight = np.array([0.3, -1.0]), np.array([[2.0, 0.5]])
    expected = ref.softmax([float(weight[0] @ hidden), 0.0])
    assert_close(ref.leaf_probabilities(hidden, weight, tree), expected, rtol=1e-14)


@pytest.mark.parametrize("word", range(5))
def test_gradients(word: int) -> None:
    rng = np.random.default_rng(1)
    tree = ref.huffman_tree([5, 1, 2, 3, 3])
    hidden, weight = rng.normal(size=3), rng.normal(size=(4, 3))
    grads = ref.leaf_log_prob_backward(1.3, hidden, weight, tree, word)
    assert_gradient(grads.x, lambda h: 1.3 * ref.leaf_log_prob(h, weight, tree, word), hidden)
    assert_gradient(grads.weight, lambda w: 1.3 * ref.leaf_log_prob(hidden, w, tree, word), weight)
    on_path = {fork for fork, _ in tree.paths[word]}
    off_path = [fork for fork in range(4) if fork not in on_path]
    assert not grads.weight[off_path].any()


def test_far_from_0_without_overflow() -> None:
    tree = ref.huffman_tree([1, 2])
    log_probs = [ref.leaf_log_prob([1.0], [[1e6]], tree, word) for word in range(2)]
    assert log_probs == [0.0, -1e6]


@given(counts_of_words)
def test_two_branches_are_the_binary_tree(counts: list[int]) -> None:
    rng = np.random.default_rng(2)
    binary, nested = ref.huffman_tree(counts), ref.decision_tree(ref.huffman_nested(counts))
    hidden, weight = rng.normal(size=3), rng.normal(size=(binary.forks, 3))
    # The forks of one are numbered from the leaves, of the other from the root: match by paths.
    order = np.zeros(binary.forks, dtype=int)
    for path, branches in zip(binary.paths, nested.paths, strict=True):
        for (fork, sign), (other, branch) in zip(path, branches, strict=True):
            assert (sign > 0) == (branch == 0)
            order[nested.rows[other][0]] = fork
    for word in range(len(counts)):
        one = ref.leaf_log_prob(hidden, weight, binary, word)
        bias = np.zeros(binary.forks)
        other_one = ref.word_log_prob(hidden, weight[order], bias, nested, word)
        assert other_one == pytest.approx(one, abs=1e-12)


@given(counts_of_words, st.integers(2, 6), st.sampled_from([0.1, 1.0, 30.0]))
def test_words_sum_to_1_at_any_arity(counts: list[int], arity: int, size: float) -> None:
    rng = np.random.default_rng(3)
    tree = ref.decision_tree(ref.huffman_nested(counts, arity))
    rows = sum(map(len, tree.rows))
    assert rows == len(counts) - 1
    weight, bias = size * rng.normal(size=(rows, 3)), rng.normal(size=rows)
    hidden = rng.normal(size=3)
    words = range(len(counts))
    p = np.exp([ref.word_log_prob(hidden, weight, bias, tree, word) for word in words])
    assert_close(p.sum(), np.float64(1.0), rtol=1e-13)


@pytest.mark.parametrize("word", range(6))
def test_gradients_of_forks_with_many_branches(word: int) -> None:
    rng = np.random.default_rng(4)
    tree = ref.decision_tree([[0, 1, 2], 3, [4, 5]])
    hidden, weight, bias = rng.normal(size=3), rng.normal(size=(5, 3)), rng.normal(size=5)
    grads = ref.word_log_prob_backward(1.3, hidden, weight, bias, tree, word)
    rest = tree, word
    assert_gradient(grads.x, lambda h: 1.3 * ref.word_log_prob(h, weight, bias, *rest), hidden)
    assert_gradient(grads.weight, lambda w: 1.3 * ref.word_log_prob(hidden, w, bias, *rest), weight)
    assert grads.bias is not None
    assert_gradient(grads.bias, lambda b: 1.3 * ref.word_log_prob(hidden, weight, b, *rest), bias)
