"""A chunk of rows in a sweep: forward over its tiles of the vocabulary, then backward.

In:  questions, a plan, which rows.
Out: their answers; then, for gradients of those answers, the gradients of the source's tensors,
     added to a `Gradients`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lmhead.scores import Rows
from lmhead.scores.row_loss import RowSums
from lmhead.sweep import filter, kernels
from lmhead.sweep.exact_decisions import Rank, TopK
from lmhead.sweep.gradients import Gradients, coefficients, other_coefficients
from lmhead.sweep.kernels import Softmax
from lmhead.sweep.plan import Plan
from lmhead.sweep.questions import Questions


class Buffers:
    """The tiles of a sweep, allocated once and used by all its chunks."""

    def __init__(self, questions: Questions, plan: Plan) -> None:
        size = plan.chunk_rows * plan.tile_tokens
        make = questions.source.hiddens[0].new_empty
        dtype = questions.source.dtype
        n_tiles = plan.n_tiles if plan.retained else 1
        # The filter needs all tiles of a chunk as one matrix; otherwise none is that large.
        self.matrix = make(plan.chunk_rows * plan.vocab if plan.filtered else 0, dtype=dtype)
        n_tiles = 0 if plan.filtered else n_tiles
        self.tiles = [make(size, dtype=dtype) for _ in range(n_tiles)]
        self.other = make(0 if questions.other is None else size, dtype=dtype)
        self.scratch = [make(size, dtype=dtype) for _ in range(2)]

    def free(self) -> None:
        """Free the memory, even while a finished chunk is still referenced."""
        self.matrix = self.other = self.matrix.new_empty(0)
        self.tiles, self.scratch = [], []


class Chunk:
    """Some rows, with the running state of their sweep."""

    def __init__(self, questions: Questions, plan: Plan, buffers: Buffers, rows: Rows) -> None:
        self.questions, self.plan, self.buffers, self.rows = questions, plan, buffers, rows
        self.hiddens = questions.source.take(rows)
        self.n_rows = self.hiddens[0].shape[0]
        self.other_hiddens = () if questions.other is None else questions.other.take(rows)
        self._transposed = tuple(h.T.contiguous() for h in self.hiddens)
        self._other_transposed = tuple(h.T.contiguous() for h in self.other_hiddens)
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
            yield lo, hi, self.questions.source.linear_tile(self._transposed, lo, hi, z)
        self._made = True

    def logits(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield all tiles of logits: the retained ones, after `forward` has made them."""
        if self._made and self.plan.retained:
            yield from self._tiles()
            return
        source = self.questions.source
        for lo, hi, x in self._linear():
            yield lo, hi, kernels.finish_(x, source.bias_tile(lo, hi), source.pointwise)

    def _other_logits(self, lo: int, hi: int) -> Tensor | None:
        other = self.questions.other
        if other is None:
            return None
        out = self._view(self.buffers.other, hi - lo)
        other.linear_tile(self._other_transposed, lo, hi, out)
        return kernels.finish_(out, other.bias_tile(lo, hi), other.pointwise)

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
        self._cross = torch.zeros_like(self._softmax.s)
        self._mixed = like.new_zeros(n_rows)
        self._softened = like.new_zeros(n_rows)
        n_ids = 0 if self.ids is None else self.ids.shape[1]
        self._picked = like.new_zeros(n_rows, n_ids)
        for lo, hi, z in self._linear():
            scratch = self.scratch(hi - lo)
            bias, pointwise = q.source.bias_tile(lo, hi), q.source.pointwise
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
        )

    def backward(
        self, answers: RowSums, upstream: RowSums, into: Gradients, other_into: Gradients
    ) -> None:
        """Add the gradients of the sources' tensors, given those of the answers.

        Overwrites retained tiles.
        """
        q = self.questions
        k = coefficients(answers, upstream, q.source.dtype)
        if self.plan.filtered and q.grad_filter is not None and k.a is not None:
            self.flat = filter.backward(self, answers, upstream, k.a, into, q.grad_filter)
            return
        if q.grad_filter is not None:
            q.grad_filter.count(self.n_rows)
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
