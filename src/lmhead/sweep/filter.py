"""The mass-conserving gradient filter: most of the gradient from few tokens, the rest as one term.

In a trained model nearly all of P = softmax is tiny. Per chunk of rows, the tokens that together
carry the last τ of the chunk's probability mass are set aside (targets never are). The two gradient
products run on the others. The block set aside, T (rows x tokens), is replaced by the rank-one
matrix with the same row sums d and column sums c,

    T ≈ d cᵀ / Σd,

so every row's and every token's mass is kept. Its share of the gradients costs one product with
as many columns as there are chunks.

In:  a chunk whose tiles are retained, and the coefficients of its gradient.
Out: the chunk's gradients, added to a `Gradients`; the error, if it is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.scores.row_loss import RowSums
from lmhead.sweep import kernels
from lmhead.sweep.chunk import Chunk, Gradients, coefficients
from lmhead.sweep.questions import GradFilter

# Above this share of tokens kept, gathering them costs more than it saves: be exact instead.
_MAX_KEPT = 0.6


def backward(
    chunk: Chunk, answers: RowSums, upstream: RowSums, into: Gradients, settings: GradFilter
) -> None:
    """Add the gradients of a chunk whose tiles hold logits; set `chunk.flat` if they are exact."""
    q = chunk.questions
    # The factor of p (rows,); the other parts of the gradient are taken from `upstream`: picked
    # tokens, label smoothing, soft targets.
    a = coefficients(answers, upstream, q.source.dtype).a
    if a is None:
        chunk.backward(answers, upstream, into, into)
        return
    source, vocab, dtype = q.source, q.source.vocab, q.source.dtype
    columns = a.new_empty(vocab)
    totals = torch.zeros_like(a)
    for lo, hi, z in chunk.logits():
        scratch = chunk.scratch(hi - lo)
        kernels.softmax_gradient_(
            z, answers.lse, a, source.pointwise, columns[lo:hi], totals, scratch
        )
    if upstream.mixed is not None and q.mix is not None:
        # Label smoothing is a rank-one term by itself, on all tokens.
        weight = q.mix * source.pointwise.scale
        into.add_rank_one(chunk.rows, chunk.hiddens, weight, upstream.mixed.to(dtype))
    soft = _SoftPart.of(chunk, upstream)
    groups = _by_sign(chunk, a, columns)
    mass = torch.stack([sums for sums, _ in groups]).abs().sum(0)
    if soft is not None:
        mass += soft.columns.abs()
    keep = mass >= kernels.tail_threshold(mass, settings.tail_mass)
    picks = _picks(chunk, answers, upstream)
    if picks is not None:
        keep[picks[0]] = True
    kept = keep.nonzero()[:, 0]
    if len(kept) > _MAX_KEPT * vocab:
        _add_all(chunk, picks, soft, into)
        settings.count(chunk.n_rows)
        chunk.flat = True
        return

    gradient = chunk.matrix()  # (V, rows)
    kept_rows = torch.zeros_like(a)
    kept_soft = torch.zeros_like(a)
    blocks = kept.split(chunk.plan.tile_tokens)  # type: ignore[no-untyped-call]
    for some in blocks:
        kept_rows += F.embedding_bag(some, gradient, some.new_zeros(1), mode="sum")[0]
        if soft is not None:
            kept_soft += soft.of_tokens(some).sum(0)
    rest = totals - kept_rows
    tails = [(sums.masked_fill(keep, 0.0), rest * row_mask) for sums, row_mask in groups]
    if soft is not None:
        tails.append((soft.columns.masked_fill(keep, 0.0), soft.totals - kept_soft))
    settings.count(
        chunk.n_rows, len(kept) / vocab, lambda: _measure(chunk, picks, soft, keep, tails)
    )
    into.start(chunk.rows, chunk.hiddens, whole=False)
    if picks is not None:
        token, row, value = picks
        gradient.index_put_((token, row), value, accumulate=True)
    for some in blocks:
        if soft is not None:
            gradient.index_add_(0, some, soft.of_tokens(some))
        into.add_tokens(some, gradient)
    for tail in tails:
        term = _rank_one(tail)
        if term is not None:
            into.add_rank_one(chunk.rows, chunk.hiddens, *term)
    into.finish()


def _add_all(chunk: Chunk, picks: Picks | None, soft: _SoftPart | None, into: Gradients) -> None:
    """Add the gradients of a chunk with nothing set aside; its tiles hold a · p."""
    into.start(chunk.rows, chunk.hiddens)
    for lo, hi, g in chunk.logits():
        tokens = torch.arange(lo, hi, device=g.device)
        if soft is not None:
            g += soft.of_tokens(tokens)
        if picks is not None:
            _add_picks(g, tokens, picks)
        into.add(lo, hi, g)
    into.finish()


Tail = tuple[Tensor, Tensor]
"""The sums of a block of one sign that is set aside: c over rows (V,), d over tokens (rows,)."""


def _by_sign(chunk: Chunk, a: Tensor, columns: Tensor) -> list[Tail]:
    """Split the column sums by the sign of the factor a, each part with a mask of its rows.

    A block of both signs could have Σd = 0; a block of one sign cannot.
    """
    positive = (a > 0).to(a.dtype)
    if bool((positive == 1).all()) or not bool(positive.any()):
        return [(columns, torch.ones_like(a))]
    upper = chunk.matrix() @ positive
    return [(upper, positive), (columns - upper, 1 - positive)]


def _rank_one(tail: Tail) -> Tail | None:
    """Return c and d / Σd, whose product is the rank-one block; None where there is no mass."""
    c, d = tail
    total = d.sum()
    return None if float(total) == 0.0 else (c, d / total)


Picks = tuple[Tensor, Tensor, Tensor]


def _picks(chunk: Chunk, answers: RowSums, upstream: RowSums) -> Picks | None:
    """Return single entries of the gradient, times the slope of the map: token, row, value."""
    if chunk.ids is None or upstream.picked is None:
        return None
    pointwise, dtype = chunk.questions.source.pointwise, chunk.questions.source.dtype
    if pointwise.bounded:
        slope = pointwise.slope(answers.picked, torch.empty_like(answers.picked))
    else:
        slope = torch.full_like(answers.picked, pointwise.scale)
    value = (upstream.picked * slope).to(dtype)
    row = torch.arange(chunk.n_rows, device=value.device)[:, None].expand_as(value)
    if chunk.questions.shard is None:
        return chunk.ids.reshape(-1), row.reshape(-1), value.reshape(-1)
    inside = (chunk.ids >= 0) & (chunk.ids < chunk.questions.source.vocab)
    return chunk.ids[inside], row[inside], value[inside]


def _add_picks(block: Tensor, tokens: Tensor, picks: Picks) -> None:
    """Add to `block` the picks that fall on its tokens, which are sorted."""
    token, row, value = picks
    place = torch.searchsorted(tokens, token).clamp_(max=len(tokens) - 1)
    hit = tokens[place] == token
    block.index_put_((place[hit], row[hit]), value[hit], accumulate=True)


@dataclass(frozen=True)
class _SoftPart:
    """The part of the gradient that comes from soft targets: factor_n · soft_nv · weight_v."""

    soft: Tensor  # (rows, V)
    weight: Tensor | None  # (V,)
    factor: Tensor  # (rows,), with the scale of the map
    columns: Tensor  # (V,), its sums over rows
    totals: Tensor  # (rows,), its sums over tokens

    @classmethod
    def of(cls, chunk: Chunk, upstream: RowSums) -> _SoftPart | None:
        q = chunk.questions
        if q.soft is None or upstream.softened is None:
            return None
        soft = q.soft[chunk.rows].to(q.source.dtype)
        factor = upstream.softened.to(q.source.dtype) * q.source.pointwise.scale
        columns = factor @ soft
        weight = q.soft_weight
        sums = soft.sum(1) if weight is None else soft @ weight
        if weight is not None:
            columns = columns * weight
        return cls(soft, weight, factor, columns, factor * sums)

    def of_tokens(self, ids: Tensor) -> Tensor:
        """Return the part of some token ids: (tokens, rows)."""
        part = self.soft.index_select(1, ids).T * self.factor
        return part if self.weight is None else part * self.weight[ids, None]


def _measure(
    chunk: Chunk, picks: Picks | None, soft: _SoftPart | None, keep: Tensor, tails: list[Tail]
) -> tuple[float, float]:
    """Return relative errors of both gradients of a chunk, over all terms of the source."""
    source = chunk.questions.source
    blocks = [block for block in map(_rank_one, tails) if block is not None]
    error, size = torch.zeros(2, 2, dtype=torch.float64)
    for term, hidden in enumerate(chunk.hiddens):
        wrong, right = torch.zeros_like(hidden), torch.zeros_like(hidden)
        for lo, hi, g in chunk.logits():
            tokens = torch.arange(lo, hi, device=g.device)
            whole = g.clone() if soft is None else g + soft.of_tokens(tokens)
            off = whole * ~keep[lo:hi, None]
            for c, d in blocks:
                off.addr_(c[lo:hi], d, alpha=-1)
            if picks is not None:
                _add_picks(whole, tokens, picks)
            weight = source.weight_tile(term, lo, hi)
            wrong.addmm_(off.T, weight)
            right.addmm_(whole.T, weight)
            error[1] += (off @ hidden).double().square().sum()
            size[1] += (whole @ hidden).double().square().sum()
        error[0] += wrong.double().square().sum()
        size[0] += right.double().square().sum()
    hidden_error, weight_error = (error / size.clamp(min=1e-300)).sqrt().tolist()
    return hidden_error, weight_error
