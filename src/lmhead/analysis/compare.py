"""`compare_models`, `compare_samplers`: how far apart two next-word distributions are, on a text.

In:  two models with one vocabulary, or one model and two samplers; a text.
Out: `Comparison`: divergence, agreement, and the places where they differ most.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmhead import checks
from lmhead.analysis.reading import read_hidden, stream_ids
from lmhead.analysis.score import WINDOW, windows
from lmhead.analysis.tokens import Piece, finite, piece_of
from lmhead.models import LanguageModel
from lmhead.sampling import Sampler
from lmhead.sweep import whole_row

_CONTEXT = 12  # tokens that are kept to show where a difference is


@dataclass(frozen=True)
class Difference:
    """A place in the text, and what both sides expect there.

    Attributes:
        position: the number of the token that comes next.
        before: the tokens before it, the last few.
        kl: KL(a ‖ b) in nats.
        best: the most probable word of each side, with its probability.
    """

    position: int
    before: tuple[Piece, ...]
    kl: float
    best: tuple[tuple[Piece, float], tuple[Piece, float]]

    def to_json(self) -> dict[str, Any]:
        """`position`, `before`, `kl`, `best_a`, `best_b`."""
        a, b = ({**piece.to_json(), "p": p} for piece, p in self.best)
        return {
            "position": self.position,
            "before": [piece.to_json() for piece in self.before],
            "kl": finite(self.kl),
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


@torch.no_grad()
def compare_models(
    a: LanguageModel,
    b: LanguageModel,
    text: str | Iterable[str],
    *,
    window: int | None = None,
    worst: int = 5,
) -> Comparison:
    """How far two models' next-word distributions are apart along a text.

    Equivalent to: F.kl_div(log q, log p, log_target=True) per position, and argmax == argmax

    Args:
        a: a model.
        b: another one, with the same vocabulary.
        text: the text, or an iterable of pieces of it.
        window: how many tokens are read at once, without overlap; None for 1024, or less.
        worst: how many of the greatest differences to keep.

    Raises:
        ValueError: the models cut text into different tokens, so that there is nothing to compare.
    """
    check_same_words(a, b)
    tally = _Tally(a, worst)
    for ids, fresh in _windows((a, b), text, window):
        p, q = (model.head(read_hidden(model, ids[:-1])[-fresh:]).double() for model in (a, b))
        targets = torch.tensor(ids[-fresh:])
        answers = p.ask(top_k=1, logsumexp=True, log_prob=targets, kl_to=q)
        theirs = q.ask(top_k=1, logsumexp=True, log_prob=targets)
        assert answers.kl is not None
        tally.add(ids, fresh, answers.kl.clamp(min=0.0), _best(answers), _best(theirs))
        tally.add_log_probs(answers.log_prob, theirs.log_prob)
    return tally.result()


@torch.no_grad()
def compare_samplers(
    model: LanguageModel,
    a: Sampler,
    b: Sampler,
    text: str | Iterable[str],
    *,
    window: int | None = None,
    worst: int = 5,
) -> Comparison:
    """How far the distributions are apart that two samplers draw from, along a text.

    Equivalent to: KL and total variation of softmax(a.process(logits)) and softmax(b.process(...))

    Args:
        model: a model.
        a: a sampler.
        b: another one.
        text: the text, or an iterable of pieces of it.
        window: how many tokens are read at once, without overlap; None for 1024, or less.
        worst: how many of the greatest differences to keep.
    """
    tally = _Tally(model, worst)
    for ids, fresh in _windows((model,), text, window):
        source = model.head(read_hidden(model, ids[:-1])[-fresh:]).source()
        for row in range(fresh):
            z = whole_row(source, row).double()[None]
            seen = ids[: len(ids) - fresh + row]
            p, q = (_processed(sampler, z, seen) for sampler in (a, b))
            kl = torch.special.xlogy(p, p) - torch.special.xlogy(p, q)
            part = ids[: len(ids) - fresh + row + 1]
            best = [(side.argmax(-1), side.max(-1).values) for side in (p, q)]
            tally.add(part, 1, kl.nansum(-1).clamp(min=0.0), *best)
            tally.variation += float((p - q).abs().sum()) / 2
    return tally.result()


def check_same_words(a: LanguageModel, b: LanguageModel) -> None:
    """Refuse models whose tokens are not the same: probabilities of different words."""
    if a.tokenizer is None or b.tokenizer is None:
        raise ValueError("both models must have a tokenizer, to read a text")
    sizes = a.head.vocab_size, b.head.vocab_size
    why = "To compare probabilities, both must be about the same words."
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the models have different vocabularies, of {sizes[0]:,} and {sizes[1]:,} words. {why}"
        )
    for id in range(min(sizes[0], len(a.tokenizer), len(b.tokenizer))):
        says = a.tokenizer.token_bytes(id), b.tokenizer.token_bytes(id)
        if says[0] != says[1]:
            raise ValueError(
                f"the models have different vocabularies: token {id} is {says[0]!r} in one and "
                f"{says[1]!r} in the other. {why}"
            )


def _windows(
    models: tuple[LanguageModel, ...], text: str | Iterable[str], window: int | None
) -> Iterator[tuple[list[int], int]]:
    most = min((m.max_length for m in models if m.max_length is not None), default=None)
    window = min(WINDOW, most or WINDOW) if window is None else window
    checks.check_whole("window", window, low=1, high=most)
    pieces = [text] if isinstance(text, str) else text
    portions: Iterator[list[int]] = stream_ids(models[0], pieces)
    if len(models) > 1:
        portions = _checked(models[1], portions)
    empty = True
    for ids, fresh in windows(portions, window, window):
        empty = False
        yield ids, fresh
    if empty:
        raise ValueError(
            "text must have at least two tokens, to compare what comes behind the first"
        )


def _checked(other: LanguageModel, portions: Iterator[list[int]]) -> Iterator[list[int]]:
    """See that another tokenizer cuts the beginning of the text in the same way.

    With the same words in the same order, what else may differ is how they are put together, and
    marks at the beginning: the first portion shows it.
    """
    first = next(portions, [])
    assert other.tokenizer is not None
    text = other.tokenizer.decode(first[:256])
    again = other.tokenizer.encode(text)
    for place, (one, two) in enumerate(zip(first[:200], again, strict=False)):
        if one != two:
            raise ValueError(
                f"the models cut text differently: token {place} is {one} in one and {two} in the "
                "other. To compare probabilities, both must be about the same words."
            )
    yield first
    yield from portions


def _best(answers: Any) -> tuple[Tensor, Tensor]:
    """The most probable words (N,) and their probabilities (N,)."""
    values, ids = answers.top_k
    return ids[:, 0], (values[:, 0] - answers.logsumexp).exp()


def _processed(sampler: Sampler, z: Tensor, context: list[int]) -> Tensor:
    """The probabilities that a sampler draws from, (1, V)."""
    if sampler.is_greedy:
        token = sampler(z, [context]).token
        return torch.nn.functional.one_hot(token, z.shape[-1]).double()
    return sampler.process(z, [context]).softmax(-1)


class _Tally:
    """Sums over positions, and the worst of them."""

    def __init__(self, model: LanguageModel, worst: int) -> None:
        checks.check_whole("worst", worst, low=0)
        self.model, self.worst = model, worst
        self.positions, self.agreed, self.kl, self.max_kl = 0, 0, 0.0, 0.0
        self.variation = 0.0
        self.log_probs: list[float] = [0.0, 0.0]
        self._worst: list[tuple[float, int, Difference]] = []

    def add(
        self,
        ids: list[int],
        fresh: int,
        kl: Tensor,
        a: tuple[Tensor, Tensor],
        b: tuple[Tensor, Tensor],
    ) -> None:
        """The last `fresh` of ids: divergence (N,), best word and its probability of each side."""
        self.agreed += int((a[0] == b[0]).sum())
        values = kl.double().tolist()
        self.kl += math.fsum(values)
        self.max_kl = max(self.max_kl, *values)
        for i, value in enumerate(values):
            full = len(self._worst) >= self.worst
            if self.worst and not (full and value <= self._worst[0][0]):
                at = len(ids) - fresh + i
                place = self._difference(ids, at, self.positions + i + 1, value, a, b, i)
                push = heapq.heapreplace if full else heapq.heappush
                push(self._worst, (value, -place.position, place))
        self.positions += fresh

    def add_log_probs(self, a: Tensor | None, b: Tensor | None) -> None:
        for side, log_probs in enumerate((a, b)):
            assert log_probs is not None
            self.log_probs[side] += float(log_probs.double().sum())

    def _difference(
        self,
        ids: list[int],
        at: int,
        position: int,
        kl: float,
        a: tuple[Tensor, Tensor],
        b: tuple[Tensor, Tensor],
        i: int,
    ) -> Difference:
        start = max(0, at - _CONTEXT)
        before = tuple(
            piece_of(self.model, ids[j], ids[j - 1] if j else None) for j in range(start, at)
        )
        best = [(piece_of(self.model, int(s[0][i]), ids[at - 1]), float(s[1][i])) for s in (a, b)]
        return Difference(position, before, kl, (best[0], best[1]))

    def result(self) -> Comparison:
        n = self.positions
        models = any(self.log_probs)
        perplexities = [math.exp(min(-x / n, 700.0)) for x in self.log_probs]
        return Comparison(
            positions=n,
            kl=self.kl / n,
            max_kl=self.max_kl,
            total_variation=None if models else self.variation / n,
            agreement=self.agreed / n,
            perplexity=(perplexities[0], perplexities[1]) if models else None,
            differences=tuple(d for _, _, d in sorted(self._worst, reverse=True)),
        )
