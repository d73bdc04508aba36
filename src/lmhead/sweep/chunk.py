"""A chunk of rows in a sweep: forward over its tiles of the vocabulary, then backward.

In:  questions, a plan, which rows.
Out: their answers; then, for gradients of those answers, the gradients of the source's tensors,
     added to a `Gradients`.

With G = dL/dx, (V, N) as tiles:  dL/dhidden = Gᵀ W,  dL/dweight = G hidden,  dL/dbias = Σ_n G.
Gradients that are not needed cost nothing; the others are summed in the type of the products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.scores import Rows
from lmhead.scores.row_loss import RowSums
from lmhead.sweep import gradient_sums, kernels
from lmhead.sweep.exact_decisions import Rank, TopK
from lmhead.sweep.kernels import Coefficients, Pointwise, Softmax
from lmhead.sweep.questions import Plan, Questions
from lmhead.sweep.source import Source, add_selected_, add_to_selected_, product_

# Rank-one terms collected before they are multiplied out.
_PENDING = 8


@dataclass(frozen=True)
class Needs:
    """Which tensors of a source need a gradient."""

    hiddens: tuple[bool, ...]
    weights: tuple[bool, ...]
    bias: bool

    @classmethod
    def of(cls, source: Source, flags: tuple[bool, ...]) -> Needs:
        """Return the needs, given a flag per tensor in the order hiddens, weights, bias."""
        n = len(source.hiddens)
        return cls(flags[:n], flags[n : 2 * n], flags[2 * n] and source.bias is not None)

    @property
    def any(self) -> bool:
        """Whether any of the tensors needs a gradient."""
        return any(self.hiddens) or any(self.weights) or self.bias


class Gradients:
    """The sums, over tiles and chunks, of the gradients of one source.

    If `final` (not scaled afterwards), those of the weights are added to `gradient_sums`.
    """

    def __init__(self, source: Source, needs: Needs, *, final: bool = False) -> None:
        self.source = source
        self._pending: list[_RankOne] = []
        self.wanted = needs.any
        self._hiddens = _zeros(source.hiddens, needs.hiddens, source.dtype)
        make = gradient_sums.buffer if final else _empty
        made = [
            make(w, source.dtype) if n else (None, False)
            for w, n in zip(source.weights, needs.weights, strict=True)
        ]
        self._weights = [total for total, _ in made]
        self._written = any(held for _, held in made)  # whether these sums hold numbers
        for total, held in made:
            if self._written and total is not None and not held:
                total.zero_()
        self._bias = _zeros((source.bias,), (needs.bias,), source.dtype)[0]

    def start(self, rows: Rows, hiddens: tuple[Tensor, ...], *, whole: bool = True) -> None:
        """Begin a chunk of rows; with `whole`, `add` must then be called once for every token."""
        if not whole:
            self._clear()
        self._rows, self._inputs = rows, hiddens
        # (D_i, B): transposed, which makes the product faster.
        self._sums = [
            None if g is None else h.new_zeros(h.shape[1], h.shape[0])
            for g, h in zip(self._hiddens, hiddens, strict=True)
        ]

    def add(self, lo: int, hi: int, grad: Tensor) -> None:
        """Add a tile of G: (tokens, rows)."""
        for term, hidden in enumerate(self._inputs):
            into_hidden, into_weight = self._sums[term], self._weights[term]
            if into_hidden is not None:
                product_(into_hidden, self.source.weight_tile(term, lo, hi).T, grad, add=True)
            if into_weight is not None:
                product_(into_weight[lo:hi], grad, hidden, add=self._written)
        if self._bias is not None:
            self._bias[lo:hi] += grad.sum(1)

    def add_tokens(self, tokens: Tensor, grad: Tensor) -> None:
        """Add only the given tokens (K,) of G, (V, rows)."""
        self._clear()
        for term, hidden in enumerate(self._inputs):
            into_hidden, into_weight = self._sums[term], self._weights[term]
            if into_hidden is not None:
                weight = self.source.weights[term]
                if weight.dtype == grad.dtype:
                    add_selected_(into_hidden, weight, grad, tokens)
                else:
                    converted = self.source.weight_rows(term, tokens)
                    part = grad.index_select(0, tokens)
                    product_(into_hidden, converted.T, part, add=True)
            if into_weight is not None:
                add_to_selected_(into_weight, grad, hidden, tokens)
        if self._bias is not None:
            self._bias.index_add_(0, tokens, grad.index_select(0, tokens).sum(1))

    def _clear(self) -> None:
        """Set the weights' sums to 0, unless something is in them."""
        if not self._written:
            for total in self._weights:
                if total is not None:
                    total.zero_()
            self._written = True

    def add_rank_one(self, rows: Rows, hiddens: tuple[Tensor, ...], c: Tensor, d: Tensor) -> None:
        """Add d cᵀ for some rows, whether or not their chunk has begun: (V,), (rows,)."""
        self._pending.append(_RankOne(rows, d, c, tuple(d @ h for h in hiddens)))
        if len(self._pending) >= _PENDING:
            self._flush()

    def _flush(self) -> None:
        """Multiply out the rank-one terms together: dW += C U, dH += d (Cᵀ W), db += C Σd."""
        terms, self._pending = self._pending, []
        if not terms:
            return
        columns = torch.stack([t.c for t in terms], 1)  # (V, m)
        for number in range(len(self.source.hiddens)):
            inputs = torch.stack([t.inputs[number] for t in terms])  # (m, D)
            back = self._add_low_rank(number, columns, inputs)
            into = self._hiddens[number]
            if into is not None:
                for t, row in zip(terms, back, strict=True):
                    into[t.rows] += torch.outer(t.d, row)
        if self._bias is not None:
            self._bias.addmv_(columns, torch.stack([t.d.sum() for t in terms]))

    def _add_low_rank(self, term: int, columns: Tensor, inputs: Tensor) -> Tensor:
        """Add columns (V, m) @ inputs (m, D) to dW; return columnsᵀ W (m, D), or 0 if unwanted."""
        self._clear()
        back = torch.zeros_like(inputs)
        into = self._weights[term]
        for lo in range(0, self.source.vocab, 4096):
            hi = min(lo + 4096, self.source.vocab)
            if into is not None:
                into[lo:hi].addmm_(columns[lo:hi], inputs)
            if self._hiddens[term] is not None:
                back.addmm_(columns[lo:hi].T, self.source.weight_tile(term, lo, hi))
        return back

    def finish(self) -> None:
        """End the chunk, after `add` for all tokens, or after a `start` that cleared the sums."""
        self._written = True
        for total, chunk in zip(self._hiddens, self._sums, strict=True):
            if total is not None and chunk is not None:
                total[self._rows] += chunk.T  # rank-one terms may have come before

    def result(self) -> tuple[Tensor | None, ...]:
        """Return the gradients, in the type of the products: hiddens, weights, bias."""
        self._flush()
        self._clear()  # only where there was no row at all
        return (*self._hiddens, *self._weights, self._bias)


