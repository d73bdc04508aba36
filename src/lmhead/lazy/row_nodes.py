"""Nodes of a program that join, choose, reduce or replace rows of other nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lmhead.lazy.program import (
    Call,
    Dense,
    Env,
    Node,
    Operand,
    Steps,
    index_of,
    run,
    version,
)
from lmhead.scores.protocol import Rows


@dataclass(frozen=True, eq=False)
class Concat(Node):
    """Rows of several nodes, one after the other."""

    nodes: tuple[Node, ...]

    @cached_property
    def n_rows(self) -> int:  # type: ignore[override]
        """The rows of all parts together."""
        return sum(node.n_rows for node in self.nodes)

    @cached_property
    def width(self) -> int:  # type: ignore[override]
        """V."""
        return self.nodes[0].width

    def compute(self, env: Env, first: int, last: int) -> Steps[Tensor]:
        """Compute rows [first, last)."""
        pieces, start = [], 0
        for node in self.nodes:
            low, high = max(first - start, 0), min(last - start, node.n_rows)
            if low < high:
                pieces.append((yield node.tile(env, low, high)))
            start += node.n_rows
        if not pieces:
            return (yield self.nodes[0].tile(env, 0, 0))
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _take(self, rows: Rows) -> Steps[Node]:
        index = index_of(rows, self.n_rows)
        place = self.part_of(index)
        if len(index) and bool((place == place[0]).all()):
            start = self.starts[place[0]]
            return self.nodes[int(place[0])].taken(index - start)
        return Taken(replace(self), index)  # which remembers no selections: that would be a cycle

    @cached_property
    def starts(self) -> Tensor:
        """The first row of each part."""
        return torch.tensor([0, *accumulate(node.n_rows for node in self.nodes)][:-1])

    def part_of(self, index: Tensor) -> Tensor:
        """Return the places of the parts that rows come from."""
        return torch.bucketize(index, self.starts, right=True) - 1


@dataclass(frozen=True, eq=False)
class Indexed(Node):
    """Rows made from rows of `base`, by an index of them: (n_rows, ...)."""

    base: Any  # a node
    index: Tensor

    @property
    def n_rows(self) -> int:  # type: ignore[override]
        """The number of rows."""
        return len(self.index)

    @property
    def width(self) -> int:  # type: ignore[override]
        """V."""
        return self.base.width  # type: ignore[no-any-return]

    def _take(self, rows: Rows) -> Steps[Node]:
        return replace(self, index=self.index[rows])


@dataclass(frozen=True, eq=False)
class Taken(Indexed):
    """Chosen rows of a `Concat`, in any order."""

    base: Concat

    def compute(self, env: Env, first: int, last: int) -> Steps[Tensor]:
        """Compute rows [first, last), each in the part it comes from."""
        here = self.index[first:last]
        part = self.base.part_of(here)
        order, pieces = [], []
        for place in part.unique().tolist():  # type: ignore[no-untyped-call]
            rows = (part == place).nonzero()[:, 0]
            order.append(rows)
            local = here[rows] - self.base.starts[place]
            pieces.append((yield _rows_of(self.base.nodes[place], local, env)))
        if not pieces:
            return (yield self.base.nodes[0].tile(env, 0, 0))
        return torch.cat(pieces)[torch.cat(order).argsort()]

    def _take(self, rows: Rows) -> Steps[Node]:
        return self.base.taken(self.index[rows])


@dataclass(frozen=True, eq=False)
class LeadingReduction(Indexed):
    """A reduction over leading dimensions: row i reduces rows index[i], (K,), of a node."""

    base: Node
    function: Callable[[Tensor], Tensor]  # (B, K, V) to (B, V)

    @cached_property
    def live(self) -> float:  # type: ignore[override]
        """Every row needs K rows of the node, which those of further reductions share."""
        below = (p for p in self.base.walk() if isinstance(p, Node))
        each = sum(1.0 if isinstance(p, LeadingReduction) else p.live for p in below)
        return 1.0 + each * max(1, self.index.shape[1])

    def compute(self, env: Env, first: int, last: int) -> Steps[Tensor]:
        """Reduce the rows behind rows [first, last)."""
        # Results of the same rows share them.
        rows, places = self.index[first:last].unique(return_inverse=True)  # type: ignore[no-untyped-call]
        tile = yield self.base.take(rows).tile(env, 0, len(rows))
        return self.function(tile[places])


@dataclass(frozen=True, eq=False)
class Overlay(Indexed):
    """A node with some rows replaced: row i is row index[i] of `new`, or of `base` where -1."""

    base: Node
    new: Node

    @classmethod
    def of(cls, base: Node, index: Tensor, new: Node) -> Overlay:
        """Replace rows of a node; of earlier replacements, keep the rows not replaced again."""
        if not isinstance(base, Overlay):
            return cls(base, index, new)
        old = base.new if isinstance(base.new, Concat) else Concat((base.new,))
        rows = ((index < 0) & (base.index >= 0)).nonzero()[:, 0]
        left = base.index[rows]
        used, place = old.part_of(left).unique(return_inverse=True)  # type: ignore[no-untyped-call]
        parts = Concat((new, *(old.nodes[i] for i in used.tolist())))
        index = index.clone()
        index[rows] = left - old.starts[used][place] + parts.starts[1:][place]
        return cls(base.base, index, parts)

    def compute(self, env: Env, first: int, last: int) -> Steps[Tensor]:
        """Compute rows [first, last)."""
        here = self.index[first:last]
        places = (here >= 0).nonzero()[:, 0]
        if len(places) == 0:
            return (yield self.base.tile(env, first, last))
        rows = yield _rows_of(self.new, here[places], env)
        if len(places) == len(here):
            return rows
        tile = yield self.base.tile(env, first, last)
        return tile.index_copy(0, places, rows.to(tile.dtype))

    def _take(self, rows: Rows) -> Steps[Node]:
        index = self.index[rows]
        if len(index) and bool((index >= 0).all()):
            return (yield self.new.taken(index))
        base = yield self.base.taken(rows)
        return Overlay(base, index, self.new) if bool((index >= 0).any()) else base


@dataclass(frozen=True, eq=False)
class Replaced(Node):
    """Other values in every entry, as after `zero_()`; what was there before has gradient 0."""

    before: Node
    value: Any  # a number, an operand that is a scalar, or a node
    dtype: torch.dtype
    n_rows: int
    width: int

    def compute(self, env: Env, first: int, last: int) -> Steps[Tensor]:
        """Return rows [first, last)."""
        value = self.value
        if isinstance(value, Node):
            return value.tile(env, first, last)
        if isinstance(value, Operand):
            filled = value.dense(env, first, last).to(self.dtype)
            return filled.reshape(1, 1).expand(last - first, self.width)
        return torch.full((1, 1), value, dtype=self.dtype).expand(last - first, self.width)


def _rows_of(node: Node, rows: Tensor, env: Env) -> Steps[Tensor]:
    """Return chosen rows of a node; consecutive ones are shared with others that use them."""
    low, high = int(rows[0]), int(rows[-1]) + 1
    if high - low == len(rows) and torch.equal(rows, torch.arange(low, high)):
        return node.tile(env, low, high)
    return node.take(rows).tile(env, 0, len(rows))


def stamped(node: Node, *, copy: bool = False) -> Node:
    """Return a program that raises if a tensor it was built as is modified before its use.

    Args:
        node: the program.
        copy: copy these tensors instead, since others may write to them without torch's knowledge.
    """
    return run(_stamped(node, copy, {}))


def _stamped(node: Node, copy: bool, done: dict[Node, Node]) -> Steps[Node]:
    if node not in done:
        made = node
        if isinstance(node, Dense) and copy:
            made = Dense.of(node.operand.dense(Env(), 0, node.n_rows).clone())
        elif isinstance(node, Dense) and node.operand.version is None:
            then = version(node.operand.tensor)
            made = replace(node, operand=replace(node.operand, version=then))
        elif isinstance(node, Overlay | Concat | Call):
            made = yield node.map(lambda a: _stamped(a, copy, done) if isinstance(a, Node) else a)
        done[node] = made
    return done[node]
