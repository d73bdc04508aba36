"""Score windows of texts on several processes ("ranks") that `torchrun` started.

Rank 0 reads the texts, distributes their windows, and collects the scored tokens in order, the
same as with one process. The others wait for windows, in `serve`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch.distributed as dist

from lmhead.analysis.score import ScoredToken, Window, score_window
from lmhead.models import LanguageModel
from lmhead.parallel.process_ranks import Ranks

T = TypeVar("T")
_EACH = 4  # windows per rank and round: more of them balance better


class ScoreWorkers:
    """The other ranks, as seen by rank 0; use it in a `with` statement."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __enter__(self) -> ScoreWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception | SystemExit):
            self._broadcast(None)  # after Ctrl-C the others end by themselves

    def open(self, where: Any) -> None:
        """Make the other ranks open their copy of a model."""
        self._broadcast(("open", where))

    def spread(
        self, model: LanguageModel, windows: Iterable[tuple[T, Window | None]], top_k: int
    ) -> Iterator[tuple[T, list[ScoredToken]]]:
        """Yield the scored tokens of all windows, in order; see `score.score_windows`."""
        n = self._ranks.size
        rest = iter(windows)
        while group := list(islice(rest, _EACH * n)):
            scored: dict[int, list[ScoredToken]] = {}
            shares = _distribute([(i, w) for i, (_, w) in enumerate(group) if w is not None], n)
            self._broadcast(("score", top_k))
            with self._ranks.communication():
                dist.scatter_object_list([None], shares, src=0)
            try:
                scored |= _score(model, shares[0], top_k)
            finally:
                answers = _collect(self._ranks, None)
            for answer in answers[1:]:
                if isinstance(answer, Exception):
                    raise answer
                scored |= answer
            for i, (key, _) in enumerate(group):
                yield key, scored.get(i, [])

    def _broadcast(self, message: Any) -> None:
        if self._ranks.size > 1:
            with self._ranks.communication():
                dist.broadcast_object_list([message], src=0)


def serve(ranks: Ranks, open_model: Callable[[Any], LanguageModel]) -> None:
    """Score what rank 0 sends, with the model that it names, until it ends; for the other ranks."""
    model: LanguageModel | None = None
    problem: Exception | None = None
    while True:
        message: list[Any] = [None]
        with ranks.communication():
            dist.broadcast_object_list(message, src=0)
        if message[0] is None:
            return
        kind, argument = message[0]
        if kind == "open":
            try:
                model = open_model(argument)
            except Exception as error:  # sent to rank 0 with the first answer
                problem = error
            continue
        share: list[Any] = [None]
        with ranks.communication():
            dist.scatter_object_list(share, None, src=0)
        answer: Any = problem
        if model is not None:
            try:
                answer = _score(model, share[0], argument)
            except Exception as error:  # sent to rank 0
                answer = error
        _collect(ranks, answer)


def _score(
    model: LanguageModel, share: list[tuple[int, Window]], top_k: int
) -> dict[int, list[ScoredToken]]:
    return {i: list(score_window(model, window, top_k)) for i, window in share}


def _collect(ranks: Ranks, answer: Any) -> list[Any]:
    answers: list[Any] | None = [None] * ranks.size if ranks.first else None
    with ranks.communication():
        dist.gather_object(answer, answers, dst=0)
    return answers or []


def _distribute(windows: list[tuple[int, Window]], n: int) -> list[list[tuple[int, Window]]]:
    """Distribute windows, the longest first, each to the rank with the fewest tokens so far."""
    shares: list[list[tuple[int, Window]]] = [[] for _ in range(n)]
    loads = [0] * n
    for entry in sorted(windows, key=lambda w: -len(w[1].ids)):
        rank = loads.index(min(loads))
        shares[rank].append(entry)
        loads[rank] += len(entry[1].ids)
    return shares
