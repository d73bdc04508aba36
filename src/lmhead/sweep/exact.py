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

    def __init__(
        self, source: Source, rows: Tensor, hiddens: tuple[Tensor, ...], max_bytes: int
    ) -> None:
        self.source, self.rows, self.max_bytes = source, rows, max_bytes
        self.per_norm, self.relative, self.absolute = source.error_bounds(hiddens)

    def logits(self, tokens: Tensor, ids: Tensor) -> Tensor:
        """Float64 logits of (token, word) pairs; tokens counted within the chunk."""
        return self.source.pairs(self.rows[tokens], ids, max_bytes=self.max_bytes)


class TopK(_Watcher):
    """The k largest logits of each token and their ids."""

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
        # (tokens, kept): in no order; the first `sizes` of each token are filled.
        self.values = hiddens[0].new_full((len(rows), self.kept), -math.inf)
        self.ids = rows.new_zeros(len(rows), self.kept)
        self.sizes = torch.zeros(len(rows), dtype=torch.int32, device=rows.device)

    def see(self, lo: int, z: Tensor) -> None:
        """Take in a tile, (words, tokens)."""
        values, ids = z.topk(min(self.kept, z.shape[0]), dim=0)
        filled = int(self.sizes[0]) if len(self.sizes) else 0
        values = torch.cat([self.values[:, :filled], values.T], 1)
        ids = torch.cat([self.ids[:, :filled], ids.T + lo], 1)
        values, order = values.topk(min(self.kept, values.shape[1]), dim=1)
        filled = values.shape[1]
        self.values[:, :filled], self.ids[:, :filled] = values, ids.gather(1, order)
        self.sizes.fill_(filled)

    def answer(self, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Values (tokens, k) in float64 and ids (tokens, k)."""
        ids = self.ids.sort(dim=1).values
        tokens = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
        exact = self.logits(tokens.reshape(-1), ids.reshape(-1)).view_as(ids)
        values, ids = in_order(exact, ids, self.k)
        for token in self._undecided(values).nonzero()[:, 0].tolist():
            values[token], ids[token] = self._from_scratch(token)
        return values, ids.masked_fill(no_order(lse), -1)

    def _undecided(self, values: Tensor) -> Tensor:
        """Tokens whose k-th value might be beaten by a word that was not kept."""
        if self.kept == self.source.vocab:
            return self.sizes < self.kept
        last = self.values.amin(1).double()
        reach = self.per_norm.double() * self.source.word_norms.max()
        reach += self.relative * last.abs() + self.absolute
        # Written so that a NaN is undecided.
        return ~(last + reach < values[:, -1]) | (self.sizes < self.kept)

    def _from_scratch(self, token: int) -> tuple[Tensor, Tensor]:
        """Float64 over the whole vocabulary, for one token."""
        all_ids = torch.arange(self.source.vocab, device=self.rows.device)
        exact = self.logits(torch.full_like(all_ids, token), all_ids)
        values, ids = in_order(exact[None], all_ids[None], self.k)
        return values[0], ids[0]


class Rank(_Watcher):
    """How many words come before a given one: those with a larger logit, or equal and lower id."""

    def __init__(
        self,
        source: Source,
        rows: Tensor,
        hiddens: tuple[Tensor, ...],
        max_bytes: int,
        ids: Tensor,
    ) -> None:
        super().__init__(source, rows, hiddens, max_bytes)
        self.ids = ids.T.contiguous()  # (K, tokens), as all that follows
        tokens = torch.arange(len(rows), device=ids.device).expand_as(self.ids)
        self.exact = self.logits(tokens.reshape(-1), self.ids.reshape(-1)).view_as(self.ids)
        self.mine = self.exact.to(source.dtype)
        self.slack = 2 * (self.relative * self.mine.abs() + self.absolute)
        self.counts = torch.zeros_like(self.ids)

    def norms(self, lo: int, hi: int) -> Tensor:
        """|w| of a tile's words."""
        return self.source.word_norms[lo:hi]

    def see(self, lo: int, z: Tensor) -> None:
        """Take in a tile, (words, tokens)."""
        spread = self.per_norm * self.norms(lo, lo + z.shape[0])[:, None]
        for k, (mine, slack) in enumerate(zip(self.mine, self.slack, strict=True)):
            margin = spread + slack
            ahead = z - mine
            self.counts[k] += (ahead > margin).sum(0)
            # Written so that a NaN, as of -inf - -inf, is too close to tell.
            word, token = (~((ahead > margin) | (ahead < -margin))).nonzero(as_tuple=True)
            self.settle(torch.full_like(word, k), word + lo, token)

    def settle(self, which: Tensor, word: Tensor, token: Tensor) -> None:
        """Decide in float64 whether words come before the given ones."""
        theirs = self.logits(token, word)
        mine, own = self.exact[which, token], self.ids[which, token]
        before = (theirs > mine) | ((theirs == mine) & (word < own))
        self.counts.index_put_((which, token), before.to(self.counts.dtype), accumulate=True)

    def answer(self, lse: Tensor) -> Tensor:
        """Ranks (tokens, K)."""
        return self.counts.T.masked_fill(no_order(lse), -1)


def no_order(lse: Tensor) -> Tensor:
    """Tokens with a NaN (then lse is NaN) or nothing but -inf: (tokens, 1)."""
    return ~(lse > -math.inf)[:, None]


def in_order(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k by value, ids ascending among equals; `ids` must come sorted."""
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values[:, :k], ids.gather(1, order)[:, :k]
