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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmhead.sweep import kernels

Ints = npt.NDArray[np.int64]


class Steps(NamedTuple):
    """The decisions on the paths of some tokens, path after path, each from the root down.

    Attributes:
        owner: (P,), whose path it is: the place of the token among those given.
        fork: (P,), where the decision is made.
        branch: (P,), how it goes.
    """

    owner: Tensor
    fork: Tensor
    branch: Tensor


@dataclass(frozen=True)
class Tables:
    """The tree on one device, int64. N nodes, F forks, E = N - 1 edges: fork by fork, in order.

    Attributes:
        parent: (N,), the fork above a node; -1 for the root.
        branch: (N,), its place there; 0 for the root.
        depth: (N,), how many decisions lead to it.
        start: (F + 1,), the first edge of a fork.
        child: (E,), the node at the end of an edge.
        first_row: (F + 1,), the first row of weights of a fork.
        below: (N,), number of tokens below a node, itself included.
    """

    parent: Tensor
    branch: Tensor
    depth: Tensor
    start: Tensor
    child: Tensor
    first_row: Tensor
    below: Tensor


@dataclass(frozen=True, eq=False)
class Tree:
    """Tokens at the leaves, decisions at the forks.

    Made by `huffman`, `balanced`, `read_tree`, or `Tree.from_parents`.

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

        Args:
            vocab: V.
            start: (F + 1,), the first entry of each fork in `child`.
            child: (E,), tokens and V + forks.
            root: the fork at the top; ignored if there is none, which a single token needs.
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
        found = np.concatenate(order)
        if len(found) < forks:
            lost = int(np.setdiff1d(np.arange(forks), found)[0])
            raise ValueError(
                f"tree must be a tree: fork {lost} is on a cycle, out of reach of the root"
            )
        number = np.empty(forks, np.int64)
        number[found] = np.arange(forks)
        child = child[ranges(start[found], sizes[found])]
        is_fork = child >= vocab
        child = np.where(is_fork, vocab + number[np.where(is_fork, child - vocab, 0)], child)
        return cls(vocab, np.concatenate([[0], np.cumsum(sizes[found])]), child)

    @classmethod
    def from_parents(cls, vocab: int, parents: Tensor) -> Tree:
        """Return the tree of a checkpoint: (N, 2), the fork above each node and its place there."""
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
        above, place = table[nodes].T
        if (above >= forks).any():
            raise ValueError(f"parents must be forks in [0, {forks}); got {int(above.max())}")
        sizes = np.bincount(above, minlength=forks)
        order = np.lexsort((place, above))
        if (place[order] != ranges(np.zeros(forks, np.int64), sizes)).any():
            raise ValueError("parents must give the branches of a fork the places 0, 1, 2, ...")
        start = np.concatenate([[0], np.cumsum(sizes)])
        return cls.from_forks(vocab, start, nodes[order], int(roots[0]) - vocab)

    @property
    def forks(self) -> int:
        """F, how many there are."""
        return len(self.start) - 1

    @cached_property
    def arity(self) -> int:
        """The most branches that a fork has; 0 for a single token."""
        return int(np.diff(self.start).max(initial=0))

    @cached_property
    def is_binary(self) -> bool:
        """Whether every fork has two branches."""
        return bool((np.diff(self.start) == 2).all())

    @cached_property
    def levels(self) -> Ints:
        """The first fork of each level, and F at the end."""
        firsts, at = [0], 0
        while at < self.forks:
            edges = self.child[self.start[firsts[-1]] : self.start[at + 1]]
            inside = edges[edges >= self.vocab]
            firsts.append(at + 1)
            at = int(inside[-1]) - self.vocab if len(inside) else self.forks
        return np.array(firsts if self.forks else [0], np.int64)

    @cached_property
    def tables(self) -> Tables:
        """All tables, on the CPU."""
        sizes = np.diff(self.start)
        parent = np.full(self.vocab + self.forks, -1)
        branch, depth = np.zeros_like(parent), np.zeros_like(parent)
        parent[self.child] = np.repeat(np.arange(self.forks), sizes)
        branch[self.child] = ranges(np.zeros(self.forks, np.int64), sizes)
        below = (np.arange(len(parent)) < self.vocab).astype(np.int64)
        spans = [
            slice(int(self.start[a]), int(self.start[b]))
            for a, b in zip(self.levels, self.levels[1:], strict=False)
        ]
        for edges in spans:
            nodes = self.child[edges]
            depth[nodes] = depth[self.vocab + parent[nodes]] + 1
        for edges in reversed(spans):
            nodes = self.child[edges]
            np.add.at(below, self.vocab + parent[nodes], below[nodes])
        made = parent, branch, depth, self.start, self.child
        first_row = self.start - np.arange(self.forks + 1)
        return Tables(*(torch.from_numpy(t) for t in (*made, first_row, below)))

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
        """(N, 2), what `from_parents` takes: the fork above each node and its place there."""
        return torch.stack([self.tables.parent, self.tables.branch], 1)

    @property
    def depths(self) -> Tensor:
        """(V,), how many decisions lead to each token."""
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
            given = (tokens.contiguous(), ends, fork, branch)
            kernels.core.tree_paths(tables.parent, tables.branch, self.vocab, *given)
            return Steps(owner, fork, branch)
        node, place = tokens[lengths > 0], ends[lengths > 0] - 1
        left = lengths[lengths > 0]
        while len(node):
            above = tables.parent[node]
            fork[place], branch[place] = above, tables.branch[node]
            left = left - 1
            more = left > 0
            node, place, left = self.vocab + above[more], place[more] - 1, left[more]
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
        at = int(np.argmax(wrong))
        fork = int(np.searchsorted(start, at, side="right")) - 1
        raise ValueError(
            f"nodes of the tree must be tokens in [0, {vocab}) or forks in [0, {forks}); "
            f"got {int(child[at])} in fork {fork}"
        )
    counts = np.bincount(child, minlength=vocab + forks)
    again = np.flatnonzero(counts[:vocab] > 1)
    if len(again):
        token = int(again[0])
        raise ValueError(f"tree must hold every token once; {token} is there {counts[token]} times")
    missing = np.flatnonzero(counts[:vocab] == 0)
    if len(missing):
        raise ValueError(
            f"tree must hold every token of [0, {vocab}); it misses {len(missing)}, "
            f"the first is {int(missing[0])}"
        )
    if counts[vocab + root]:
        raise ValueError(f"tree must be a tree: its root, fork {root}, is a branch of another fork")
    counts[vocab + root] = 1
    odd = np.flatnonzero(counts[vocab:] != 1)
    if len(odd):
        fork = int(odd[0])
        raise ValueError(
            f"tree must be a tree: fork {fork} is a branch of {counts[vocab + fork]} forks, "
            f"it must be of 1"
        )
