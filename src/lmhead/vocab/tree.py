"""A tree over the tokens of a vocabulary, as tables of integers.

In:  forks with their branches, from `tree_makers` (Huffman, balanced) or from `tree_files` (JSON).
Out: `Tree`, checked: parents, children, and the path of a token.

A node is a token (0 to V - 1) or a fork (V + f). Forks are numbered from the root, 0, level by
level. A fork with c branches has c - 1 rows of weights: the last branch has the score 0, as in
a binary decision. Every tree over V tokens has V - 1 rows in all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmhead.sweep import kernels

Ints = npt.NDArray[np.int64]


class Steps(NamedTuple):
    """The decisions on the paths of some tokens, path after path, each from the root down."""

    owner: Tensor  # (P,), index of the token, among those given, to whose path it belongs
    fork: Tensor  # (P,), the fork of the decision
    branch: Tensor  # (P,), the branch that is taken


@dataclass(frozen=True)
class Tables:
    """The tree on one device, int64. N nodes, F forks, E = N - 1 edges: fork by fork, in order."""

    parent: Tensor  # (N,), the fork above a node; -1 for the root
    branch: Tensor  # (N,), its index among the branches of that fork; 0 for the root
    depth: Tensor  # (N,), number of decisions from the root
    start: Tensor  # (F + 1,), the first edge of a fork
    child: Tensor  # (E,), the node at the end of an edge
    first_row: Tensor  # (F + 1,), the first row of weights of a fork


@dataclass(frozen=True, eq=False)
class Tree:
    """Tokens at the leaves, decisions at the forks.

    Created by `huffman`, `balanced`, `read_tree`, or `Tree.from_parents`.

    Attributes:
        vocab: V, the number of tokens.
        start: (F + 1,), the first edge of each fork.
        child: (E,), the node at the end of each edge.

    >>> from lmhead.vocab.tree_files import read_tree
    >>> tree = read_tree([[0, 1], 2], vocab=3)
    >>> tree
    Tree(3 tokens, 2 forks, paths of 1 to 2 decisions)
    >>> steps = tree.paths(torch.tensor([2, 1]))
    >>> steps.owner, steps.fork, steps.branch
    (tensor([0, 1, 1]), tensor([0, 0, 1]), tensor([1, 0, 1]))
    """

    vocab: int
    start: Ints
    child: Ints
    _tables: dict[torch.device, Tables] = field(default_factory=dict, repr=False)

    @classmethod
    def from_forks(cls, vocab: int, start: Ints, child: Ints, root: int) -> Tree:
        """Check forks in any order, and number them level by level from the root.

        `start` (F + 1,) has the first entry of each fork in `child` (E,), which holds tokens and
        V + forks. The root is ignored for a single token, which has no fork.
        """
        forks = len(start) - 1
        if forks == 0:
            if vocab != 1:
                raise ValueError(f"tree must have forks for {vocab} tokens; got none")
            return cls(vocab, np.zeros(1, np.int64), np.zeros(0, np.int64))
        _check_forks(vocab, start, child, root)
        sizes = np.diff(start)
        level, order = np.array([root]), [np.array([root])]
        while len(level):
            below = child[ranges(start[level], sizes[level])]
            level = below[below >= vocab] - vocab
            order.append(level)
        reached = np.concatenate(order)
        if len(reached) < forks:
            unreached = int(np.setdiff1d(np.arange(forks), reached)[0])
            raise ValueError(
                f"tree must be a tree: fork {unreached} is on a cycle, out of reach of the root"
            )
        number = np.empty(forks, np.int64)
        number[reached] = np.arange(forks)
        child = child[ranges(start[reached], sizes[reached])]
        is_fork = child >= vocab
        child = np.where(is_fork, vocab + number[np.where(is_fork, child - vocab, 0)], child)
        return cls(vocab, np.concatenate([[0], np.cumsum(sizes[reached])]), child)

    @classmethod
    def from_parents(cls, vocab: int, parents: Tensor) -> Tree:
        """Return the tree of a checkpoint, (N, 2): fork above each node, and its branch there."""
        table = parents.detach().cpu().numpy().astype(np.int64)
        if table.ndim != 2 or table.shape[1] != 2 or len(table) < vocab:
            raise ValueError(
                f"parents must have shape (tokens and forks, 2) for {vocab} tokens; "
                f"got {tuple(parents.shape)}"
            )
        forks = len(table) - vocab
        roots = np.flatnonzero(table[:, 0] < 0)
        if len(roots) != 1 or (forks and roots[0] < vocab):
            raise ValueError(f"parents must have one root, a fork; got {len(roots)}")
        nodes = np.delete(np.arange(len(table)), roots)
        parent, branch = table[nodes].T
        if (parent >= forks).any():
            raise ValueError(f"parents must be forks in [0, {forks}); got {int(parent.max())}")
        sizes = np.bincount(parent, minlength=forks)
        order = np.lexsort((branch, parent))
        if (branch[order] != ranges(np.zeros(forks, np.int64), sizes)).any():
            raise ValueError("parents must give the branches of a fork the places 0, 1, 2, ...")
        start = np.concatenate([[0], np.cumsum(sizes)])
        return cls.from_forks(vocab, start, nodes[order], int(roots[0]) - vocab)

    @property
    def forks(self) -> int:
        """F, the number of forks."""
        return len(self.start) - 1

    @cached_property
    def arity(self) -> int:
        """Largest number of branches of a fork; 0 for a single token."""
        return int(np.diff(self.start).max(initial=0))

    @cached_property
    def is_binary(self) -> bool:
        """Whether every fork has two branches."""
        return bool((np.diff(self.start) == 2).all())

    @cached_property
    def levels(self) -> Ints:
        """The first fork of each level, and F at the end."""
        firsts, last = [0], 0
        while last < self.forks:
            edges = self.child[self.start[firsts[-1]] : self.start[last + 1]]
            inside = edges[edges >= self.vocab]
            firsts.append(last + 1)
            last = int(inside[-1]) - self.vocab if len(inside) else self.forks
        return np.array(firsts if self.forks else [0], np.int64)

    @cached_property
    def tables(self) -> Tables:
        """All tables, on the CPU."""
        sizes = np.diff(self.start)
        parent = np.full(self.vocab + self.forks, -1)
        branch, depth = np.zeros_like(parent), np.zeros_like(parent)
        parent[self.child] = np.repeat(np.arange(self.forks), sizes)
        branch[self.child] = ranges(np.zeros(self.forks, np.int64), sizes)
        for a, b in pairwise(self.levels):
            nodes = self.child[self.start[a] : self.start[b]]
            depth[nodes] = depth[self.vocab + parent[nodes]] + 1
        first_row = self.start - np.arange(self.forks + 1)
        arrays = parent, branch, depth, self.start, self.child, first_row
        return Tables(*map(torch.from_numpy, arrays))

    def on(self, device: torch.device) -> Tables:
        """Return the tables on a device, moved there once."""
        if device.type in ("cpu", "meta"):
            return self.tables
        if device not in self._tables:
            moved = (getattr(self.tables, name).to(device) for name in Tables.__annotations__)
            self._tables[device] = Tables(*moved)
        return self._tables[device]

    @property
    def parents(self) -> Tensor:
        """(N, 2), the argument of `from_parents`: fork above each node, and its branch there."""
        return torch.stack([self.tables.parent, self.tables.branch], 1)

    @property
    def depths(self) -> Tensor:
        """(V,), number of decisions on the path of each token."""
        return self.tables.depth[: self.vocab]

    def paths(self, tokens: Tensor) -> Steps:
        """Return the decisions that lead to each of the tokens (M,), all paths at once.

        No path is stored: the tree costs O(V) memory whatever its shape.
        """
        tables = self.on(tokens.device)
        lengths = tables.depth[tokens]
        ends = lengths.cumsum(0)
        owner = torch.repeat_interleave(lengths)
        fork, branch = torch.empty_like(owner), torch.empty_like(owner)
        wrapped = torch._C._are_functorch_transforms_active()
        if kernels.core is not None and kernels.readable(tokens) and not wrapped:
            arguments = (tokens.contiguous(), ends, fork, branch)
            kernels.core.tree_paths(tables.parent, tables.branch, self.vocab, *arguments)
            return Steps(owner, fork, branch)
        node, index = tokens[lengths > 0], ends[lengths > 0] - 1
        remaining = lengths[lengths > 0]
        while len(node):
            parent = tables.parent[node]
            fork[index], branch[index] = parent, tables.branch[node]
            remaining = remaining - 1
            more = remaining > 0
            node, index, remaining = self.vocab + parent[more], index[more] - 1, remaining[more]
        return Steps(owner, fork, branch)

    def to_json(self) -> str:
        """Return the tree as `{"forks": [[...], ...]}` for `read_tree`: see docs/vocab_tree.md.

        >>> from lmhead.vocab.tree_makers import balanced
        >>> balanced(3).to_json()
        '{"forks": [[-1, 0], [1, 2]]}'
        """
        names = np.where(self.child < self.vocab, self.child, self.vocab - self.child)
        return json.dumps({"forks": [part.tolist() for part in np.split(names, self.start[1:-1])]})

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Tree):
            return NotImplemented
        return (
            self.vocab == other.vocab
            and np.array_equal(self.start, other.start)
            and np.array_equal(self.child, other.child)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if not self.forks:
            return f"Tree({self.vocab} token, no forks)"
        low, high = int(self.depths.min()), int(self.depths.max())
        return f"Tree({self.vocab} tokens, {self.forks} forks, paths of {low} to {high} decisions)"


def ranges(starts: Ints, sizes: Ints) -> Ints:
    """Return starts[0], starts[0] + 1, ... (sizes[0] of them), starts[1], ..., in one array.

    >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(sizes)
    return np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1] if len(ends) else 0)


