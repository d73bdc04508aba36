"""Evaluation of programs in bounded memory, forward and backward.

Two sizes of row groups: products with the weight are made for a *window* of many rows, because a
product of few rows only waits for the weight; recorded operations run on a *block* of a few rows of
it, which stays in the cache. The backward pass computes each window again and differentiates each
block by autograd, so nothing of the size of the logits is kept. `Scores.tile` adds up the
gradients of the head's tensors in place, once per window.
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
from lmhead.sweep.cache_size import cache_bytes
from lmhead.sweep.second_order import differentiated
from lmhead.sweep.wide_gradients import to_dtype_of

RowFunction = Callable[[Sequence[Tensor], int, int], tuple[Tensor, ...]]
"""From tiles (B, V) of each program, and the range [first, last) of rows, to results (B, ...)."""

# A tensor of one block takes about this much, so that the few a pointwise operation reads and
# writes are in the cache.
BLOCK_BYTES = cache_bytes(2)


def replay(
    nodes: Sequence[Node],
    function: RowFunction,
    env: Env,
    *,
    max_bytes: int | None = None,
    extra: Sequence[Operand] = (),
) -> tuple[Tensor, ...]:
    """Return `function` of the rows of programs, differentiable in all tensors behind them.

    Args:
        nodes: programs with the same number of rows.
        function: applied to a few rows at a time.
        env: the tensors to use.
        max_bytes: bound on temporary memory.
        extra: operands that `function` reads through `env`, for their gradients.
    """
    job = _Job(nodes, function, env, max_bytes, extra)
    tensors = [*job.leaf_tensors, *job.tensors]
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if torch._C._are_functorch_transforms_active():
        return job.densely()
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
        extra: Sequence[Operand],
    ) -> None:
        self.nodes, self.function, self.env = nodes, function, env
        self.max_bytes = DEFAULT_MAX_BYTES if max_bytes is None else max_bytes
        self.leaves: dict[Any, tuple[Leaf, Env, Scores]] = {}
        self.tensors: list[Tensor] = []
        self.integers: list[Tensor] = []  # masks and ids, without a gradient
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
                if behind is not None and env.stand_in(part.root) is None:
                    self._find(behind, env.scope(part.root))
                    continue
                self.leaves.setdefault(_product(part, env), (part, env, part.bound(env)))
            elif isinstance(part, Operand):
                self._keep(env.tensor(part.tensor))

    def _keep(self, t: Tensor) -> None:
        smooth = t.is_floating_point() or t.is_complex()
        kept = self.tensors if smooth else self.integers
        if not any(t is other for other in kept):
            kept.append(t)

    def sizes(self, *, grad: bool) -> tuple[int, int]:
        """Return the rows of a block and of a window; neither has all of many rows."""
        half = max(1, -(-self.nodes[0].n_rows // 2))
        itemsize = 8 if any(s.dtype == torch.float64 for _, _, s in self.leaves.values()) else 4
        row = max(1, max(node.width for node in self.nodes) * itemsize)
        # In the backward pass: values, what autograd keeps of them, and their gradients.
        live = (live_tensors(self.nodes) + 2.0) * (2.5 if grad else 1.0)
        block = min(max(1, BLOCK_BYTES // row), int(self.max_bytes / (2 * row * live)))
        block = max(1, min(block, half))
        held = max(1, len(self.leaves)) * (3 if grad else 2)  # logits, their map, gradients
        window = min(int((self.max_bytes - block * row * live) / (row * held)), half)
        return block, max(1, window // block) * block

    def blocks(self, size: int) -> list[tuple[int, int]]:
        """Return row ranges [first, last)."""
        n = self.nodes[0].n_rows
        return [(i, min(i + size, n)) for i in range(0, n, size)] or [(0, 0)]

    def forward(self) -> tuple[Tensor, ...]:
        """Evaluate all rows."""
        block, window = self.sizes(grad=False)
        inputs = _Inputs(self, window, grad=False)
        ranges = self.blocks(block)
        results: tuple[Tensor, ...] = ()
        for first, last in ranges:
            self.env.start(inputs)
            tiles = [node.dense(self.env, first, last) for node in self.nodes]
            made = self.function(tiles, first, last)
            inputs.end_block()
            # Small results that lie between freed tiles would keep their memory from the system.
            if len(ranges) > 1 and not results:
                results = tuple(part.new_empty(ranges[-1][1], *part.shape[1:]) for part in made)
            for whole, part in zip(results, made, strict=False):
                whole[first:last] = part
            del tiles
        self.env.start()
        return results or made

    def densely(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Evaluate all rows at once, by plain differentiable operations.

        If tensors are given, they take the place of `leaf_tensors` and `tensors`.
        """
        n = self.nodes[0].n_rows
        self.env.start(_OtherTensors(self, tensors) if tensors else None)
        made = self.function([node.dense(self.env, 0, n) for node in self.nodes], 0, n)
        self.env.start()
        return made

    def product_of(
        self, leaf: Leaf, env: Env, first: int, last: int
    ) -> tuple[tuple[Any, Any, Any], Rows]:
        """Return the key in `leaves` of what rows of a leaf are part of, and which rows of it.

        Rows taken while computing belong to the leaf they come from.
        """
        rows: Rows = slice(first, last)
        while (key := _product(leaf, env)) not in self.leaves:
            (name, taken), steps = leaf.steps[-1], leaf.steps[:-1]
            assert name == "select", "a leaf that the program does not have"
            leaf = Leaf(leaf.root, leaf.dtype, steps)
            rows = index_of(taken, leaf.n_rows)[rows]
        shared = (key[0], id(leaf.root.origin), key[2])  # constants share the product
        return (shared if leaf.is_constant and shared in self.leaves else key), rows

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of leaf tensors and operands, from those of the outputs."""
        block, window = self.sizes(grad=True)
        inputs = _Inputs(self, window, grad=True)
        for first, last in self.blocks(block):
            self._backward_block(first, last, grads, inputs)
        inputs.finish()
        self.env.start()
        # A tensor of several leaves, such as the weight, has one sum, returned where it is first.
        return [*(inputs.totals.pop(id(t), None) for t in self.leaf_tensors), *inputs.to_tensors]

    def _backward_block(
        self, first: int, last: int, grads: Sequence[Tensor | None], inputs: _Inputs
    ) -> None:
        self.env.start(inputs)
        with torch.enable_grad():
            tiles = [node.dense(self.env, first, last) for node in self.nodes]
            outputs = self.function(tiles, first, last)
            pairs = [
                (o, g[first:last])
                for o, g in zip(outputs, grads, strict=True)
                if g is not None and o.requires_grad
            ]
        found: Sequence[Tensor | None] = ()
        if pairs and inputs.block:
            found = torch.autograd.grad(
                [o for o, _ in pairs],
                [t for t, _ in inputs.block],
                [g.to(o.dtype) for o, g in pairs],
                allow_unused=True,
            )
        del tiles, outputs, pairs
        self.env.start(inputs)
        inputs.end_block(found)


def _product(leaf: Leaf, env: Env) -> Any:
    """Return what identifies the logits of a leaf before they are cast to its dtype."""
    root, _, steps = leaf.key()
    return id(env), root, steps


class _Window:
    """Rows [first, last) of one leaf, and the gradient of their values as blocks report it."""

    def __init__(self, scores: Scores, first: int, last: int, *, grad: bool) -> None:
        self.first, self.last = first, last
        self.tile: Tile | None = scores.tile(slice(first, last)) if grad else None
        if self.tile is None:
            self.value = scores.select(slice(first, last)).dense()
        else:
            self.value = self.tile.value.detach()
        self.wants = self.tile is not None and bool(self.tile.inputs)
        self._grad: Tensor | None = None
        self._written = first  # rows before this one have a gradient already

    def put(self, first: int, last: int, grad: Tensor) -> None:
        """Add the gradient of rows [first, last)."""
        if self._grad is None:
            self._grad = torch.zeros_like(self.value)
        rows = self._grad[first - self.first : last - self.first]
        if first >= self._written:
            rows.copy_(grad)
            self._written = last
        else:
            rows.add_(grad)

    def gradients(self) -> Sequence[Tensor | None]:
        """Return the gradients of the tile's inputs; none if it has no gradient."""
        if self.tile is None or self._grad is None:
            return ()
        inputs = self.tile.inputs
        if len(inputs) == 1 and inputs[0] is self.tile.value:
            return (self._grad,)
        return torch.autograd.grad(self.tile.value, inputs, self._grad, allow_unused=True)


