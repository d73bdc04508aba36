"""Exact integer answers: argmax, top-k, rank.

A product in float32 can swap two tokens whose logits nearly agree. Each tracker reads the tiles of
a sweep, keeps the tokens that the rounding error leaves undecided, and compares those in float64.
The order is by float64 logit, largest first, and by lowest id among equals, whatever the tiles and
the batch.

A row whose logits hold a NaN, or only -inf, has no such order: its ids and ranks are -1.

For one row, as in decoding, the time goes into reading the weight, and float64 sums cost nothing
extra: `answer_one_row` needs neither error bounds nor a second pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmhead.scores.row_loss import RowSums
from lmhead.sweep import kernels
from lmhead.sweep.kernels import FLOOR
from lmhead.sweep.questions import DEFAULT_MAX_BYTES, Decisions, Questions
from lmhead.sweep.source import Source

# Candidates kept beyond k. Between the k-th and the (k+8)-th logit the gap exceeds rounding errors.
_SPARE = 8


class _Tracker:
    """Base class of the trackers: the source, its rows, and the error bound of a computed logit."""

    def __init__(
        self, source: Source, rows: Tensor, hiddens: tuple[Tensor, ...], max_bytes: int
    ) -> None:
        self.source, self.rows, self.max_bytes = source, rows, max_bytes
        self.per_norm, self.relative, self.absolute = source.error_bounds(hiddens, rows)

    def logits(self, in_chunk: Tensor, ids: Tensor) -> Tensor:
        """Return float64 logits of (row, token) pairs; rows counted within the chunk."""
        return self.source.pairs(self.rows[in_chunk], ids, max_bytes=self.max_bytes)


class TopK(_Tracker):
    """Track the k largest logits of each row and their ids."""

    def __init__(
        self,
        source: Source,
        rows: Tensor,
        hiddens: tuple[Tensor, ...],
        max_bytes: int,
        k: int,
    ) -> None:
        super().__init__(source, rows, hiddens, max_bytes)
        self.k = k
        self.kept = min(source.vocab, k + _SPARE)
        # (rows, kept), unordered; the first `sizes` entries of each row are filled.
        self.values = hiddens[0].new_full((len(rows), self.kept), -math.inf)
        self.ids = rows.new_zeros(len(rows), self.kept)
        self.sizes = torch.zeros(len(rows), dtype=torch.int32, device=rows.device)

    def update(self, lo: int, z: Tensor) -> None:
        """Update with a tile, (tokens, rows)."""
        values, ids = z.topk(min(self.kept, z.shape[0]), dim=0)
        filled = int(self.sizes[0]) if len(self.sizes) else 0
        values = torch.cat([self.values[:, :filled], values.T], 1)
        ids = torch.cat([self.ids[:, :filled], ids.T + lo], 1)
        values, order = values.topk(min(self.kept, values.shape[1]), dim=1)
        filled = values.shape[1]
        self.values[:, :filled], self.ids[:, :filled] = values, ids.gather(1, order)
        self.sizes.fill_(filled)

    def answer(self, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (rows, k) in float64 and ids (rows, k)."""
        ids = self.ids.sort(dim=1).values
        in_chunk = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
        exact = self.logits(in_chunk.reshape(-1), ids.reshape(-1)).view_as(ids)
        values, ids = in_order(exact, ids, self.k)
        for row in self._undecided(values).nonzero()[:, 0].tolist():
            values[row], ids[row] = self._from_scratch(row)
        return values, ids.masked_fill(no_order(lse), -1)

    def _undecided(self, values: Tensor) -> Tensor:
        """Return the rows whose k-th value might be below that of a token that was not kept."""
        if self.kept == self.source.vocab:
            return self.sizes < self.kept
        last = self.values.amin(1).double()
        margin = self.per_norm.double() * self.source.token_norms.max()
        margin += self.relative * last.abs() + self.absolute
        # A NaN is undecided.
        return ~(last + margin < values[:, -1]) | (self.sizes < self.kept)

    def _from_scratch(self, row: int) -> tuple[Tensor, Tensor]:
        """Return the top k by float64 logits of the whole vocabulary, for one row."""
        all_ids = torch.arange(self.source.vocab, device=self.rows.device)
        exact = self.logits(torch.full_like(all_ids, row), all_ids)
        values, ids = in_order(exact[None], all_ids[None], self.k)
        return values[0], ids[0]


class Rank(_Tracker):
    """Count the tokens before given ones: a larger logit, or an equal one and a lower id."""

    def __init__(
        self,
        source: Source,
        rows: Tensor,
        hiddens: tuple[Tensor, ...],
        max_bytes: int,
        ids: Tensor,
        values: Tensor | None = None,
    ) -> None:
        super().__init__(source, rows, hiddens, max_bytes)
        self.ids = ids.T.contiguous()  # (K, rows), like all tensors below
        if values is None:
            in_chunk = torch.arange(len(rows), device=ids.device).expand_as(self.ids)
            values = self.logits(in_chunk.reshape(-1), self.ids.reshape(-1)).view_as(self.ids).T
        self.exact = values.T.contiguous()
        self.score = self.exact.to(source.dtype)
        self.slack = 2 * (self.relative * self.score.abs() + self.absolute)
        self.counts = torch.zeros_like(self.ids)

    def norms(self, lo: int, hi: int) -> Tensor:
        """Return |w| of a tile's tokens."""
        return self.source.token_norms[lo:hi]

    def update(self, lo: int, z: Tensor) -> None:
        """Update with a tile, (tokens, rows)."""
        spread = self.per_norm * self.norms(lo, lo + z.shape[0])[:, None]
        for k, (score, slack) in enumerate(zip(self.score, self.slack, strict=True)):
            margin = spread + slack
            ahead = z - score
            self.counts[k] += (ahead > margin).sum(0)
            # A NaN, as of -inf - -inf, is undecided.
            token, row = (~((ahead > margin) | (ahead < -margin))).nonzero(as_tuple=True)
            self.compare_exact(torch.full_like(token, k), token + lo, row)

    def compare_exact(self, which: Tensor, token: Tensor, row: Tensor) -> None:
        """Decide in float64 whether tokens come before the given ones."""
        exact = self.logits(row, token)
        score, given_id = self.exact[which, row], self.ids[which, row]
        before = (exact > score) | ((exact == score) & (token < given_id))
        self.counts.index_put_((which, row), before.to(self.counts.dtype), accumulate=True)

    def answer(self, lse: Tensor) -> Tensor:
        """Return ranks (rows, K)."""
        return self.counts.T.masked_fill(no_order(lse), -1)


