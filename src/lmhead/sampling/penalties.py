"""Edits by what has been said: penalties for repetition. `lmhead.reference` has the definitions.

Which ids count differs between programs: all of the context, the output alone, or the last n of
the context. Padding never counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from lmhead.sampling.stage import Call, Edit, PerRow, per_row

Counted = Literal["context", "output"]


def _counted(call: Call, counted: Counted, last_n: int | None) -> Iterator[tuple[int, ...]]:
    """Per row the ids that count."""
    for ids in call.context.ids if counted == "context" else call.context.outputs:
        yield ids if last_n is None else ids[max(0, len(ids) - last_n) :]


class _LooksBack(Edit):
    """An edit of words that came before."""

    def touches(self, call: Call) -> Sequence[Sequence[int]]:
        """The words of the context."""
        return [sorted(set(ids)) for ids in call.context.ids]


class RepetitionPenalty(_LooksBack):
    """Logits of words that came before: divided by the penalty if positive, times it if not."""

    name = "repetition_penalty"

    def __init__(
        self, penalty: PerRow, *, counted: Counted = "context", last_n: int | None = None
    ) -> None:
        self.penalty, self.counted, self.last_n = penalty, counted, last_n

    def edit(self, z: Tensor, call: Call) -> None:
        """Once per word, however often it came."""
        penalties = per_row(self.name, self.penalty, call).tolist()
        for row, ids in enumerate(_counted(call, self.counted, self.last_n)):
            if ids:
                words = torch.tensor(sorted(set(ids)), device=z.device)
                some = z[row, words]
                z[row, words] = torch.where(some > 0, some / penalties[row], some * penalties[row])


class CountPenalty(_LooksBack):
    """Z - count · frequency_penalty - (count > 0) · presence_penalty."""

    name = "frequency_penalty"

    def __init__(
        self,
        frequency: PerRow = 0.0,
        presence: PerRow = 0.0,
        *,
        counted: Counted = "output",
        last_n: int | None = None,
    ) -> None:
        self.frequency, self.presence = frequency, presence
        self.counted, self.last_n = counted, last_n

    def edit(self, z: Tensor, call: Call) -> None:
        """By how often a word came."""
        frequency = per_row(self.name, self.frequency, call).tolist()
        presence = per_row("presence_penalty", self.presence, call).tolist()
        for row, ids in enumerate(_counted(call, self.counted, self.last_n)):
            if ids:
                counts = Counter(ids)
                words = torch.tensor(list(counts), device=z.device)
                times = torch.tensor(list(counts.values()), dtype=z.dtype, device=z.device)
                z[row, words] -= times * frequency[row] + presence[row]


class NoRepeatNGram(_LooksBack):
    """No n-gram twice: words that would complete one that is there already are masked."""

    name = "no_repeat_ngram_size"

    def __init__(self, size: int) -> None:
        self.size = size

    def edit(self, z: Tensor, call: Call) -> None:
        """By the last n - 1 ids."""
        n = self.size
        for row, ids in enumerate(call.context.ids):
            if len(ids) < n:
                continue
            end = ids[len(ids) - n + 1 :]
            starts = range(len(ids) - n + 1)
            banned = {ids[i + n - 1] for i in starts if ids[i : i + n - 1] == end}
            z[row, sorted(banned)] = -math.inf


class DRY(_LooksBack):
    """Don't repeat yourself: a word that would prolong a repetition of L >= allowed_length ids
    loses multiplier · base^(L - allowed_length).

    A repetition does not reach across a sequence breaker: an id, or a tuple of ids. A word that is
    a breaker by itself loses nothing.
    """

    name = "dry_multiplier"

    def __init__(
        self,
        multiplier: PerRow,
        base: float = 1.75,
        allowed_length: int = 2,
        *,
        last_n: int | None = None,
        breakers: Sequence[int | Sequence[int]] = (),
    ) -> None:
        self.multiplier, self.base, self.allowed_length = multiplier, base, allowed_length
        self.last_n = last_n
        self.breakers = [(b,) if isinstance(b, int) else tuple(b) for b in breakers]

    def edit(self, z: Tensor, call: Call) -> None:
        """By the longest repetition that each word would prolong."""
        multiplier = per_row(self.name, self.multiplier, call).tolist()
        # Where base^exponent would leave float32.
        most = int(88.7228391 / math.log(self.base)) if self.base > 1.000001 else math.inf
        for row, ids in enumerate(_counted(call, "context", self.last_n)):
            for word, length in self._repetitions(ids).items():
                if (word,) in self.breakers:
                    continue
                exponent = min(length - self.allowed_length, most)
                z[row, word] -= multiplier[row] * self.base**exponent

    def _repetitions(self, ids: tuple[int, ...]) -> dict[int, int]:
        """Per word, the length of the longest repetition that it would prolong."""
        limit = self._since_breaker(ids)
        if limit < self.allowed_length:
            return {}
        back = ids[::-1]
        longest: dict[int, int] = {}
        for at, length in enumerate(_matches_with_start(back)):
            length = min(length, limit)
            if at > 0 and length >= self.allowed_length:
                word = back[at - 1]
                longest[word] = max(longest.get(word, 0), length)
        return longest

    def _since_breaker(self, ids: tuple[int, ...]) -> int:
        """How many ids came after the breaker that starts last; the longest, if several do."""
        for start in reversed(range(len(ids))):
            here = [len(b) for b in self.breakers if ids[start : start + len(b)] == b]
            if here:
                return len(ids) - start - max(here)
        return len(ids)


def _matches_with_start(ids: tuple[int, ...]) -> list[int]:
    """For each place, how many ids from there on equal those from the start on (Z-function).

    >>> _matches_with_start((1, 2, 1, 2, 3))
    [5, 0, 2, 0, 0]
    """
    n = len(ids)
    z = [0] * n
    if n:
        z[0] = n
    left = right = 0
    for i in range(1, n):
        if i < right:
            z[i] = min(right - i, z[i - left])
        while i + z[i] < n and ids[z[i]] == ids[i + z[i]]:
            z[i] += 1
        if i + z[i] > right:
            left, right = i, i + z[i]
    return z
