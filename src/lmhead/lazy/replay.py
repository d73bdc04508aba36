"""Evaluation of programs on a few rows at a time, forward and backward, in bounded memory.

The backward pass computes each group of rows again, with autograd, so nothing of the size of the
logits is kept. Products with the weight are differentiated by `Scores.tile`, which adds up the
weight's gradient in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lmhead.lazy.program import Env, Leaf, Node, Operand, index_of, live_tensors
from lmhead.scores import Rows, Scores
from lmhead.scores.protocol import Tile
from lmhead.sweep import DEFAULT_MAX_BYTES, accumulation_dtype

RowFunction = Callable[[Sequence[Tensor], int, int], tuple[Tensor, ...]]
"""From tiles (B, V) of each program, and the range [first, last) of rows, to results (B, ...)."""


def replay(
    nodes: Sequence[Node],
    function: RowFunction,
    env: Env,
    *,
    max_bytes: int | None = None,
    sums: bool = False,
    extra: Sequence[Operand] = (),
) -> tuple[Tensor, ...]:
    """Return `function` of the rows of programs, differentiable in all tensors behind them.

    Args:
        nodes: programs with the same number of rows.
        function: applied to a few rows at a time.
        env: the tensors to use.
        max_bytes: bound on temporary memory.
        sums: add up the results over the rows, instead of concatenating them.
        extra: operands that `function` reads through `env`, for their gradients.
    """
    job = _Job(nodes, function, env, max_bytes, sums, extra)
    tensors = [*job.leaf_tensors, *job.tensors]
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if wanted and torch._C._are_functorch_transforms_active():
        return job.densely(env)
    if not wanted:
        with torch.no_grad():
            return job.forward()
    outputs: tuple[Tensor, ...] = _Replay.apply(job, *tensors)  # type: ignore[no-untyped-call]
    return outputs


class _Job:
    """One evaluation: programs, function, and the tensors that it depends on."""

    def __init__(
        self,
        nodes: Sequence[Node],
        function: RowFunction,
        env: Env,
        max_bytes: int | None,
        sums: bool,
        extra: Sequence[Operand],
    ) -> None:
        self.nodes, self.function, self.env, self.sums = nodes, function, env, sums
        self.max_bytes = DEFAULT_MAX_BYTES if max_bytes is None else max_bytes
        self.leaves: dict[Any, tuple[Leaf, Env, Scores]] = {}
        self.tensors: list[Tensor] = []
        for node in nodes:
            self._find(node, env)
        for operand in extra:
            self._keep(env.tensor(operand.tensor))
        self.leaf_tensors = [t for _, _, s in self.leaves.values() for t in s.tensors()]

    def _find(self, node: Node, env: Env) -> None:
        """Note the scores and tensors that the program reads, also behind roots."""
        for part in node.walk():
            if isinstance(part, Leaf):
                behind = part.root.node
                if behind is not None:
                    self._find(behind, env.scope(part.root))
                    continue
                scores = part.bound(env)
                self.leaves.setdefault((id(env), part.key()), (part, env, scores))
            elif isinstance(part, Operand):
                self._keep(env.tensor(part.tensor))

    def _keep(self, t: Tensor) -> None:
        if t.is_floating_point() and not any(t is other for other in self.tensors):
            self.tensors.append(t)

    def ranges(self, *, grad: bool) -> list[tuple[int, int]]:
        """Return row ranges [first, last) that fit into memory; no range has all of many rows."""
        n = self.nodes[0].n_rows
        width = max(node.width for node in self.nodes)
        itemsize = 8 if any(s.dtype == torch.float64 for _, _, s in self.leaves.values()) else 4
        live = live_tensors(self.nodes) + 2.0
        each = max(1.0, width * itemsize * live * (2.5 if grad else 1.0))
        size = max(1, min(int(self.max_bytes / each), -(-n // 2)))
        return [(i, min(i + size, n)) for i in range(0, n, size)] or [(0, 0)]

    def forward(self) -> tuple[Tensor, ...]:
        """Evaluate all rows."""
        parts: list[tuple[Tensor, ...]] = []
        for first, last in self.ranges(grad=False):
            self.env.start()
            tiles = [node.dense(self.env, first, last) for node in self.nodes]
            made = self.function(tiles, first, last)
            if self.sums and parts:
                parts = [tuple(a + b for a, b in zip(parts[0], made, strict=True))]
            else:
                parts.append(made)
        self.env.start()
        if len(parts) == 1:
            return parts[0]
        return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))

    def densely(self, env: Env) -> tuple[Tensor, ...]:
        """Evaluate all rows at once, by plain differentiable operations."""
        n = self.nodes[0].n_rows
        env.start()
        made = self.function([node.dense(env, 0, n) for node in self.nodes], 0, n)
        env.start()
        return made

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of leaf tensors and operands, from those of the outputs."""
        into: dict[Any, list[Tensor | None]] = {
            key: [None] * len(scores.tensors()) for key, (_, _, scores) in self.leaves.items()
        }
        to_tensors: list[Tensor | None] = [None] * len(self.tensors)
        for first, last in self.ranges(grad=True):
            self._backward_rows(first, last, grads, into, to_tensors)
        return [*(g for found in into.values() for g in found), *to_tensors]

    def _backward_rows(
        self,
        first: int,
        last: int,
        grads: Sequence[Tensor | None],
        into: dict[Any, list[Tensor | None]],
        to_tensors: list[Tensor | None],
    ) -> None:
        watch = _Watch(self.leaves, self.tensors)
        self.env.start(watch)
        with torch.enable_grad():
            tiles = [node.dense(self.env, first, last) for node in self.nodes]
            outputs = self.function(tiles, first, last)
            pairs = [
                (o, g if self.sums else g[first:last])
                for o, g in zip(outputs, grads, strict=True)
                if g is not None and o.requires_grad
            ]
        inputs = watch.inputs()
        if pairs and inputs:
            found = torch.autograd.grad(
                [o for o, _ in pairs],
                inputs,
                [g.to(o.dtype) for o, g in pairs],
                allow_unused=True,
            )
            del tiles, outputs, pairs
            watch.add(found, into, to_tensors, self.tensors)
        self.env.start()


