"""What the tests of trees share: a chain, and a tree as the textbook writes it."""

import itertools

import torch

from lmhead.vocab.tree import Tree
from lmhead.vocab.tree_files import read_tree


def chain(vocab: int) -> Tree:
    """Word 0 is one decision away, the last two are V - 1 away."""
    forks = [[token, -(token + 1)] for token in range(vocab - 2)]
    return read_tree({"forks": [*forks, [vocab - 2, vocab - 1]]}, vocab)


def branches(tree: Tree) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The path of every token, as the textbook writes it."""
    steps = tree.paths(torch.arange(tree.vocab))
    paths: list[list[tuple[int, int]]] = [[] for _ in range(tree.vocab)]
    for owner, fork, branch in zip(*(t.tolist() for t in steps), strict=True):
        paths[owner].append((fork, branch))
    return tuple(map(tuple, paths))


def rows(tree: Tree) -> tuple[tuple[int, ...], ...]:
    """The rows of the weight of every fork."""
    first = tree.tables.first_row.tolist()
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(first))
