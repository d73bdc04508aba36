"""`ScreenedScores`: the same decisions as the swept scores, from a quantized copy, with proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from lmhead.scores import TopRows
from lmhead.sweep import Source, SweptScores


class Screen(Protocol):
    """What decides the largest logits without reading all of the weight."""

    def decide(self, source: Source, k: int) -> tuple[Tensor, Tensor] | None:
        """Return values (N, k) in float64 and ids (N, k), as a sweep would; None if it cannot."""
        ...

    def compatible_source(self, source: Source) -> Source | None:
        """Return the source as the copy reads it; None if the copy does not belong to it."""
        ...


@dataclass(frozen=True)
class ScreenedScores(SweptScores):
    """Rows of a linear layer with a quantized copy of its weight."""

    screen: Screen | None = None

    # With at most this share of the vocabulary allowed, their rows of the weight are read faster
    # than their rows of the copy.
    fewest_screened: ClassVar[float] = 0.05

    @property
    def reads_copy(self) -> bool:
        """Whether decisions are made from the copy."""
        few = self.allowed is not None and (
            len(self.allowed) <= self.fewest_screened * self.vocab_size
        )
        return self.screen is not None and not few

    def top(self, k: int, *, lse: bool = True) -> TopRows:
        """Return the k largest logits from the copy, where it can decide them."""
        if not lse and self.screen is not None and self.reads_copy and 0 < k <= self.vocab_size:
            decided = self.screen.decide(self.source, k)
            if decided is not None:
                return TopRows(*decided, None)
        return super().top(k, lse=lse)
