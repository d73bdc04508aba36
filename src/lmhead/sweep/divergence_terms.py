"""Divergences between the rows of two linear layers, with their gradients.

D = Σ_v F(p_v, q_v) of two softmaxes. With A_p = p ∂F/∂p and A_q = q ∂F/∂q (without constants, which
cancel) and S their sums over the vocabulary,

    dD / dz_p = A_p - p S_p        dD / dz_q = A_q - q S_q

    kind          A_p                A_q                   D
    kl            p log(p/q)         -p                    S_p
    reverse_kl    -q                 q log(q/p)            S_q
    jsd           β p log(p/m)       (1-β) q log(q/m)      S_p + S_q, with m = β p + (1-β) q
    tvd           p sign(p-q) / 2    q sign(q-p) / 2       S_p + S_q

Three passes over a chunk of rows: the log-sum-exp of both, the sums, the gradients.
The logits of a chunk are kept in between if memory allows; else they are computed again.

A weight's gradient is Σ_n g_n (dD_n/dz) h_n with g_n from the backward pass. If one side needs
gradients and its dD/dz of all rows fits into `max_bytes`, that is kept until the backward pass: two
more products for any g. If not, the forward pass computes gradients for g_n = 1; if the g_n differ,
those of the hidden states are multiplied by g_n, and those of the weights are computed again. Only
one divergence at a time keeps such results of a weight; others compute them in the backward pass.

In:  two sources of one shape. Out: D of each row, differentiable in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lmhead.scores.protocol import divergence_of
from lmhead.sweep import kernels
from lmhead.sweep.chunk import Gradients, Inputs, Needs
from lmhead.sweep.kernels import Pointwise, Softmax
from lmhead.sweep.questions import DEFAULT_MAX_BYTES, Plan, balanced
from lmhead.sweep.second_order import differentiated
from lmhead.sweep.source import Source
from lmhead.sweep.wide_gradients import to_dtype_of

_TILE_TOKENS = 8192
_CHUNK_ROWS = 512
# With fewer rows, reading and writing the weight gradient for each chunk costs more than products.
_MIN_RETAINED = 32
# Tiles of scratch memory that a step may use besides the tiles of both sides.
_SCRATCH = 6

Tensors = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of divergence, with the β of "jsd"."""

    name: str
    beta: float = 0.5

    def value(self, sum_p: Tensor, sum_q: Tensor) -> Tensor:
        """Return D from the sums over the vocabulary."""
        if self.name == "kl":
            return sum_p
        return sum_q if self.name == "reverse_kl" else sum_p + sum_q


def swept_divergence(p: Source, q: Source, kind: Kind, max_bytes: int | None) -> Tensor:
    """Return D of each row, (N,) in float64."""
    return _apply(p, q, kind, max_bytes, parts=False)


def swept_jsd_parts(p: Source, q: Source, beta: float, max_bytes: int | None) -> Tensor:
    """Return S_p = β KL(p ‖ m) and S_q = (1-β) KL(q ‖ m) of each row, (2, N) in float64.

    A sum of the two costs no more than the JSD, forward and backward.
    """
    return _apply(p, q, Kind("jsd", beta), max_bytes, parts=True)


def _apply(p: Source, q: Source, kind: Kind, max_bytes: int | None, *, parts: bool) -> Tensor:
    form = _Form(p.without_tensors(), q.without_tensors(), kind, max_bytes, parts)
    values: Tensor = _Divergence.apply(form, _ForwardResults(), *p.tensors(), *q.tensors())  # type: ignore[no-untyped-call]
    return values


class _Form(NamedTuple):
    """A divergence without its tensors."""

    p: Source
    q: Source
    kind: Kind
    max_bytes: int | None
    parts: bool  # S_p and S_q, (2, N), instead of D

    def with_tensors(self, tensors: Tensors) -> tuple[Source, Source]:
        """Return the sources on tensors."""
        n = 2 * len(self.p.hiddens) + 1
        return self.p.with_tensors(tensors[:n]), self.q.with_tensors(tensors[n:])

    def dense(self, *tensors: Tensor | None) -> list[Tensor]:
        """Return the value by its definition, on dense logits."""
        z_p, z_q = (s.dense().double() for s in self.with_tensors(tensors))
        if self.parts:
            return [dense_jsd_parts(z_p, z_q, self.kind.beta)]
        return [divergence_of(z_p, z_q, self.kind.name, self.kind.beta)]