class _Watch:
    """Makes tiles of scores and rows of operands the inputs of a piece of autograd graph."""

    def __init__(
        self, leaves: dict[Any, tuple[Leaf, Env, Scores]], tensors: Sequence[Tensor]
    ) -> None:
        self.leaves, self.places = leaves, {id(t): i for i, t in enumerate(tensors)}
        self.tiles: dict[Any, tuple[Rows, Tile]] = {}
        self.pieces: dict[Any, tuple[int, Any, Tensor]] = {}

    def tile(self, leaf: Leaf, env: Env, first: int, last: int) -> Tensor:
        """Return rows of a leaf; rows taken while computing belong to the leaf they come from."""
        rows: Rows = slice(first, last)
        while (id(env), leaf.key()) not in self.leaves:
            (name, taken), steps = leaf.steps[-1], leaf.steps[:-1]
            assert name == "select", "a leaf that the program does not have"
            leaf = Leaf(leaf.root, leaf.dtype, steps)
            rows = index_of(taken, leaf.n_rows)[rows]
        key = (id(env), leaf.key())
        place = (key, (first, last) if isinstance(rows, slice) else id(rows))
        if place not in self.tiles:
            self.tiles[place] = (rows, self.leaves[key][2].tile(rows))
        return self.tiles[place][1].value

    def rows(self, tensor: Tensor, flat: Tensor, rows: Any) -> Tensor:
        """Return flat[rows] of a tensor."""
        place = self.places.get(id(tensor))
        if place is None or not tensor.requires_grad:
            return flat if rows is None else flat[rows]
        key = (place, flat.shape, (rows.start, rows.stop) if isinstance(rows, slice) else id(rows))
        if key not in self.pieces:
            with torch.no_grad():
                piece = flat.detach() if rows is None else flat[rows].detach()
            self.pieces[key] = (place, rows, piece.requires_grad_())
        return self.pieces[key][2]

    def inputs(self) -> list[Tensor]:
        """Return the inputs of the graph that require a gradient."""
        made = [t for _, tile in self.tiles.values() for t in tile.inputs]
        return [*made, *(piece for _, _, piece in self.pieces.values())]

    def add(
        self,
        grads: Sequence[Tensor | None],
        into: dict[Any, list[Tensor | None]],
        to_tensors: list[Tensor | None],
        tensors: Sequence[Tensor],
    ) -> None:
        """Add the gradients of the inputs to those of leaf tensors and operands."""
        given = iter(grads)
        for (key, _), (_, tile) in self.tiles.items():
            tile.add([next(given) for _ in tile.inputs], into[key])
        for place, rows, _ in self.pieces.values():
            grad = next(given)
            if grad is None:
                continue
            total = to_tensors[place]
            if total is None:
                dtype = accumulation_dtype(tensors[place].dtype)
                total = to_tensors[place] = torch.zeros(
                    tensors[place].shape, dtype=dtype, device=grad.device
                )
            if rows is None:
                total.add_(grad.reshape(total.shape))
            elif isinstance(rows, slice):
                total.view(-1, total.shape[-1])[rows] += grad
            else:
                total.view(-1, total.shape[-1]).index_add_(0, rows, grad.to(total.dtype))


class _Replay(torch.autograd.Function):
    """A job as one operation of the graph."""

    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.job = job
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        with torch.no_grad():
            outputs = job.forward()
        ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        tensors = ctx.saved_tensors  # raises if one was modified in place
        job: _Job = ctx.job
        if torch.is_grad_enabled():  # double backward: by plain operations on all rows
            pairs = [
                (o, g)
                for o, g in zip(job.densely(job.env), grads, strict=True)
                if g is not None and o.requires_grad
            ]
            wanted = [t for t in tensors if t.requires_grad]
            found = iter(
                torch.autograd.grad(
                    [o for o, _ in pairs],
                    wanted,
                    [g for _, g in pairs],
                    create_graph=True,
                    allow_unused=True,
                )
            )
            return (None, *(next(found) if t.requires_grad else None for t in tensors))
        made = job.backward(grads)
        typed = (
            g.to(t.dtype) if g is not None and t.requires_grad else None
            for g, t in zip(made, tensors, strict=True)
        )
        return (None, *typed)
