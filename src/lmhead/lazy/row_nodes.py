"""Nodes of a program that join, choose, reduce or replace rows of other nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lmhead.lazy.program import (
    Call,
    Dense,
    Env,
    Node,
    Operand,
    index_of,
    live_tensors,
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

    def compute(self, env: Env, first: int, last: int) -> Tensor:
        """Compute rows [first, last)."""
        pieces, start = [], 0
        for node in self.nodes:
            low, high = max(first - start, 0), min(last - start, node.n_rows)
            if low < high:
                pieces.append(node.dense(env, low, high))
            start += node.n_rows
        if not pieces:
            return self.nodes[0].dense(env, 0, 0)
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _take(self, rows: Rows) -> Node:
        return Taken(self, index_of(rows, self.n_rows))


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

    def _take(self, rows: Rows) -> Node:
        return replace(self, index=self.index[rows])


@dataclass(frozen=True, eq=False)
class Taken(Indexed):
    """Chosen rows of a `Concat`, in any order."""

    base: Concat

    def compute(self, env: Env, first: int, last: int) -> Tensor:
        """Compute rows [first, last), each in the part it comes from."""
        here = self.index[first:last]
        order, pieces, start = [], [], 0
        for node in self.base.nodes:
            places = ((here >= start) & (here < start + node.n_rows)).nonzero()[:, 0]
            if len(places):
                order.append(places)
                pieces.append(_rows_of(node, here[places] - start, env))
            start += node.n_rows
        if not pieces:
            return self.base.nodes[0].take(here).dense(env, 0, 0)
        return torch.cat(pieces)[torch.cat(order).argsort()]


@dataclass(frozen=True, eq=False)
class LeadingReduction(Indexed):
    """A reduction over leading dimensions: row i reduces rows index[i], (K,), of a node."""

    base: Node
    function: Callable[[Tensor], Tensor]  # (B, K, V) to (B, V)

    @property
    def live(self) -> float:  # type: ignore[override]
        """Every row needs K rows of the node."""
        return 1.0 + live_tensors([self.base]) * max(1, self.index.shape[1])

    def compute(self, env: Env, first: int, last: int) -> Tensor:
        """Reduce the rows behind rows [first, last)."""
        rows = self.index[first:last]
        tile = self.base.take(rows.reshape(-1)).dense(env, 0, rows.numel())
        return self.function(tile.view(*rows.shape, self.width))


@dataclass(frozen=True, eq=False)
class Overlay(Indexed):
    """A node with some rows replaced: row i is row index[i] of `new`, or of `base` where -1."""

    base: Node
    new: Node

    def compute(self, env: Env, first: int, last: int) -> Tensor:
        """Compute rows [first, last)."""
        tile = self.base.dense(env, first, last)
        here = self.index[first:last]
        places = (here >= 0).nonzero()[:, 0]
        if len(places) == 0:
            return tile
        rows = self.new.take(here[places]).dense(env, 0, len(places))
        return tile.index_copy(0, places, rows.to(tile.dtype))

    def _take(self, rows: Rows) -> Overlay:
        return Overlay(self.base.take(rows), self.index[rows], self.new)


@dataclass(frozen=True, eq=False)
class Replaced(Node):
    """Other values in every entry, as after `zero_()`; what was there before has gradient 0."""

    before: Node
    value: Any  # a number, an operand that is a scalar, or a node
    dtype: torch.dtype
    n_rows: int
    width: int

    def compute(self, env: Env, first: int, last: int) -> Tensor:
        """Return rows [first, last)."""
        value = self.value
        if isinstance(value, Node):
            return value.dense(env, first, last)
        if isinstance(value, Operand):
            filled = value.dense(env, first, last).to(self.dtype)
            return filled.reshape(1, 1).expand(last - first, self.width)
        return torch.full((1, 1), value, dtype=self.dtype).expand(last - first, self.width)


def _rows_of(node: Node, rows: Tensor, env: Env) -> Tensor:
    """Return chosen rows of a node; consecutive ones are shared with others that use them."""
    low, high = int(rows[0]), int(rows[-1]) + 1
    if high - low == len(rows) and torch.equal(rows, torch.arange(low, high)):
        return node.dense(env, low, high)
    return node.take(rows).dense(env, 0, len(rows))


def stamped(node: Node, *, copy: bool = False, done: dict[Node, Node] | None = None) -> Node:
    """Return a program that raises if a tensor it was built as is modified before its use.

    Args:
        node: the program.
        copy: copy these tensors instead, since others may write to them without torch's knowledge.
        done: parts that were visited; None at the beginning.
    """
    done = {} if done is None else done
    if node not in done:
        made = node
        if isinstance(node, Dense) and copy:
            made = Dense.of(node.operand.dense(Env(), 0, node.n_rows).clone())
        elif isinstance(node, Dense) and node.operand.version is None:
            then = version(node.operand.tensor)
            made = replace(node, operand=replace(node.operand, version=then))
        elif isinstance(node, Overlay | Call):
            made = node.map(
                lambda a: stamped(a, copy=copy, done=done) if isinstance(a, Node) else a
            )
        done[node] = made
    return done[node]
