"""`compare_models`, `compare_samplers`: divergence of two next-token distributions on a text."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmhead import checks
from lmhead.analysis.same_vocabulary import check_same_tokenization, check_same_vocabulary
from lmhead.analysis.score import WINDOW, windows
from lmhead.analysis.token_text import Piece, finite, hidden_states, piece_of, pieces_of, stream_ids
from lmhead.lazy import LazyLogits
from lmhead.models import LanguageModel
from lmhead.sampling import Sampler

Pieces = str | Iterable[str]

_CONTEXT = 12  # tokens kept to show where a difference is


@dataclass(frozen=True)
class Difference:
    """A position of the text, and the predictions of both sides."""

    position: int  # index of the predicted token in the text, from 0
    before: tuple[Piece, ...]  # the last few tokens before it
    token: Piece  # the token of the text
    log_prob: tuple[float, float]  # of that token, for each side; -inf where a sampler removes it
    kl: float  # KL(a ‖ b) in nats
    # ½ Σ |a - b|; None for two models, since it would need all logits
    total_variation: float | None
    # the most probable token of each side, with its probability
    best: tuple[tuple[Piece, float], tuple[Piece, float]]

    def to_json(self) -> dict[str, Any]:
        """Return every attribute, `log_prob` and `best` per side; null for infinite values."""
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
    """Two distributions at every position of a text."""

    positions: int  # number of positions compared
    kl: float  # mean of KL(a ‖ b) in nats; inf where b removes a token that a keeps
    max_kl: float  # the largest
    total_variation: float | None  # mean of ½ Σ |a - b|, from 0 to 1; None for two models
    agreement: float  # share of positions where both have the same most probable token
    perplexity: tuple[float, float] | None  # of the text, for a and for b; None for samplers
    differences: tuple[Difference, ...]  # the positions that differ most, worst first

    def to_json(self) -> dict[str, Any]:
        """Return every attribute; null for what is infinite or was not measured."""
        return vars(self) | {
            "kl": finite(self.kl),
            "max_kl": finite(self.max_kl),
            "perplexity": None if self.perplexity is None else [*map(finite, self.perplexity)],
            "differences": [d.to_json() for d in self.differences],
        }


def compare_models(
    a: LanguageModel, b: LanguageModel, text: Pieces, *, window: int | None = None, worst: int = 5
) -> Comparison:
    """Measure how far two models' next-token distributions are apart along a text.

    Equivalent to: F.kl_div(log q, log p, log_target=True) per position, and argmax == argmax

    Args:
        a: a model.
        b: another model with the same vocabulary.
        text: the text, or an iterable of pieces of it.
        window: tokens per window, without overlap; None for 1024 or the models' context.
        worst: number of largest differences to keep.

    Raises:
        VocabularyMismatch: the models have different tokens.
    """
    return _last(stream_compare_models(a, b, text, window=window, worst=worst)).result()


@torch.no_grad()
def stream_compare_models(
    a: LanguageModel, b: LanguageModel, text: Pieces, *, window: int | None = None, worst: int = 5
) -> Iterator[RunningComparison]:
    """Yield the result of `compare_models` so far after each window: one object, which grows."""
    check_same_vocabulary(a, b)
    sums = RunningComparison(a, worst, samplers=False)
    for ids, new in _windows((a, b), text, window):
        p, q = (_logits(model, ids, new).double() for model in (a, b))
        targets = torch.tensor(ids[-new:])
        answers: Any = p.ask(top_k=1, logsumexp=True, log_prob=targets, kl_to=q)  # type: ignore[attr-defined]
        other: Any = q.ask(top_k=1, logsumexp=True, log_prob=targets)  # type: ignore[attr-defined]
        sums.add(ids, answers.kl.clamp(min=0.0), _predictions(answers), _predictions(other))
        yield sums


def compare_samplers(
    model: LanguageModel,
    a: Sampler,
    b: Sampler,
    text: Pieces,
    *,
    window: int | None = None,
    worst: int = 5,
) -> Comparison:
    """Measure how far apart the distributions are that two samplers draw from, along a text.

    Equivalent to: KL and total variation of softmax(a.process(logits)) and softmax(b.process(...))

    Other arguments are those of `compare_models`.
    """
    return _last(stream_compare_samplers(model, a, b, text, window=window, worst=worst)).result()


@torch.no_grad()
def stream_compare_samplers(
    model: LanguageModel,
    a: Sampler,
    b: Sampler,
    text: Pieces,
    *,
    window: int | None = None,
    worst: int = 5,
) -> Iterator[RunningComparison]:
    """Yield the result of `compare_samplers` so far after each position: one object."""
    sums = RunningComparison(model, worst, samplers=True)
    for ids, new in _windows((model,), text, window):
        rows = _logits(model, ids, new).scores()
        for row in range(new):
            part = ids[: len(ids) - new + row + 1]
            z = rows.select(slice(row, row + 1)).row_logits().double()
            p, q = (_processed(sampler, z, part[:-1]) for sampler in (a, b))
            kl = torch.special.xlogy(p, p) - torch.special.xlogy(p, q)
            sides = [_Side(s.argmax(-1), s.max(-1).values, s[:, part[-1]].log()) for s in (p, q)]
            variation = (p - q).abs().sum(-1) / 2
            sums.add(part, kl.nansum(-1).clamp(min=0.0), sides[0], sides[1], variation)
            yield sums


def _last(steps: Iterator[RunningComparison]) -> RunningComparison:
    return deque(steps, maxlen=1).pop()


def _logits(model: LanguageModel, ids: list[int], new: int) -> LazyLogits:
    """Return the logits that predict the last `new` of ids."""
    logits: LazyLogits = model.head(hidden_states(model, ids[:-1])[-new:])
    return logits


def _windows(
    models: tuple[LanguageModel, ...], text: Pieces, window: int | None
) -> Iterator[tuple[list[int], int]]:
    max_length = min((m.max_length for m in models if m.max_length is not None), default=None)
    window = min(WINDOW, max_length or WINDOW) if window is None else window
    checks.check_integer("window", window, low=1, high=max_length)
    portions = stream_ids(models[0], [text] if isinstance(text, str) else text)
    if len(models) > 1:
        portions = check_same_tokenization(models[1], portions)
    empty = True
    for ids, new in windows(portions, window, window):
        empty = False
        yield ids, new
    if empty:
        raise ValueError("text must have at least two tokens; the first one is not predicted")


def _processed(sampler: Sampler, z: Tensor, context: list[int]) -> Tensor:
    """Return the probabilities that a sampler draws from, (1, V)."""
    if sampler.is_greedy:
        token = sampler(z, [context]).token
        return torch.nn.functional.one_hot(token, z.shape[-1]).double()
    return sampler.process(z, [context]).softmax(-1)


class _Side(NamedTuple):
    """Predictions of one side at N positions."""

    best: Tensor  # (N,), ids
    best_p: Tensor  # (N,)
    log_prob: Tensor  # (N,), of the text's tokens


def _predictions(answers: Any) -> _Side:
    values, ids = answers.top_k
    return _Side(ids[:, 0], (values[:, 0] - answers.logsumexp).exp(), answers.log_prob)


class RunningComparison:
    """Sums over the positions so far, and the worst of them."""

    def __init__(self, model: LanguageModel, worst: int, *, samplers: bool) -> None:
        checks.check_integer("worst", worst, low=0)
        self.model, self.worst, self.samplers = model, worst, samplers
        self.positions, self.agreed, self.kl, self.max_kl = 0, 0, 0.0, 0.0
        self.variation = 0.0
        self.log_probs = [0.0, 0.0]
        self._worst: list[tuple[float, int, Difference]] = []

    def add(
        self, ids: list[int], kl: Tensor, a: _Side, b: _Side, variation: Tensor | None = None
    ) -> None:
        """Add the last N of ids: divergence (N,), both predictions, total variation (N,)."""
        values = kl.double().tolist()
        variations = [None] * len(values) if variation is None else variation.double().tolist()
        self.agreed += int((a.best == b.best).sum())
        self.kl += math.fsum(values)
        self.max_kl = max(self.max_kl, *values)
        self.variation += math.fsum(v for v in variations if v is not None)
        for side, predictions in enumerate((a, b)):
            self.log_probs[side] += float(predictions.log_prob.double().sum())
        for i, value in enumerate(values):
            full = len(self._worst) >= self.worst
            if self.worst and not (full and value <= self._worst[0][0]):
                index = len(ids) - len(values) + i
                best = [
                    (piece_of(self.model, int(s.best[i]), ids[index - 1]), float(s.best_p[i]))
                    for s in (a, b)
                ]
                start = max(0, index - _CONTEXT)
                context = pieces_of(self.model, ids[start:index], ids[start - 1] if start else None)
                difference = Difference(
                    position=self.positions + i + 1,
                    before=tuple(context),
                    token=piece_of(self.model, ids[index], ids[index - 1]),
                    log_prob=(float(a.log_prob[i]), float(b.log_prob[i])),
                    kl=value,
                    total_variation=variations[i],
                    best=(best[0], best[1]),
                )
                push = heapq.heapreplace if full else heapq.heappush
                push(self._worst, (value, -difference.position, difference))
        self.positions += len(values)

    def result(self) -> Comparison:
        """Return the means; total variation for samplers only, perplexity for models only."""
        n = self.positions
        a, b = (math.exp(min(-x / n, 700.0)) for x in self.log_probs)
        return Comparison(
            positions=n,
            kl=self.kl / n,
            max_kl=self.max_kl,
            total_variation=self.variation / n if self.samplers else None,
            agreement=self.agreed / n,
            perplexity=None if self.samplers else (a, b),
            differences=tuple(d for _, _, d in sorted(self._worst, reverse=True)),
        )
