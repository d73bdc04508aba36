"""Build Huffman trees from counts, and balanced trees.

In:  token frequencies or the number of tokens; the number of branches of a fork.
Out: a `Tree`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lmhead import checks
from lmhead.vocab.frequencies import check_counts
from lmhead.vocab.tree import Tree


def huffman(frequencies: Any, *, arity: int = 2) -> Tree:
    """Return the tree with the shortest average path: join the rarest subtrees repeatedly.

    Args:
        frequencies: (V,), counts or shares of the tokens, not negative.
        arity: number of subtrees that are joined at a time.

    Among equals, tokens come before joined subtrees, and low ids before high ones: tokens that were
    never seen form a balanced subtree at the bottom.

    >>> huffman([8, 1, 1, 2]).depths
    tensor([1, 3, 3, 2])
    """
    vocab = len(frequencies) if hasattr(frequencies, "__len__") else 0
    checks.check_integer("the number of frequencies", vocab, low=1)
    counts = check_counts(frequencies, vocab).numpy()
    check_arity(arity)
    order = np.argsort(counts, kind="stable")
    # Two queues, both in ascending order: tokens by count, and joined subtrees, which only grow.
    tokens: list[int] = order.tolist()
    token_counts: list[float] = [*counts[order].tolist(), np.inf]
    fork_counts: list[float] = [np.inf] * (vocab + 1)
    children: list[int] = []
    start = [0]
    next_token = next_fork = forks = 0
    # The first join may take fewer, so that all others take `arity`.
    take = (vocab - 2) % (arity - 1) + 2
    while vocab - next_token + forks - next_fork > 1:
        total = 0.0
        for _ in range(take):
            if token_counts[next_token] <= fork_counts[next_fork] and next_token < vocab:
                total += token_counts[next_token]
                children.append(tokens[next_token])
                next_token += 1
            else:
                total += fork_counts[next_fork]
                children.append(vocab + next_fork)
                next_fork += 1
        fork_counts[forks] = total
        forks += 1
        start.append(len(children))
        take = arity
    return Tree.from_forks(vocab, np.array(start), np.array(children, np.int64), forks - 1)


def balanced(vocab: int, *, arity: int = 2) -> Tree:
    """Return a tree with all tokens at the same depth, or one less, in the order of their ids.

    >>> balanced(5).depths
    tensor([2, 2, 2, 3, 3])
    >>> balanced(9, arity=3).depths
    tensor([2, 2, 2, 2, 2, 2, 2, 2, 2])
    """
    checks.check_integer("vocab", vocab, low=1)
    check_arity(arity)
    # Node i of a full tree, counted level by level, has the children k i + 1 to k i + k; those
    # without children are tokens. The last fork has the remaining branches.
    forks = -(-(vocab - 1) // (arity - 1))
    start = np.minimum(np.arange(forks + 1) * arity, forks + vocab - 1)
    node = np.arange(1, forks + vocab)
    child = np.where(node < forks, vocab + node, node - forks)
    return Tree.from_forks(vocab, start, child, 0)


def check_arity(arity: Any) -> None:
    """Validate the maximum number of branches of a fork."""
    checks.check_integer("arity", arity, low=2)