@dataclass(frozen=True)
class _RankOne:
    """A term d cᵀ of G (rows x tokens) that is multiplied out later, together with others."""

    rows: Rows  # which rows
    d: Tensor  # (rows,)
    c: Tensor  # (V,)
    inputs: tuple[Tensor, ...]  # Σ_n d_n h_n, (D_i,) each


def _empty(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
    return t.new_empty(t.shape, dtype=dtype), False


def _zeros(
    tensors: tuple[Tensor | None, ...], wanted: tuple[bool, ...], dtype: torch.dtype
) -> list[Tensor | None]:
    return [
        t.new_zeros(t.shape, dtype=dtype) if w and t is not None else None
        for t, w in zip(tensors, wanted, strict=True)
    ]


def coefficients(answers: RowSums, upstream: RowSums, dtype: torch.dtype) -> Coefficients:
    """Return the gradient with respect to z, from the gradients with respect to the answers.

    d lse     / dz_v = p_v
    d entropy / dz_v = -p_v (log p_v + entropy)
    d kl      / dz_v = p_v (log p_v - log q_v - kl)
    d log Σp² / dz_v = 2 (p_v² / Σp² - p_v), its first term in `kernels.Squares`
    """
    a, b, c = upstream.lse, None, None
    if upstream.entropy is not None:
        a = _plus(a, -upstream.entropy * answers.entropy)
        b = -upstream.entropy
    if upstream.kl is not None:
        a = _plus(a, -upstream.kl * answers.kl)
        b, c = _plus(b, upstream.kl), -upstream.kl
    if upstream.log_sum_sq is not None:
        a = _plus(a, -2 * upstream.log_sum_sq)
    sums = (a, b, c, upstream.mixed, upstream.softened)
    return Coefficients(*(None if x is None else x.to(dtype) for x in sums))


def other_coefficients(upstream_kl: Tensor, dtype: torch.dtype) -> Coefficients:
    """Return d kl / dz_q = q - p, with p given as soft targets."""
    upstream_kl = upstream_kl.to(dtype)
    return Coefficients(a=upstream_kl, softened=-upstream_kl)


def _plus(x: Tensor | None, y: Tensor) -> Tensor:
    return y if x is None else x + y


class Buffers:
    """The tiles of a sweep, allocated once and used by all its chunks."""

    def __init__(self, questions: Questions, plan: Plan) -> None:
        size = plan.chunk_rows * plan.tile_tokens
        new_empty, dtype = questions.source.hiddens[0].new_empty, questions.source.dtype

        def make(entries: int) -> Tensor:
            return new_empty(entries, dtype=dtype)

        n_tiles = plan.n_tiles if plan.retained else 1
        # The filter needs all tiles of a chunk as one matrix; otherwise none is that large.
        self.matrix = make(plan.chunk_rows * plan.vocab if plan.filtered else 0)
        n_tiles = 0 if plan.filtered else n_tiles
        self.tiles = [make(size) for _ in range(n_tiles)]
        self.other = make(0 if questions.other is None else size)
        self.scratch = [make(size) for _ in range(2)]

    def free(self) -> None:
        """Free the memory, even while a finished chunk is still referenced."""
        self.matrix = self.other = self.matrix.new_empty(0)
        self.tiles, self.scratch = [], []


class Inputs:
    """The hidden states of some rows as the product takes them: (D_i, B) each.

    A factor per row is part of them where the map allows it; else `unscaled` is that factor.
    """

    def __init__(self, source: Source, rows: Rows, hiddens: tuple[Tensor, ...]) -> None:
        self.row_scale = None if source.row_scale is None else source.row_scale[rows]
        linear = not source.pointwise.bounded and source.pointwise.shift == 0.0
        self.unscaled = None if linear and source.bias is None else self.row_scale
        if self.row_scale is None or self.unscaled is not None:
            self.transposed = tuple(h.T.contiguous() for h in hiddens)
        else:
            self.transposed = tuple((h.T * self.row_scale).contiguous() for h in hiddens)


class Chunk:
    """Some rows, with the running state of their sweep."""

    def __init__(self, questions: Questions, plan: Plan, buffers: Buffers, rows: Rows) -> None:
        self.questions, self.plan, self.buffers, self.rows = questions, plan, buffers, rows
        self.hiddens = questions.source.take(rows)
        self.n_rows = self.hiddens[0].shape[0]
        self.other_hiddens = () if questions.other is None else questions.other.take(rows)
        self._inputs = Inputs(questions.source, rows, self.hiddens)
        if questions.other is not None:
            self._other_inputs = Inputs(questions.other, rows, self.other_hiddens)
        self.ids = None if questions.ids is None else questions.ids[rows]
        self._made = False
        self.flat = False  # whether the filter found nothing to set aside

    def _view(self, flat: Tensor, n_tokens: int) -> Tensor:
        return flat[: n_tokens * self.n_rows].view(n_tokens, self.n_rows)

    def matrix(self) -> Tensor:
        """Return all tiles as one matrix, (V, rows)."""
        return self._view(self.buffers.matrix, self.plan.vocab)

    def scratch(self, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Return two tiles of scratch memory."""
        first, second = (self._view(flat, n_tokens) for flat in self.buffers.scratch)
        return first, second

    def _tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the memory of all tiles: (lo, hi, (hi - lo, rows))."""
        if self.plan.filtered:
            matrix = self.matrix()
            yield from ((lo, hi, matrix[lo:hi]) for lo, hi in self.plan.tiles())
            return
        for number, (lo, hi) in enumerate(self.plan.tiles()):
            flat = self.buffers.tiles[number if self.plan.retained else 0]
            yield lo, hi, self._view(flat, hi - lo)

    def _linear(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield all tiles of the linear layer, without bias and map."""
        for lo, hi, z in self._tiles():
            yield lo, hi, self.questions.source.linear_tile(self._inputs.transposed, lo, hi, z)
        self._made = True

    def logits(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield all tiles of logits: the retained ones, after `forward` has made them."""
        if self._made and self.plan.retained:
            yield from self._tiles()
            return
        source = self.questions.source
        for lo, hi, x in self._linear():
            bias, scale = source.bias_tile(lo, hi), self._inputs.unscaled
            yield lo, hi, kernels.finish_(x, bias, source.pointwise, scale)

    def _other_logits(self, lo: int, hi: int) -> Tensor | None:
        other = self.questions.other
        if other is None:
            return None
        out = self._view(self.buffers.other, hi - lo)
        inputs = self._other_inputs
        other.linear_tile(inputs.transposed, lo, hi, out)
        return kernels.finish_(out, other.bias_tile(lo, hi), other.pointwise, inputs.unscaled)

    def _soft_tile(self, lo: int, hi: int) -> Tensor | None:
        """Return soft targets times the class weight: (tokens, rows)."""
        q = self.questions
        if q.soft is None:
            return None
        soft = q.soft[self.rows, lo:hi].T.to(q.source.dtype)
        return soft if q.soft_weight is None else soft * q.soft_weight[lo:hi, None]

    def forward(self, top: TopK | None = None, rank: Rank | None = None) -> RowSums:
        """Sweep the vocabulary once, update the trackers, and return the answers."""
        q, n_rows = self.questions, self.n_rows
        like = self.buffers.scratch[0]
        self._softmax = Softmax.start(n_rows, entropy=q.entropy or q.other is not None, like=like)
        self._other_softmax = Softmax.start(n_rows, entropy=False, like=like)
        self._doubled = Softmax.start(n_rows, entropy=False, like=like)
        self._cross = torch.zeros_like(self._softmax.s)
        self._mixed = like.new_zeros(n_rows)
        self._softened = like.new_zeros(n_rows)
        n_ids = 0 if self.ids is None else self.ids.shape[1]
        self._picked = like.new_zeros(n_rows, n_ids)
        for lo, hi, z in self._linear():
            scratch = self.scratch(hi - lo)
            bias, pointwise = q.source.bias_tile(lo, hi), q.source.pointwise
            if self._inputs.unscaled is not None:
                kernels.finish_(z, bias, pointwise, self._inputs.unscaled)
                bias, pointwise = None, Pointwise()
            z_q = self._other_logits(lo, hi)
            if z_q is None:
                kernels.update_answers_(z, lo, bias, pointwise, self._softmax, scratch, top, rank)
            else:
                before = (self._softmax.m.clone(), self._softmax.s.clone())
                kernels.finish_(z, bias, pointwise)
                weights = kernels.update_softmax_(z, self._softmax, scratch)
                self._add_other(before, weights, z_q, scratch[1])
                for tracker in (top, rank):
                    if tracker is not None:
                        tracker.update(lo, z)
            self._add_linear(lo, hi, z, scratch[0])
            if q.log_sum_sq:
                kernels.update_doubled_(z, self._doubled, scratch)
        return self._answers()

    def _add_other(
        self, before: tuple[Tensor, Tensor], weights: Tensor, z_q: Tensor, scratch: Tensor
    ) -> None:
        """Add Σ exp(z - m)(z_q - m_q) to `_cross`, m and m_q being the running maxima."""
        running, spare = self._other_softmax, torch.empty_like(z_q)
        old_shift = kernels.finite(running.m)
        kernels.update_softmax_(z_q, running, (spare, spare))
        shift = kernels.finite(running.m)
        m, s = before
        decay = (m - kernels.finite(self._softmax.m)).exp()
        self._cross.add_(s * (old_shift - shift)).mul_(decay)
        cross = torch.sub(z_q, shift, out=scratch).mul_(weights)
        # 0 · -inf is 0 here; p > 0 where q = 0 remains infinite.
        self._cross.add_(cross.masked_fill_(weights == 0, 0.0).sum(0))

    def _add_linear(self, lo: int, hi: int, z: Tensor, scratch: Tensor) -> None:
        q = self.questions
        if self.ids is not None:
            inside = (self.ids >= lo) & (self.ids < hi)
            found = z.T.gather(1, (self.ids - lo).clamp(0, hi - lo - 1))
            self._picked = torch.where(inside, found, self._picked)
        if q.mix is not None:
            finite = z if q.source.bias is None else torch.clamp(z, min=kernels.FLOOR, out=scratch)
            self._mixed.addmv_(finite.T, q.mix[lo:hi])
        soft = self._soft_tile(lo, hi)
        if soft is not None:
            product = torch.mul(z, soft, out=scratch)
            if q.source.bias is not None:
                product.masked_fill_(soft == 0, 0.0)
            self._softened.add_(product.sum(0))

    def _answers(self) -> RowSums:
        q, softmax = self.questions, self._softmax
        kl, other = None, self._other_softmax
        if q.other is not None:
            cross = other.s.log() - self._cross / softmax.s
            kl = cross - softmax.entropy
        return RowSums(
            lse=softmax.lse,
            entropy=softmax.entropy if q.entropy else None,
            picked=self._picked.double() if self.ids is not None else None,
            mixed=self._mixed.double() if q.mix is not None else None,
            softened=self._softened.double() if q.soft is not None else None,
            kl=kl,
            other_lse=other.lse if q.other is not None else None,
            log_sum_sq=self._doubled.lse - 2 * softmax.lse if q.log_sum_sq else None,
        )

    def backward(
        self, answers: RowSums, upstream: RowSums, into: Gradients, other_into: Gradients
    ) -> None:
        """Add the gradients of the sources' tensors, given those of the answers.

        Overwrites retained tiles.
        """
        q = self.questions
        k = coefficients(answers, upstream, q.source.dtype)
        if q.grad_filter is not None:
            q.grad_filter.count(self.n_rows)
        squares = None
        if upstream.log_sum_sq is not None:
            squares = kernels.Squares(2 * upstream.log_sum_sq, answers.log_sum_sq)
        to_other = q.other is not None and upstream.kl is not None and other_into.wanted
        if into.wanted:
            into.start(self.rows, self.hiddens)
        if to_other:
            other_into.start(self.rows, self.other_hiddens)
        for lo, hi, z in self.logits():
            scratch = self.scratch(hi - lo)
            z_q = self._other_logits(lo, hi)
            log_q = None
            if q.other is not None and z_q is not None and upstream.kl is not None:
                log_q = kernels.subtract_(z_q.clone(), answers.other_lse)
                if to_other:
                    p = kernels.subtract_(scratch[1].copy_(z), answers.lse).exp_()
                    kernels.gradient_(
                        z_q,
                        answers.other_lse,
                        other_coefficients(upstream.kl, q.other.dtype),
                        q.other.pointwise,
                        soft=p,
                        scratch=(scratch[0], scratch[0]),
                        row_scale=self._other_inputs.row_scale,
                    )
                    other_into.add(lo, hi, z_q)
            if not into.wanted:
                continue
            kernels.gradient_(
                z,
                answers.lse,
                k,
                q.source.pointwise,
                log_q=log_q,
                mix=None if q.mix is None else q.mix[lo:hi],
                soft=self._soft_tile(lo, hi),
                picks=self._picks(lo, hi, upstream.picked),
                squares=squares,
                row_scale=self._inputs.row_scale,
                scratch=scratch,
            )
            into.add(lo, hi, z)
        if into.wanted:
            into.finish()
        if to_other:
            other_into.finish()

    def _picks(
        self, lo: int, hi: int, upstream: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the picked entries of a tile with their gradients: token, row, value."""
        if self.ids is None or upstream is None:
            return None
        row, k = ((self.ids >= lo) & (self.ids < hi)).nonzero(as_tuple=True)
        return self.ids[row, k] - lo, row, upstream[row, k].to(self.questions.source.dtype)
