"""Whole-number answers that are right to the last bit: argmax, top-k, rank.

A product in float32 can swap two words whose logits nearly agree. Each watcher sees the tiles of a
sweep, keeps what the rounding error leaves undecided, and settles that in float64. The order is by
float64 logit, largest first, and by lowest id among equals, whatever the tiles and the batch.

A token whose logits hold a NaN, or only -inf, has no such order: its ids and ranks are -1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmhead.sweep.source import Source

# Candidates kept beyond k. Eight places down the list the gap is far larger than rounding.
_SPARE = 8


class _Watcher:
    """What both watchers need: the source, its tokens, and how far a computed logit may err."""

    def __init__(self, source: Source, rows: Tensor, hiddens: tuple[Tensor, ...], block: int):
        self.source, self.rows, self.hiddens, self.block = source, rows, hiddens, block
        self.per_row, self.relative = source.error_bounds(hiddens)

    def logits(self, tokens: Tensor, ids: Tensor) -> Tensor:
        """Float64 logits of (token, word) pairs; tokens counted within the chunk."""
        return self.source.pairs(self.rows[tokens], ids, block=self.block)


class TopK(_Watcher):
    """The k largest logits of each token and their ids."""

    def __init__(
        self, source: Source, rows: Tensor, hiddens: tuple[Tensor, ...], k: int, block: int
    ) -> None:
        super().__init__(source, rows, hiddens, block)
        self.k = k
        self.kept = min(source.vocab, k + _SPARE)
        self.values = hiddens[0].new_empty(0, len(rows))
        self.ids = rows.new_empty(0, len(rows))

    def see(self, lo: int, z: Tensor) -> None:
        """Take in a tile, (words, tokens)."""
        values, ids = z.topk(min(self.kept, z.shape[0]), dim=0)
        self.values, order = torch.cat([self.values, values]).topk(
            min(self.kept, self.values.shape[0] + values.shape[0]), dim=0
        )
        self.ids = torch.cat([self.ids, ids + lo]).gather(0, order)

    def answer(self) -> tuple[Tensor, Tensor]:
        """Values (tokens, k) in float64 and ids (tokens, k)."""
        ids = self.ids.T.sort(dim=1).values
        tokens = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
        exact = self.logits(tokens.reshape(-1), ids.reshape(-1)).view_as(ids)
        values, ids = _in_order(exact, ids, self.k)
        undecided = self._undecided(values)
        for token in undecided.nonzero()[:, 0].tolist():
            values[token], ids[token] = self._from_scratch(token)
        nothing = values.isnan().any(1, keepdim=True) | (values[:, :1] == -math.inf)
        return values, ids.masked_fill(nothing, -1)

    def _undecided(self, values: Tensor) -> Tensor:
        """Tokens whose k-th value might be beaten by a word that was not kept."""
        if self.kept == self.source.vocab or self.k == 0:
            return torch.zeros(len(values), dtype=torch.bool, device=values.device)
        last = self.values[-1].double()
        reach = self.per_row.double() * self.source.word_norms.max() + self.relative * last.abs()
        # Written so that a NaN is undecided. -inf cannot be beaten by what is not larger.
        return ~((last + reach < values[:, -1]) | (last == -math.inf))

    def _from_scratch(self, token: int) -> tuple[Tensor, Tensor]:
        """Float64 over the whole vocabulary, for one token."""
        all_ids = torch.arange(self.source.vocab, device=self.rows.device)
        exact = self.logits(torch.full_like(all_ids, token), all_ids)
        values, ids = _in_order(exact[None], all_ids[None], self.k)
        return values[0], ids[0]


class Rank(_Watcher):
    """How many words come before a given one: those with a larger logit, or equal and lower id."""

    def __init__(
        self, source: Source, rows: Tensor, hiddens: tuple[Tensor, ...], ids: Tensor, block: int
    ) -> None:
        super().__init__(source, rows, hiddens, block)
        self.ids = ids  # (tokens, K)
        tokens = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
        self.exact = self.logits(tokens.reshape(-1), ids.reshape(-1)).view_as(ids)
        self.count = torch.zeros_like(ids)
        self.broken = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        self.highest = hiddens[0].new_full((len(ids),), -math.inf)

    def see(self, lo: int, z: Tensor) -> None:
        """Take in a tile, (words, tokens)."""
        norms = self.source.word_norms[lo : lo + z.shape[0], None]
        self.broken |= z.isnan().any(0)
        self.highest = torch.maximum(self.highest, z.amax(0))
        for k in range(self.ids.shape[1]):
            mine = self.exact[:, k]
            margin = self.per_row * norms + self.relative * mine.abs().to(z.dtype) * 2
            ahead = z - mine.to(z.dtype)
            self.count[:, k] += (ahead > margin).sum(0)
            # -inf - -inf is NaN: undecided too. Infinities of one sign are settled in float64.
            word, token = (~((ahead > margin) | (ahead < -margin))).nonzero(as_tuple=True)
            word = word + lo
            theirs = self.logits(token, word)
            target, target_id = mine[token], self.ids[token, k]
            before = (theirs > target) | ((theirs == target) & (word < target_id))
            self.count[:, k].index_add_(0, token, before.to(self.count.dtype))

    def answer(self) -> Tensor:
        """Ranks (tokens, K)."""
        nothing = self.broken | (self.highest == -math.inf)
        return self.count.masked_fill(nothing[:, None], -1)


def _in_order(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k by value, ids ascending among equals; `ids` must come sorted."""
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values[:, :k], ids.gather(1, order)[:, :k]
