"""What a comparison finds: `Difference` at one place of a text, `Comparison` of the whole.

In:  divergences and best words, portion by portion, into a `Tally`.
Out: sums, and the places where both sides are furthest apart.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lmhead import checks
from lmhead.analysis.tokens import Piece, finite, piece_of
from lmhead.models import LanguageModel

_CONTEXT = 12  # tokens that are kept to show where a difference is


@dataclass(frozen=True)
class Difference:
    """A place in the text, and what both sides expect there.

    Attributes:
        position: the number of the token that comes next.
        before: the tokens before it, the last few.
        token: what the text has there.
        log_prob: of that token, for each side; -inf where a sampler rules it out.
        kl: KL(a ‖ b) in nats.
        total_variation: ½ Σ |a - b|; None for two models, whose logits it would take.
        best: the most probable word of each side, with its probability.
    """

    position: int
    before: tuple[Piece, ...]
    token: Piece
    log_prob: tuple[float, float]
    kl: float
    total_variation: float | None
    best: tuple[tuple[Piece, float], tuple[Piece, float]]

    def to_json(self) -> dict[str, Any]:
        """Every attribute, `log_prob` and `best` for each side; null for what is infinite."""
        a, b = ({**piece.to_json(), "p": p} for piece, p in self.best)
        return {
            "position": self.position,
            "before": [piece.to_json() for piece in self.before],
            "token": self.token.to_json(),
            "log_prob_a": finite(self.log_prob[0]),
            "log_prob_b": finite(self.log_prob[1]),
            "kl": finite(self.kl),
            "total_variation": self.total_variation,
            "best_a": a,
            "best_b": b,
        }


@dataclass(frozen=True)
class Comparison:
    """Two distributions at every position of a text.

    Attributes:
        positions: how many were compared.
        kl: the mean of KL(a ‖ b) in nats; inf where b rules out a word of a's.
        max_kl: the largest.
        total_variation: the mean of ½ Σ |a - b|, from 0 to 1; None for two models, whose logits it
            would take.
        agreement: how often both hold the same word most probable.
        perplexity: of the text, for a and for b; None for samplers.
        differences: where they are furthest apart, worst first.
    """

    positions: int
    kl: float
    max_kl: float
    total_variation: float | None
    agreement: float
    perplexity: tuple[float, float] | None
    differences: tuple[Difference, ...]

    def to_json(self) -> dict[str, Any]:
        """Every attribute; null for what is infinite, or was not measured."""
        perplexity = None if self.perplexity is None else [finite(p) for p in self.perplexity]
        return {
            "positions": self.positions,
            "kl": finite(self.kl),
            "max_kl": finite(self.max_kl),
            "total_variation": self.total_variation,
            "agreement": self.agreement,
            "perplexity": perplexity,
            "differences": [d.to_json() for d in self.differences],
        }


class Side(NamedTuple):
    """What one of two expects at N positions: the best word, its probability, the text's word."""

    best: Tensor  # (N,), ids
    best_p: Tensor  # (N,)
    log_prob: Tensor  # (N,), of what the text has


class Tally:
    """Sums over positions, and the worst of them."""

    def __init__(self, model: LanguageModel, worst: int) -> None:
        checks.check_whole("worst", worst, low=0)
        self.model, self.worst = model, worst
        self.positions, self.agreed, self.kl, self.max_kl = 0, 0, 0.0, 0.0
        self.variation = 0.0
        self.log_probs = [0.0, 0.0]
        self._worst: list[tuple[float, int, Difference]] = []

    def add(
        self, ids: list[int], kl: Tensor, a: Side, b: Side, variation: Tensor | None = None
    ) -> None:
        """The last N of ids: divergence (N,), what each side expects, total variation (N,)."""
        values = kl.double().tolist()
        varied = [None] * len(values) if variation is None else variation.double().tolist()
        self.agreed += int((a.best == b.best).sum())
        self.kl += math.fsum(values)
        self.max_kl = max(self.max_kl, *values)
        self.variation += math.fsum(v for v in varied if v is not None)
        for side, found in enumerate((a, b)):
            self.log_probs[side] += float(found.log_prob.double().sum())
        for i, value in enumerate(values):
            full = len(self._worst) >= self.worst
            if self.worst and not (full and value <= self._worst[0][0]):
                at = len(ids) - len(values) + i
                place = self._difference(ids, at, self.positions + i + 1, i, a, b, value, varied[i])
                push = heapq.heapreplace if full else heapq.heappush
                push(self._worst, (value, -place.position, place))
        self.positions += len(values)

    def _difference(
        self,
        ids: list[int],
        at: int,
        position: int,
        i: int,
        a: Side,
        b: Side,
        kl: float,
        variation: float | None,
    ) -> Difference:
        start = max(0, at - _CONTEXT)
        before = tuple(
            piece_of(self.model, ids[j], ids[j - 1] if j else None) for j in range(start, at)
        )
        best = [
            (piece_of(self.model, int(s.best[i]), ids[at - 1]), float(s.best_p[i])) for s in (a, b)
        ]
        return Difference(
            position=position,
            before=before,
            token=piece_of(self.model, ids[at], ids[at - 1]),
            log_prob=(float(a.log_prob[i]), float(b.log_prob[i])),
            kl=kl,
            total_variation=variation,
            best=(best[0], best[1]),
        )

    def result(self, *, samplers: bool) -> Comparison:
        """Means; what is told of samplers alone, or of models alone, is None for the others."""
        n = self.positions
        a, b = (math.exp(min(-x / n, 700.0)) for x in self.log_probs)
        return Comparison(
            positions=n,
            kl=self.kl / n,
            max_kl=self.max_kl,
            total_variation=self.variation / n if samplers else None,
            agreement=self.agreed / n,
            perplexity=None if samplers else (a, b),
            differences=tuple(d for _, _, d in sorted(self._worst, reverse=True)),
        )
