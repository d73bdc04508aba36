"""`compare_models`, `compare_samplers`: how far apart two next-word distributions are, on a text.

In:  two models with one vocabulary, or one model and two samplers; a text.
Out: `Comparison`: divergence, agreement, and the places where they differ most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lmhead import checks
from lmhead.analysis.comparison import Comparison, Difference, Side, Tally
from lmhead.analysis.reading import read_hidden, stream_ids
from lmhead.analysis.same_words import DifferentWords, check_same_words, checked_cut
from lmhead.analysis.score import WINDOW, windows
from lmhead.logits import LazyLogits
from lmhead.models import LanguageModel
from lmhead.sampling import Sampler
from lmhead.sweep import whole_row

__all__ = [
    "Comparison",
    "Difference",
    "DifferentWords",
    "check_same_words",
    "compare_models",
    "compare_samplers",
]


@torch.no_grad()
def compare_models(
    a: LanguageModel,
    b: LanguageModel,
    text: str | Iterable[str],
    *,
    window: int | None = None,
    worst: int = 5,
    between: Callable[[], object] | None = None,
) -> Comparison:
    """How far two models' next-word distributions are apart along a text.

    Equivalent to: F.kl_div(log q, log p, log_target=True) per position, and argmax == argmax

    Args:
        a: a model.
        b: another one, with the same vocabulary.
        text: the text, or an iterable of pieces of it.
        window: how many tokens are read at once, without overlap; None for 1024, or less.
        worst: how many of the greatest differences to keep.
        between: called before each model reads a window; what it raises ends the work.

    Raises:
        DifferentWords: the models cut text into different tokens: there is nothing to compare.
    """
    check_same_words(a, b)
    tally, look = Tally(a, worst), between or _go_on
    for ids, fresh in _windows((a, b), text, window):
        p, q = (_head_on(model, ids, fresh, look).double() for model in (a, b))
        targets = torch.tensor(ids[-fresh:])
        answers = p.ask(top_k=1, logsumexp=True, log_prob=targets, kl_to=q)
        theirs = q.ask(top_k=1, logsumexp=True, log_prob=targets)
        assert answers.kl is not None
        tally.add(ids, answers.kl.clamp(min=0.0), _side(answers), _side(theirs))
    return tally.result(samplers=False)


@torch.no_grad()
def compare_samplers(
    model: LanguageModel,
    a: Sampler,
    b: Sampler,
    text: str | Iterable[str],
    *,
    window: int | None = None,
    worst: int = 5,
    between: Callable[[], object] | None = None,
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
        between: called before each position is looked at; what it raises ends the work.
    """
    tally, look = Tally(model, worst), between or _go_on
    for ids, fresh in _windows((model,), text, window):
        source = _head_on(model, ids, fresh, look).source()
        for row in range(fresh):
            look()
            part = ids[: len(ids) - fresh + row + 1]
            z = whole_row(source, row).double()[None]
            p, q = (_processed(sampler, z, part[:-1]) for sampler in (a, b))
            kl = torch.special.xlogy(p, p) - torch.special.xlogy(p, q)
            sides = [Side(s.argmax(-1), s.max(-1).values, s[:, part[-1]].log()) for s in (p, q)]
            variation = (p - q).abs().sum(-1) / 2
            tally.add(part, kl.nansum(-1).clamp(min=0.0), sides[0], sides[1], variation)
    return tally.result(samplers=True)


def _go_on() -> None:
    """Nobody watches."""


def _head_on(
    model: LanguageModel, ids: list[int], fresh: int, look: Callable[[], object]
) -> LazyLogits:
    """What a model expects at the last `fresh` of ids."""
    look()
    logits: LazyLogits = model.head(read_hidden(model, ids[:-1])[-fresh:])
    return logits


def _windows(
    models: tuple[LanguageModel, ...], text: str | Iterable[str], window: int | None
) -> Iterator[tuple[list[int], int]]:
    most = min((m.max_length for m in models if m.max_length is not None), default=None)
    window = min(WINDOW, most or WINDOW) if window is None else window
    checks.check_whole("window", window, low=1, high=most)
    pieces = [text] if isinstance(text, str) else text
    portions: Iterator[list[int]] = stream_ids(models[0], pieces)
    if len(models) > 1:
        portions = checked_cut(models[1], portions)
    empty = True
    for ids, fresh in windows(portions, window, window):
        empty = False
        yield ids, fresh
    if empty:
        raise ValueError(
            "text must have at least two tokens, to compare what comes behind the first"
        )


def _side(answers: Any) -> Side:
    values, ids = answers.top_k
    return Side(ids[:, 0], (values[:, 0] - answers.logsumexp).exp(), answers.log_prob)


def _processed(sampler: Sampler, z: Tensor, context: list[int]) -> Tensor:
    """The probabilities that a sampler draws from, (1, V)."""
    if sampler.is_greedy:
        token = sampler(z, [context]).token
        return torch.nn.functional.one_hot(token, z.shape[-1]).double()
    return sampler.process(z, [context]).softmax(-1)
