"""Chapter 11. Hierarchical softmax: a word is a path of yes-or-no questions.

Softmax scores all V words to find the probability of one. Put the words at the leaves of a binary
tree instead, and give every fork a vector. At a fork with vector w, go left with probability
σ(w · h), right with 1 - σ(w · h) = σ(-w · h). The probability of a word is the product along its
path:

    p(leaf) = Π_forks σ(s · w · h),   s = +1 for left, -1 for right

A balanced tree has log₂ V forks on a path, and a Huffman tree, which puts frequent words near the
root, still fewer on average. At every fork the two ways sum to 1, so all leaves together do too.

The loss -log p(leaf) is a sum of small cross-entropies, and each fork's gradient is p - y again.

A fork may have more than two branches: then it is a small softmax, with a vector for each branch
but the last, whose score is 0. (With two branches, softmax([z, 0]) = [σ(z), σ(-z)]: the same.) So
any tree over V words has V - 1 vectors.
"""

import heapq
from typing import NamedTuple, TypeAlias

import numpy as np

from lmhead.reference.arrays import Array, ArrayLike, floats
from lmhead.reference.linear import LinearGrads, sigmoid
from lmhead.reference.softmax import log_softmax, softmax

__all__ = [
    "BinaryPath",
    "BinaryTree",
    "Branches",
    "DecisionTree",
    "Nested",
    "decision_tree",
    "huffman_nested",
    "huffman_tree",
    "leaf_log_prob",
    "leaf_log_prob_backward",
    "leaf_probabilities",
    "word_log_prob",
    "word_log_prob_backward",
]

BinaryPath: TypeAlias = tuple[tuple[int, int], ...]
"""From the root to a leaf: (fork, +1 for left or -1 for right), ..."""


class BinaryTree(NamedTuple):
    """`paths[word]` leads from the root to the word; forks are numbered 0 to `forks` - 1."""

    paths: tuple[BinaryPath, ...]
    forks: int


def huffman_tree(counts: ArrayLike) -> BinaryTree:
    """The tree with the shortest average path: join the two rarest subtrees until one is left.

    With V words there are V - 1 forks; the last one made is the root.

    >>> tree = huffman_tree([8, 1, 1, 2])
    >>> [len(path) for path in tree.paths]
    [1, 3, 3, 2]
    >>> tree.forks
    3
    """
    counts = floats(counts)
    # Each entry: (count, a number that breaks ties, {word: its path below this subtree}).
    heap: list[tuple[float, int, dict[int, BinaryPath]]]
    heap = [(float(count), word, {word: ()}) for word, count in enumerate(counts)]
    heapq.heapify(heap)
    for fork in range(len(counts) - 1):
        left_count, _, left = heapq.heappop(heap)
        right_count, _, right = heapq.heappop(heap)
        joined = {word: ((fork, +1), *path) for word, path in left.items()}
        joined |= {word: ((fork, -1), *path) for word, path in right.items()}
        heapq.heappush(heap, (left_count + right_count, len(counts) + fork, joined))
    paths = heap[0][2]
    return BinaryTree(tuple(paths[word] for word in range(len(counts))), len(counts) - 1)


def leaf_log_prob(hidden: ArrayLike, weight: ArrayLike, tree: BinaryTree, word: int) -> float:
    """One word: log p = Σ_forks log σ(s · w · h). Only the forks on its path are read.

    Shapes: hidden (D,), weight (forks, D), one row per fork.

    >>> tree = huffman_tree([8, 1, 1, 2])
    >>> round(leaf_log_prob([1.0, 1.0], np.zeros((3, 2)), tree, 3), 4)  # two coins: log 1/4
    -1.3863
    """
    hidden, weight = floats(hidden), floats(weight)
    # log σ(a) = -log(1 + e^-a), which logaddexp computes without overflow.
    return -sum(float(np.logaddexp(0.0, -s * (weight[f] @ hidden))) for f, s in tree.paths[word])


def leaf_log_prob_backward(
    grad: float, hidden: ArrayLike, weight: ArrayLike, tree: BinaryTree, word: int
) -> LinearGrads:
    """Gradients: at each fork, ∂(w · h) = ∂ · (y - σ(w · h)), with y = 1 for left, 0 for right.

    Then ∂w = ∂(w · h) h, and ∂h = Σ_forks ∂(w · h) w. Forks off the path get 0. (This is y - p,
    not p - y, since it is the gradient of log p and not of -log p.)

    >>> tree = huffman_tree([8, 1, 1, 2])
    >>> leaf_log_prob_backward(1.0, [1.0, 2.0], np.zeros((3, 2)), tree, 0).weight
    array([[ 0. ,  0. ],
           [ 0. ,  0. ],
           [-0.5, -1. ]])
    """
    hidden, weight = floats(hidden), floats(weight)
    grad_scores = np.zeros(tree.forks)
    for fork, sign in tree.paths[word]:
        grad_scores[fork] = grad * ((sign > 0) - sigmoid(weight[fork] @ hidden))
    return LinearGrads(
        x=grad_scores @ weight, weight=np.outer(grad_scores, hidden), bias=grad_scores
    )