def _check_forks(vocab: int, start: Ints, child: Ints, root: int) -> None:
    """Validate forks: every token once, every fork but the root once, two branches or more."""
    forks = len(start) - 1
    sizes = np.diff(start)
    if (sizes < 2).any():
        small = int(np.argmax(sizes < 2))
        raise ValueError(
            f"a fork of the tree must have at least 2 branches; fork {small} has {sizes[small]}"
        )
    wrong = (child < 0) | (child >= vocab + forks)
    if wrong.any():
        index = int(np.argmax(wrong))
        fork = int(np.searchsorted(start, index, side="right")) - 1
        raise ValueError(
            f"nodes of the tree must be tokens in [0, {vocab}) or forks in [0, {forks}); "
            f"got {int(child[index])} in fork {fork}"
        )
    counts = np.bincount(child, minlength=vocab + forks)
    repeated = np.flatnonzero(counts[:vocab] > 1)
    if len(repeated):
        token = int(repeated[0])
        raise ValueError(f"tree must hold every token once; {token} occurs {counts[token]} times")
    missing = np.flatnonzero(counts[:vocab] == 0)
    if len(missing):
        raise ValueError(
            f"tree must hold every token of [0, {vocab}); it misses {len(missing)}, "
            f"the first is {int(missing[0])}"
        )
    if counts[vocab + root]:
        raise ValueError(f"tree must be a tree: its root, fork {root}, is a branch of another fork")
    counts[vocab + root] = 1
    wrong_count = np.flatnonzero(counts[vocab:] != 1)
    if len(wrong_count):
        fork = int(wrong_count[0])
        raise ValueError(
            f"tree must be a tree: fork {fork} is a branch of {counts[vocab + fork]} forks; "
            f"it must be a branch of one"
        )