def no_order(lse: Tensor) -> Tensor:
    """Return the rows with a NaN (then lse is NaN) or only -inf: (rows, 1)."""
    return ~(lse > -math.inf)[:, None]


def in_order(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the first k by value, ids ascending among equals; `ids` must be sorted."""
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values[:, :k], ids.gather(1, order)[:, :k]


_NUMBERS = 8  # most float64 numbers per token in memory at a time
_MAX_K = 1024  # largest k: the number of tokens that are sorted
_LARGE = 1e30  # above this, a partial sum may overflow float32


def answer_one_row(questions: Questions) -> tuple[RowSums, Decisions] | None:
    """Return what `run_sweep.answer` returns, (1, ...) each, from float64 logits of all tokens.

    None for several rows, for gradients (they need the float32 logits), or if the core cannot.
    """
    if not _supports(questions):
        return None
    q, source = questions, questions.source
    tokens = torch.arange(source.vocab, device=source.device)
    z = source.float64_row()
    # NaN fails this test.
    if not bool(((z.abs() < _LARGE) | (z == -torch.inf)).all()):
        return None
    lse = z.logsumexp(0, keepdim=True)
    entropy = _entropy(z, lse) if q.entropy else None
    picked = None if q.ids is None else z[q.ids]
    values = ids = ranks = None
    if q.top_k:
        values, ids = _top(z, q.top_k)
        ids = ids.masked_fill(no_order(lse), -1)
    if q.rank_ids is not None:
        ranks = torch.zeros_like(q.rank_ids)
        for column, id in enumerate(q.rank_ids[0]):
            ranks[0, column] = _rank(z, tokens, id)
        ranks = ranks.masked_fill(no_order(lse), -1)
    return RowSums(lse=lse, entropy=entropy, picked=picked), Decisions(values, ids, ranks)


def recompute_infinite_rows(q: Questions, rows: Tensor, sums: RowSums) -> RowSums:
    """Answer rows with an infinite logit, whose lse is NaN, again from float64 logits.

    A logit is infinite if an input is, or if float32 overflows. Rows with a NaN among their logits
    are not changed.
    """
    undefined = sums.lse.isnan()
    source = q.source
    for hidden in source.hiddens:
        undefined &= ~hidden.detach()[rows].isnan().any(1)
    if not bool(undefined.any()) or source.has_nan:
        return sums
    tokens = torch.arange(source.vocab, device=source.device)
    for index in undefined.nonzero()[:, 0].tolist():
        z = source.pairs(rows[index].expand_as(tokens), tokens, max_bytes=DEFAULT_MAX_BYTES)
        if bool(z.isnan().any()):
            continue
        sums.lse[index] = z.logsumexp(0)
        if sums.entropy is not None:
            sums.entropy[index] = _entropy(z, sums.lse[index])
        if sums.picked is not None and q.ids is not None:
            ids = q.ids[rows[index]]
            # With a shard, ids of other slices are outside [0, V): their logit is 0.
            inside = (ids >= 0) & (ids < source.vocab)
            sums.picked[index] = torch.where(inside, z[ids.clamp(0, source.vocab - 1)], 0.0)
    return sums


def _entropy(z: Tensor, lse: Tensor) -> Tensor:
    log_p = (z - lse).clamp_(min=FLOOR)
    return -(log_p.exp() * log_p).sum(0, keepdim=True)


def _supports(q: Questions) -> bool:
    """Return whether there is one row, without gradients, that the compiled core can compute."""
    source = q.source
    if source.rows != 1 or q.active is not None or q.top_k > _MAX_K or q.shard is not None:
        return False
    if q.other is not None or q.mix is not None or q.soft is not None or q.log_sum_sq:
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    tensors = [t for t in q.tensors() if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    budget = DEFAULT_MAX_BYTES if q.max_bytes is None else q.max_bytes
    if 8 * _NUMBERS * source.vocab > budget:
        return False
    pairs = zip(source.hiddens, source.weights, strict=True)
    return all(kernels.for_pairs(h, w) is not None for h, w in pairs)


def _top(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of z (V,), lowest id first among equals: (1, k) each."""
    kth = z.topk(k, sorted=False).values.amin()
    ids = (z >= kth).nonzero()[:, 0]
    return in_order(z[ids][None], ids[None], k)


def _rank(z: Tensor, tokens: Tensor, id: Tensor) -> Tensor:
    """Return how many tokens come before one: larger, or equal with a lower id."""
    return ((z > z[id]) | ((z == z[id]) & (tokens < id))).sum()
