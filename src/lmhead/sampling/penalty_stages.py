"""Penalties for repetition, by the tokens so far. `lmhead.reference` has the definitions.

Which ids count differs between programs: all of the context, the output alone, or the last n of
the context. Padding never counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lmhead.sampling.stage import Call, Edit, PerRow, per_row

Counted = Literal["context", "output"]


def _counted(call: Call, counted: Counted, last_n: int | None) -> Iterator[tuple[int, ...]]:
    """Yield, per row, the ids that count."""
    for ids in call.context.ids if counted == "context" else call.context.outputs:
        yield ids if last_n is None else ids[max(0, len(ids) - last_n) :]


class _ContextEdit(Edit):
    """An edit of tokens of the context."""

    def touches(self, call: Call) -> Sequence[Sequence[int]]:
        """Return the tokens of the context."""
        return [sorted(set(ids)) for ids in call.context.ids]


@dataclass(repr=False, eq=False)
class RepetitionPenalty(_ContextEdit):
    """Divide positive logits of tokens of the context by the penalty, multiply negative ones."""

    name = "repetition_penalty"
    penalty: PerRow
    counted: Counted = field(default="context", kw_only=True)
    last_n: int | None = field(default=None, kw_only=True)

    def edit(self, z: Tensor, call: Call) -> None:
        """Penalize each token once, regardless of its number of occurrences."""
        penalties = per_row(self.name, self.penalty, call).tolist()
        for row, ids in enumerate(_counted(call, self.counted, self.last_n)):
            if ids:
                tokens = torch.tensor(sorted(set(ids)), device=z.device)
                old = z[row, tokens]
                z[row, tokens] = torch.where(old > 0, old / penalties[row], old * penalties[row])


@dataclass(repr=False, eq=False)
class CountPenalty(_ContextEdit):
    """Subtract count · frequency_penalty + (count > 0) · presence_penalty."""

    name = "frequency_penalty"
    frequency: PerRow = 0.0
    presence: PerRow = 0.0
    counted: Counted = field(default="output", kw_only=True)
    last_n: int | None = field(default=None, kw_only=True)

    def edit(self, z: Tensor, call: Call) -> None:
        """Penalize each token by its number of occurrences."""
        frequency = per_row(self.name, self.frequency, call).tolist()
        presence = per_row("presence_penalty", self.presence, call).tolist()
        for row, ids in enumerate(_counted(call, self.counted, self.last_n)):
            if ids:
                counts = Counter(ids)
                tokens = torch.tensor(list(counts), device=z.device)
                times = torch.tensor(list(counts.values()), dtype=z.dtype, device=z.device)
                z[row, tokens] -= times * frequency[row] + presence[row]


@dataclass(repr=False, eq=False)
class NoRepeatNGram(_ContextEdit):
    """Mask tokens that would complete an n-gram of the context."""

    name = "no_repeat_ngram_size"
    size: int

    def edit(self, z: Tensor, call: Call) -> None:
        """Mask the tokens that would repeat an n-gram."""
        n = self.size
        for row, ids in enumerate(call.context.ids):
            if len(ids) < n:
                continue
            end = ids[len(ids) - n + 1 :]
            starts = range(len(ids) - n + 1)
            banned = {ids[i + n - 1] for i in starts if ids[i : i + n - 1] == end}
            z[row, sorted(banned)] = -math.inf


@dataclass(repr=False, eq=False)
class DRY(_ContextEdit):
    """Don't repeat yourself: lower a token that would extend a repetition of L ids by
    multiplier · base^(L - allowed_length), if L >= allowed_length.

    A repetition does not extend across a sequence breaker: an id, or a tuple of ids. A token that
    is a breaker by itself is not lowered.
    """

    name = "dry_multiplier"
    multiplier: PerRow
    base: float = 1.75
    allowed_length: int = 2
    last_n: int | None = field(default=None, kw_only=True)
    breakers: Sequence[int | Sequence[int]] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        self._breakers = [(b,) if isinstance(b, int) else tuple(b) for b in self.breakers]

    def edit(self, z: Tensor, call: Call) -> None:
        """Penalize each token by the longest repetition that it would extend."""
        multiplier = per_row(self.name, self.multiplier, call).tolist()
        # The largest exponent for which base^exponent is finite in float32.
        max_exponent = int(88.7228391 / math.log(self.base)) if self.base > 1.000001 else math.inf
        for row, ids in enumerate(_counted(call, "context", self.last_n)):
            for token, length in self._repetitions(ids).items():
                if (token,) in self._breakers:
                    continue
                exponent = min(length - self.allowed_length, max_exponent)
                z[row, token] -= multiplier[row] * self.base**exponent

    def _repetitions(self, ids: tuple[int, ...]) -> dict[int, int]:
        """Return, per token, the length of the longest repetition that it would extend."""
        limit = self._since_breaker(ids)
        if limit < self.allowed_length:
            return {}
        reversed_ids = ids[::-1]
        longest: dict[int, int] = {}
        for index, length in enumerate(_matches_with_start(reversed_ids)):
            length = min(length, limit)
            if index > 0 and length >= self.allowed_length:
                token = reversed_ids[index - 1]
                longest[token] = max(longest.get(token, 0), length)
        return longest

    def _since_breaker(self, ids: tuple[int, ...]) -> int:
        """Return the number of ids after the last breaker (the longest, if several start there)."""
        for start in reversed(range(len(ids))):
            lengths = [len(b) for b in self._breakers if ids[start : start + len(b)] == b]
            if lengths:
                return len(ids) - start - max(lengths)
        return len(ids)


def _matches_with_start(ids: tuple[int, ...]) -> list[int]:
    """Return for each position how many ids from there on equal those from the start (Z-function).

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