class _ForwardResults:
    """Results of the forward pass for the first backward pass; at most one is not None.

    Attributes:
        gradients: of the tensors, as if the gradient of every row's D were 1.
        kept: dD / dz of all rows.
        used: whether a backward pass has begun.
    """

    gradients: Tensors | None = None
    kept: _Kept | None = None
    used = False

    def reserve(self, p: Source, q: Source) -> bool:
        """Return whether to keep results: not if another divergence of these weights still does.

        A loss may be a sum over many parts of the logits; if each part kept its gradients, they
        would take as much memory as the logits. The results of the first part are dropped as well.
        """
        key = frozenset((_storage(p), _storage(q)))
        other, _LATEST[key] = _LATEST.get(key), self
        if other is None or other.used:
            return True
        other.gradients = other.kept = None
        return False


def _storage(source: Source) -> int:
    return int(source.weights[0].untyped_storage()._cdata)


_LATEST: WeakValueDictionary[frozenset[int], _ForwardResults] = WeakValueDictionary()


class _GradientSink(Protocol):
    """Receives dD / d(linear layer) of one side, tile by tile."""

    wanted: bool

    def start(self, rows: slice, hiddens: tuple[Tensor, ...]) -> None:
        """Begin a chunk of rows."""

    def add(self, lo: int, hi: int, grad: Tensor) -> None:
        """Add a tile (tokens, rows)."""

    def finish(self) -> None:
        """End a chunk."""


class _Kept:
    """The tiles of dD / d(linear layer) of one side, (tokens, rows), chunk by chunk."""

    wanted = True

    def __init__(self, side: int, plan: Plan) -> None:
        self.side, self.plan = side, plan
        self.chunks: list[list[Tensor]] = []

    def start(self, rows: slice, hiddens: tuple[Tensor, ...]) -> None:  # noqa: ARG002
        """Begin a chunk of rows."""
        self.chunks.append([])

    def add(self, lo: int, hi: int, grad: Tensor) -> None:  # noqa: ARG002
        """Keep a tile."""
        self.chunks[-1].append(grad)

    def finish(self) -> None:
        """End a chunk."""

    @torch.no_grad()
    def gradients(self, source: Source, needs: Needs, upstream: Tensor) -> Tensors:
        """Return the gradients of a source's tensors, given those of D (N,)."""
        into = Gradients(source, needs, final=True)
        rows = slice(0, source.rows)
        factor = upstream.to(source.dtype)
        with source.products():
            into.start(rows, source.take(rows))
            buffer = factor.new_empty(self.plan.tile_tokens * source.rows)
            for number, (lo, hi) in enumerate(self.plan.tiles()):
                grad = buffer[: (hi - lo) * source.rows].view(hi - lo, source.rows)
                for (first, last), tiles in zip(self.plan.chunks(), self.chunks, strict=True):
                    torch.mul(tiles[number], factor[first:last], out=grad[:, first:last])
                    tiles[number] = factor.new_empty(0)
                into.add(lo, hi, grad)
            into.finish()
        return into.result()