class _Inputs:
    """Provides tiles of scores and rows of operands, as inputs of an autograd graph per block.

    Attributes:
        block: the inputs of this block's graph, each with what takes its gradient.
        totals: gradients of the tensors of leaves, by the id of the tensor.
        to_tensors: gradients of the operands.
    """

    def __init__(self, job: _Job, window: int, *, grad: bool) -> None:
        self.job, self.leaves, self.rows_at_once, self.grad = job, job.leaves, window, grad
        self.tensors = job.tensors
        self.places = {id(t): i for i, t in enumerate(job.tensors)}
        self.windows: dict[Any, _Window] = {}
        self.replaced: list[tuple[Any, _Window]] = []
        self.given: dict[Any, tuple[Any, Tensor]] = {}
        self.block: list[tuple[Tensor, Callable[[Tensor], None]]] = []
        self.totals: dict[int, Tensor] = {}
        self.to_tensors: list[Tensor | None] = [None] * len(job.tensors)

    def tile(self, leaf: Leaf, env: Env, first: int, last: int) -> Tensor:
        """Return rows of a leaf."""
        key, rows = self.job.product_of(leaf, env, first, last)
        place = (key, (first, last) if isinstance(rows, slice) else id(rows))
        if place not in self.given:
            made = self._window_rows(key, first, last) if isinstance(rows, slice) else None
            made = self._direct(key, rows) if made is None else made
            self.given[place] = (rows, made)  # keeps `rows`, whose id is in the key
        value = self.given[place][1]
        return value.detach() if leaf.is_constant else value

    def _window_rows(self, key: Any, first: int, last: int) -> Tensor | None:
        """Return rows of the leaf's window; None if they do not follow those asked for before."""
        window = self.windows.get(key)
        if window is None or not window.first <= first <= last <= window.last:
            if window is not None and not window.first <= first <= window.last:
                return None
            scores = self.leaves[key][2]
            end = min(first + max(self.rows_at_once, last - first), scores.n_rows)
            if window is not None:
                self.replaced.append((key, window))
            window = self.windows[key] = _Window(scores, first, end, grad=self.grad)
        rows = window.value[first - window.first : last - window.first]
        if window.wants:
            rows = rows.detach().requires_grad_()
            put = window.put
            self.block.append((rows, lambda g: put(first, last, g)))
        return rows

    def _direct(self, key: Any, rows: Rows) -> Tensor:
        """Return any rows of a leaf, by a product of their own."""
        scores = self.leaves[key][2]
        if not self.grad:
            return scores.select(rows).dense()
        tile = scores.tile(rows)
        if not tile.inputs:
            return tile.value.detach()
        value = tile.value.detach().requires_grad_()

        def put(grad: Tensor) -> None:
            found = torch.autograd.grad(tile.value, tile.inputs, grad, allow_unused=True)
            self._add(key, tile, found)

        self.block.append((value, put))
        return value

    def rows(self, tensor: Tensor, flat: Tensor, rows: Any) -> Tensor:
        """Return flat[rows] of an operand."""
        place = self.places.get(id(tensor))
        if not self.grad or place is None or not tensor.requires_grad:
            return flat if rows is None else flat[rows]
        key = (place, flat.shape, (rows.start, rows.stop) if isinstance(rows, slice) else id(rows))
        if key not in self.given:
            with torch.no_grad():
                piece = flat.detach() if rows is None else flat[rows].detach()
            piece.requires_grad_()
            self.block.append((piece, lambda g: self._put_rows(place, rows, g)))
            self.given[key] = (rows, piece)
        return self.given[key][1]

    def _put_rows(self, place: int, rows: Any, grad: Tensor) -> None:
        total = self.to_tensors[place]
        if total is None:
            like = self.tensors[place]
            dtype = accumulation_dtype(like.dtype)
            total = torch.zeros(like.shape, dtype=dtype, device=grad.device)
            self.to_tensors[place] = total
        if rows is None:
            total.add_(grad.reshape(total.shape))
            return
        flat = total.view(total.shape[:-1].numel(), total.shape[-1])
        if isinstance(rows, slice):
            flat[rows] += grad
        else:
            flat.index_add_(0, rows, grad.to(total.dtype))

    def end_block(self, grads: Sequence[Tensor | None] = ()) -> None:
        """Take the gradients of this block's inputs; let go of windows that are done."""
        for (_, put), grad in zip(self.block, grads, strict=False):
            if grad is not None:
                put(grad)
        self.block, self.given = [], {}
        for key, window in self.replaced:
            self._add(key, window.tile, window.gradients())
        self.replaced = []

    def finish(self) -> None:
        """Take the gradients of the last windows."""
        for key, window in self.windows.items():
            self._add(key, window.tile, window.gradients())
        self.windows = {}

    def _add(self, key: Any, tile: Tile | None, grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of a tile's inputs to those of the head's tensors."""
        if tile is None or not grads:
            return
        tensors = self.leaves[key][2].tensors()
        into = [self.totals.get(id(t)) for t in tensors]
        before = list(into)
        tile.add(grads, into)
        for t, old, new in zip(tensors, before, into, strict=True):
            if new is not None and new is not old:  # a tensor may be there twice
                self.totals[id(t)] = self.totals[id(t)] + new if id(t) in self.totals else new


class _OtherTensors:
    """Provides rows from other tensors than those of a job, as parts of the autograd graph.

    Args:
        job: the job.
        tensors: one for each of its `leaf_tensors` and `tensors`.
    """

    def __init__(self, job: _Job, tensors: Sequence[Tensor]) -> None:
        given = iter(tensors)
        self.job = job
        self.scores = {
            key: scores.with_tensors([next(given) for _ in scores.tensors()])
            for key, (_, _, scores) in job.leaves.items()
        }
        self.operands = {id(t): other for t, other in zip(job.tensors, given, strict=True)}

    def tile(self, leaf: Leaf, env: Env, first: int, last: int) -> Tensor:
        """Return rows of a leaf."""
        key, rows = self.job.product_of(leaf, env, first, last)
        value = self.scores[key].select(rows).dense()
        return value.detach() if leaf.is_constant else value

    def rows(self, tensor: Tensor, flat: Tensor, rows: Any) -> Tensor:
        """Return flat[rows] of an operand."""
        flat = self.operands.get(id(tensor), tensor).reshape(flat.shape)
        return flat if rows is None else flat[rows]


class _Replay(torch.autograd.Function):
    """A job as one operation of the graph."""

    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.job = job
        ctx.save_for_backward(*tensors, *job.integers)
        ctx.set_materialize_grads(False)
        with torch.no_grad():
            outputs = job.forward()
        constant = (o for o in outputs if not (o.is_floating_point() or o.is_complex()))
        ctx.mark_non_differentiable(*constant)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        job: _Job = ctx.job
        saved = ctx.saved_tensors  # raises if one was modified in place
        tensors = saved[: len(saved) - len(job.integers)]
        if torch.is_grad_enabled():  # double backward: by plain operations on all rows
            return (None, *differentiated(job.densely, tensors, grads))
        made = job.backward(grads)
        given = (
            to_dtype_of(g, t) if g is not None and t.requires_grad else None
            for g, t in zip(made, tensors, strict=True)
        )
        return (None, *given)