def leaf_probabilities(hidden: ArrayLike, weight: ArrayLike, tree: BinaryTree) -> Array:
    """All words: p(leaf) for every leaf. They sum to 1 by construction; nothing is divided.

    >>> p = leaf_probabilities([1.0, -1.0], [[1, 0], [2, 1], [0, 1]], huffman_tree([8, 1, 1, 2]))
    >>> p.round(4), round(float(p.sum()), 12)
    (array([0.7311, 0.0529, 0.0195, 0.1966]), 1.0)
    """
    return np.exp([leaf_log_prob(hidden, weight, tree, word) for word in range(len(tree.paths))])


# More than two branches ---------------------------------------------------------------------------

Nested: TypeAlias = "int | list[Nested]"
"""A tree as nested lists: a list is a fork, an integer is a word."""

Branches: TypeAlias = tuple[tuple[int, int], ...]
"""From the root to a word: (fork, branch), ..."""


class DecisionTree(NamedTuple):
    """`paths[word]` leads from the root to the word; `rows[fork]` are its vectors, one per branch
    but the last.
    """

    paths: tuple[Branches, ...]
    rows: tuple[tuple[int, ...], ...]


def decision_tree(nested: Nested) -> DecisionTree:
    """Number forks and their vectors, level by level from the root.

    >>> tree = decision_tree([[0, 1, 2], 3])
    >>> tree.paths[2], tree.rows
    (((0, 0), (1, 2)), ((0,), (1, 2)))
    """
    paths: dict[int, Branches] = {}
    rows: list[tuple[int, ...]] = []
    level: list[tuple[Nested, Branches]] = [(nested, ())]
    used = 0
    while level:
        below: list[tuple[Nested, Branches]] = []
        for node, path in level:
            if isinstance(node, int):
                paths[node] = path
                continue
            fork = len(rows)
            rows.append(tuple(range(used, used + len(node) - 1)))
            used += len(node) - 1
            below += [(child, (*path, (fork, branch))) for branch, child in enumerate(node)]
        level = below
    return DecisionTree(tuple(paths[word] for word in range(len(paths))), tuple(rows))


def huffman_nested(counts: ArrayLike, arity: int = 2) -> Nested:
    """Huffman's tree with up to `arity` branches per fork: join that many of the rarest subtrees.

    The first join takes fewer, if need be, so that all others are full.

    >>> huffman_nested([8, 1, 1, 2])
    [[3, [1, 2]], 0]
    >>> huffman_nested([8, 1, 1, 2], arity=3)
    [3, [1, 2], 0]
    """
    counts = floats(counts)
    heap: list[tuple[float, int, Nested]]
    heap = [(float(count), word, word) for word, count in enumerate(counts)]
    heapq.heapify(heap)
    take, number = (len(counts) - 2) % (arity - 1) + 2, len(counts)
    while len(heap) > 1:
        joined = [heapq.heappop(heap) for _ in range(take)]
        heapq.heappush(heap, (sum(j[0] for j in joined), number, [j[2] for j in joined]))
        take, number = arity, number + 1
    return heap[0][2]


def _fork_scores(hidden: Array, weight: Array, bias: Array, tree: DecisionTree, fork: int) -> Array:
    """The scores of a fork's branches; that of the last is 0."""
    rows = list(tree.rows[fork])
    return np.append(weight[rows] @ hidden + bias[rows], 0.0)


def word_log_prob(
    hidden: ArrayLike, weight: ArrayLike, bias: ArrayLike, tree: DecisionTree, word: int
) -> float:
    """One word: log p = Σ_forks log softmax(scores of the fork)[branch].

    Shapes: hidden (D,), weight (V - 1, D), bias (V - 1,).

    >>> tree = decision_tree([[0, 1, 2], 3])
    >>> round(word_log_prob([1.0], np.zeros((3, 1)), np.zeros(3), tree, 0), 4)  # log 1/6
    -1.7918
    """
    hidden, weight, bias = floats(hidden), floats(weight), floats(bias)
    return sum(
        float(log_softmax(_fork_scores(hidden, weight, bias, tree, fork))[branch])
        for fork, branch in tree.paths[word]
    )


def word_log_prob_backward(
    grad: float,
    hidden: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike,
    tree: DecisionTree,
    word: int,
) -> LinearGrads:
    """Gradients: at each fork, ∂scores = ∂ · (y - p), as in every softmax.

    >>> tree = decision_tree([0, 1, 2])
    >>> word_log_prob_backward(3.0, [1.0], np.zeros((2, 1)), np.zeros(2), tree, 0).bias
    array([ 2., -1.])
    """
    hidden, weight, bias = floats(hidden), floats(weight), floats(bias)
    grad_scores = np.zeros(len(weight))
    for fork, branch in tree.paths[word]:
        p = softmax(_fork_scores(hidden, weight, bias, tree, fork))
        y = np.arange(len(p)) == branch
        grad_scores[list(tree.rows[fork])] = grad * (y - p)[:-1]
    return LinearGrads(
        x=grad_scores @ weight, weight=np.outer(grad_scores, hidden), bias=grad_scores
    )
