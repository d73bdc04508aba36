"""What a sampler gives: a token per row, and what is needed to judge it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from lmhead.sampling.distribution import Distribution, Few


class Kept(Sequence[Tensor]):
    """Per row the ids that survived, ascending: `kept[i]` is an int64 vector.

    Where most words survived, only the others are stored.
    """

    def __init__(
        self,
        vocab: int,
        few: list[Tensor | None],
        lost: list[Tensor | None],
        words: Few | None = None,
    ) -> None:
        self._vocab, self._lists, self._lost, self._words = vocab, few, lost, words

    @property
    def _few(self) -> list[Tensor | None]:
        """Per row the ids, where these are listed; made when somebody asks."""
        words, self._words = self._words, None
        if words is not None:
            ids = words.ids.masked_fill(words.z == -math.inf, self._vocab).sort(1).values
            self._lists = [ids[i, :n] for i, n in enumerate(words.n.int().tolist())]
        return self._lists

    @classmethod
    def of(cls, words: Distribution, vocab: int) -> Kept:
        """The words that are left."""
        if isinstance(words, Few):
            return cls(vocab, [], [None] * len(words.z), words)
        left = words.n.long()
        none: list[Tensor | None] = [None] * len(left)
        if bool((left == vocab).all()):
            return cls(vocab, none, none)
        # Of each row the shorter list.
        masked = words.z == -math.inf
        most = left * 2 >= vocab
        listed = torch.where(most[:, None], masked, ~masked)
        sizes = torch.where(most, vocab - left, left).tolist()
        lists = torch.split_with_sizes(listed.nonzero()[:, 1], sizes)
        pairs = list(zip(lists, most.tolist(), strict=True))
        kept = [None if m else ids for ids, m in pairs]
        return cls(vocab, kept, [ids if m else None for ids, m in pairs])

    @classmethod
    def join(cls, parts: Sequence[Kept], rows: Sequence[Tensor]) -> Kept:
        """The parts of a batch, put back to their rows."""
        n = sum(len(r) for r in rows)
        few: list[Tensor | None] = [None] * n
        lost: list[Tensor | None] = [None] * n
        for part, numbers in zip(parts, rows, strict=True):
            for i, row in enumerate(numbers.tolist()):
                few[row], lost[row] = part._few[i], part._lost[i]
        return cls(parts[0]._vocab, few, lost)

    def __len__(self) -> int:
        return len(self._lost)

    @overload
    def __getitem__(self, i: int) -> Tensor: ...
    @overload
    def __getitem__(self, i: slice) -> list[Tensor]: ...
    def __getitem__(self, i: int | slice) -> Tensor | list[Tensor]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        few, lost = self._few[i], self._lost[i]
        if few is not None:
            return few
        if lost is None:
            return torch.arange(self._vocab)
        left = torch.ones(self._vocab, dtype=torch.bool, device=lost.device)
        left[lost] = False
        return left.nonzero()[:, 0]

    def counts(self) -> list[int]:
        """How many words survived, per row, without making the lists."""
        sizes = []
        for few, lost in zip(self._few, self._lost, strict=True):
            if few is not None:
                sizes.append(len(few))
            else:
                sizes.append(self._vocab - (0 if lost is None else len(lost)))
        return sizes

    def __repr__(self) -> str:
        return f"Kept({self.counts()} of {self._vocab} words)"


@dataclass(frozen=True)
class Sampled:
    """One token per row, (...) as the logits (..., V) have it.

    Attributes:
        token: the id, int64.
        log_prob: of the token in the distribution that it was drawn from, float64.
        raw_log_prob: of the token in softmax(logits), before any stage, float64.
        log_kept_mass: log of the mass that the kept words have in softmax(logits), float64.
        kept: per row the ids that could have been drawn, ascending.
        state: what the next call needs to be given (mirostat), or None.
    """

    token: Tensor
    log_prob: Tensor
    raw_log_prob: Tensor
    log_kept_mass: Tensor
    kept: Kept
    state: Tensor | None = None