class _Divergence(torch.autograd.Function):
    """Divergence as an autograd function: two products, and two more per side with gradients.

    Gradients from the forward pass are right if the gradient of D is the same in every row, as
    after a sum or a mean; if not, those of weight and bias are computed again.
    """

    @staticmethod
    def forward(ctx: Any, form: _Form, results: _ForwardResults, *tensors: Tensor | None) -> Tensor:
        ctx.form, ctx.results = form, results
        ctx.save_for_backward(*tensors)
        flags = ctx.needs_input_grad[2:]
        p, q = form.with_tensors(tensors)
        if not any(flags) or not results.reserve(p, q):
            sums, _ = _Sweep(p, q, form.kind, form.max_bytes).run(None)
            return sums if form.parts else form.kind.value(*sums)
        sweep = _Sweep(p, q, form.kind, form.max_bytes, keep=_kept_side(p, q, flags))
        sums, results.gradients = sweep.run(flags)
        results.kept = sweep.kept
        return sums if form.parts else form.kind.value(*sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tensors = ctx.saved_tensors
        flags, form = ctx.needs_input_grad[2:], ctx.form
        ctx.results.used = True
        if torch.is_grad_enabled():  # double backward: by the definition
            return (None, None, *differentiated(form.dense, tensors, [grad]))
        p, q = form.with_tensors(tensors)
        gradients, ctx.results.gradients = ctx.results.gradients, None
        kept, ctx.results.kept = ctx.results.kept, None
        parts: Tensor | None = None
        if form.parts:
            parts, grad = grad, grad[0]
            tolerance = 4 * torch.finfo(p.dtype).eps  # equal factors may differ by one rounding
            if torch.allclose(parts[0], parts[1], rtol=tolerance, atol=0.0):
                parts = None  # the gradient of S_p + S_q
            else:
                kept = gradients = None
        even = grad.numel() == 0 or bool((grad == grad[0]).all())
        if kept is not None:
            source, side_flags = _sides(p, q, flags)[kept.side]
            side_gradients = kept.gradients(source, Needs.of(source, side_flags), grad)
            empty = (None,) * (len(flags) - len(side_flags))
            gradients = side_gradients + empty if kept.side == 0 else empty + side_gradients
        elif gradients is None:
            sweep = _Sweep(p, q, form.kind, form.max_bytes)
            _, gradients = sweep.run(flags, upstream=grad, parts=parts)
        elif even:
            for g in gradients:
                if g is not None and grad.numel():
                    g.mul_(grad[0].to(g.dtype))
        else:
            of_rows = _of_rows(p, q)
            gradients = tuple(g if o else None for g, o in zip(gradients, of_rows, strict=True))
            gradients = _weighted(gradients, p, q, form, flags, grad)
        typed_gradients = (
            None if g is None or t is None else to_dtype_of(g, t)
            for g, t in zip(gradients, tensors, strict=True)
        )
        return (None, None, *typed_gradients)


def _weighted(
    gradients: Tensors, p: Source, q: Source, form: _Form, flags: tuple[bool, ...], by: Tensor
) -> Tensors:
    """Return gradients for weights `by` (N,) of the rows, from those of hidden states for 1."""
    for g in gradients:
        if g is not None:
            g.mul_(by[:, None].to(g.dtype))
    summed = tuple(f and not per_row for f, per_row in zip(flags, _of_rows(p, q), strict=True))
    if not any(summed):
        return gradients
    _, again = _Sweep(p, q, form.kind, form.max_bytes).run(summed, upstream=by)
    return tuple(new if g is None else g for g, new in zip(gradients, again or (), strict=True))


def _of_rows(p: Source, q: Source) -> list[bool]:
    """Return which of the tensors of two sources have a gradient per row: the hidden states."""
    return [i < len(s.hiddens) for s in (p, q) for i in range(2 * len(s.hiddens) + 1)]


class _Sweep:
    """The three passes over all chunks."""

    def __init__(
        self, p: Source, q: Source, kind: Kind, max_bytes: int | None, *, keep: int | None = None
    ) -> None:
        self.sources, self.kind = (p, q), kind
        self.kept: _Kept | None = None
        limit = DEFAULT_MAX_BYTES if max_bytes is None else max_bytes
        plan = None if keep is None else _plan(p, q, limit, keep=True)
        if plan is not None and keep is not None:
            self.kept = _Kept(keep, plan)
        self.plan = plan or _plan(p, q, limit) or _small_plan(p, q, limit)

    @torch.no_grad()
    def run(
        self,
        flags: tuple[bool, ...] | None,
        upstream: Tensor | None = None,
        parts: Tensor | None = None,
    ) -> tuple[Tensor, Tensors | None]:
        """Return S_p and S_q (2, N), and gradients of the flagged tensors.

        The gradients are those of D times `upstream` (N,); with `parts` (2, N), those of
        parts[0] S_p + parts[1] S_q.
        """
        p = self.sources[0]
        values = torch.zeros(2, p.rows, dtype=torch.float64, device=p.device)
        split = (None, None) if flags is None else _split(p, flags)
        accumulators: list[Gradients] = []
        into: list[_GradientSink | None] = [None, None]
        if self.kept is not None:
            into[self.kept.side] = self.kept
        elif flags is not None:
            pairs = zip(self.sources, split, strict=True)
            final = upstream is not None  # a backward pass: not scaled afterwards
            accumulators = [
                Gradients(s, Needs.of(s, f), final=final) for s, f in pairs if f is not None
            ]
            into = [*accumulators]
        with p.products():
            buffers = [_buffers(s, self.plan) for s in self.sources]
            for start, stop in self.plan.chunks():
                rows = slice(start, stop)
                if self.kept is not None and start:  # `kept` holds the buffers of earlier chunks
                    buffers[self.kept.side] = _buffers(self.sources[self.kept.side], self.plan)
                sides = [
                    _Side(s, self.plan, b, rows) for s, b in zip(self.sources, buffers, strict=True)
                ]
                store = None if parts is not None else self._stored_side(into)
                chunk_parts = None if parts is None else parts[:, rows]
                sums = self._sums(sides, store, chunk_parts)
                values[:, rows] = sums
                scale = torch.ones_like(sums[0])
                if upstream is not None and parts is None:
                    scale = upstream[rows]
                sink = None if store is None else into[store]
                if store is None or sink is None:
                    self._differentiate(sides, sums, scale, into, chunk_parts)
                else:
                    self._finish_stored(sides, store, sums[store], scale, sink)
            grads = [g.result() for g in accumulators]
        return values, tuple(g for part in grads for g in part) if grads else None

    def _stored_side(self, into: list[_GradientSink | None]) -> int | None:
        """Return the only side that needs gradients, if its tiles can store their terms.

        Not with soft-capping, whose slope needs the logits.
        """
        wanted = [i for i, g in enumerate(into) if g is not None and g.wanted]
        if len(wanted) != 1 or not self.plan.retained:
            return None
        return None if self.sources[wanted[0]].pointwise.bounded else wanted[0]

    def _finish_stored(
        self,
        sides: list[_Side],
        store: int,
        total: Tensor,
        upstream: Tensor,
        sink: _GradientSink,
    ) -> None:
        """Add the gradients of the stored side."""
        side = sides[store]
        sink.start(side.rows, side.hiddens)
        slope = side.slope(total)
        factor = upstream if slope is None else upstream * slope
        for (lo, hi, softmax), (_, _, a) in zip(
            side.logits(), sides[1 - store].logits(), strict=True
        ):
            sink.add(lo, hi, kernels.stored_gradient_(softmax, a, total, factor))
        sink.finish()

    def _sums(self, sides: list[_Side], store: int | None, parts: Tensor | None) -> Tensor:
        """Return S_p and S_q of a chunk; see `kernels.add_divergence_` for `store`."""
        for side in sides:
            side.make()
        lses = (sides[0].lse, sides[1].lse)
        sums = torch.zeros(2, sides[0].n_rows, dtype=torch.float64, device=sides[0].source.device)
        for (_, _, z_p), (_, _, z_q) in zip(*(side.logits() for side in sides), strict=True):
            kernels.add_divergence_(z_p, z_q, *lses, self.kind, sums, store, parts)
        return sums

    def _differentiate(
        self,
        sides: list[_Side],
        sums: Tensor,
        upstream: Tensor,
        into: list[_GradientSink | None],
        parts: Tensor | None,
    ) -> None:
        wanted = [g if g is not None and g.wanted else None for g in into]
        if not any(wanted):
            return
        for side, sink in zip(sides, wanted, strict=True):
            if sink is not None:
                sink.start(side.rows, side.hiddens)
        flags = (wanted[0] is not None, wanted[1] is not None)
        lses = (sides[0].lse, sides[1].lse)
        for (lo, hi, z_p), (_, _, z_q) in zip(*(side.logits() for side in sides), strict=True):
            slopes = [
                s.slope(z) if f else None for s, z, f in zip(sides, (z_p, z_q), flags, strict=True)
            ]
            kernels.divergence_gradient_(z_p, z_q, *lses, self.kind, sums, upstream, flags, parts)
            for z, slope, sink in zip((z_p, z_q), slopes, wanted, strict=True):
                if sink is not None:
                    sink.add(lo, hi, z if slope is None else z.mul_(slope))
        for sink in wanted:
            if sink is not None:
                sink.finish()


class _Side:
    """One of the two distributions, for a chunk of rows."""

    def __init__(self, source: Source, plan: Plan, buffers: list[Tensor], rows: slice) -> None:
        self.source, self.plan, self.buffers, self.rows = source, plan, buffers, rows
        self.hiddens = source.take(rows)
        self.n_rows = self.hiddens[0].shape[0]
        self._inputs = Inputs(source, rows, self.hiddens)

    def _tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        for number, (lo, hi) in enumerate(self.plan.tiles()):
            flat = self.buffers[number if self.plan.retained else 0]
            yield lo, hi, flat[: (hi - lo) * self.n_rows].view(hi - lo, self.n_rows)

    def make(self) -> None:
        """Compute the log-sum-exp, and the logits if they are retained."""
        source, inputs = self.source, self._inputs
        running = Softmax.start(self.n_rows, entropy=False, like=self.buffers[0])
        for lo, hi, z in self._tiles():
            source.linear_tile(inputs.transposed, lo, hi, z)
            bias, pointwise = source.bias_tile(lo, hi), source.pointwise
            if inputs.unscaled is not None:
                kernels.finish_(z, bias, pointwise, inputs.unscaled)
                bias, pointwise = None, Pointwise()
            scratch = torch.empty_like(z) if kernels.for_tile(z, bias) is None else z
            kernels.update_answers_(z, lo, bias, pointwise, running, (scratch, scratch), None, None)
        self.lse = running.lse_parts

    def logits(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield all tiles of logits, (tokens, rows)."""
        for lo, hi, z in self._tiles():
            if not self.plan.retained:
                self.source.linear_tile(self._inputs.transposed, lo, hi, z)
                bias, scale = self.source.bias_tile(lo, hi), self._inputs.unscaled
                kernels.finish_(z, bias, self.source.pointwise, scale)
            yield lo, hi, z

    def slope(self, z: Tensor) -> Tensor | None:
        """Return dz / d(linear layer) of a tile; None for 1."""
        pointwise, scale = self.source.pointwise, self._inputs.row_scale
        if not pointwise.bounded:
            if scale is not None:
                return scale * pointwise.scale
            return None if pointwise.scale == 1.0 else z.new_tensor(pointwise.scale)
        slope = z.clone() if scale is None else z / scale
        pointwise.slope(slope, out=slope)
        return slope if scale is None else slope.mul_(scale)


def _kept_side(p: Source, q: Source, flags: tuple[bool, ...]) -> int | None:
    """Return the side whose dD / dz is worth keeping: the only one with gradients of weights."""
    sides = _sides(p, q, flags)
    wanted = [i for i, (_, side_flags) in enumerate(sides) if any(side_flags)]
    return wanted[0] if len(wanted) == 1 and _of_weights(*sides[wanted[0]]) else None


def _plan(p: Source, q: Source, max_bytes: int, *, keep: bool = False) -> Plan | None:
    """Return a plan that retains the logits of a chunk of rows; None if that does not fit.

    With `keep`, the tiles of one side are kept for all rows.
    """
    rows, vocab = max(1, p.rows), p.vocab
    budget = max_bytes // p.dtype.itemsize
    width = p.hidden_size + q.hidden_size
    tokens = _tile_tokens(vocab, width, budget)
    # Scratch memory: a few blocks, see `kernels.add_divergence_`.
    fixed = _SCRATCH * kernels.BLOCK + (tokens * width if p.converts or q.converts else 0)
    sides = 2
    if keep:
        fixed, sides = fixed + rows * vocab, 1
    chunk = (budget - fixed) // (sides * vocab + 4 * width + 32)
    if chunk < min(_MIN_RETAINED, rows):
        return None
    chunk = balanced(rows, min(chunk, _CHUNK_ROWS))
    return Plan(p.rows, vocab, chunk, tokens, retained=True, bytes=0)


def _small_plan(p: Source, q: Source, max_bytes: int) -> Plan:
    """Return a plan with tiles that fit, without retained logits."""
    rows, vocab = max(1, p.rows), p.vocab
    budget = max_bytes // p.dtype.itemsize
    width = p.hidden_size + q.hidden_size
    tokens, chunk = _tile_tokens(vocab, width, budget), min(_CHUNK_ROWS, rows)
    while tokens > min(8, vocab) and tokens * (_SCRATCH * chunk + width) > budget:
        tokens //= 2
    chunk = max(1, min(chunk, (budget - tokens * width) // (_SCRATCH * tokens + 4 * width)))
    return Plan(p.rows, vocab, chunk, tokens, retained=False, bytes=0)


def _tile_tokens(vocab: int, width: int, budget: int) -> int:
    tokens = max(1, min(_TILE_TOKENS, -(-vocab // 2)))
    while tokens > 512 and tokens * width > budget // 4:
        tokens //= 2
    return tokens


def _buffers(source: Source, plan: Plan) -> list[Tensor]:
    size = plan.chunk_rows * plan.tile_tokens
    n = plan.n_tiles if plan.retained else 1
    return [torch.empty(size, dtype=source.dtype, device=source.device) for _ in range(n)]


def _split(p: Source, flags: tuple[bool, ...]) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    n = 2 * len(p.hiddens) + 1
    return flags[:n], flags[n:]


def _sides(
    p: Source, q: Source, flags: tuple[bool, ...]
) -> tuple[tuple[Source, tuple[bool, ...]], tuple[Source, tuple[bool, ...]]]:
    """Return each source with the flags of its tensors."""
    flags_p, flags_q = _split(p, flags)
    return (p, flags_p), (q, flags_q)


def _of_weights(source: Source, flags: tuple[bool, ...]) -> bool:
    """Return whether a weight or the bias needs a gradient."""
    return any(flags[len(source.hiddens) :])


def dense_jsd_parts(z_p: Tensor, z_q: Tensor, beta: float) -> Tensor:
    """Return S_p and S_q of "jsd" by their definition, (2, N)."""
    log_p, log_q = z_p.log_softmax(-1), z_q.log_softmax(-1)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    s_p, s_q = ((x.exp() * (x - log_m)).sum(-1) for x in (log_p, log_q))
    return torch.stack([s_p * beta, s_q * (1 - beta)])
