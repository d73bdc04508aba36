"""`score`: how well a model expects a text, token by token, in bounded memory.

In:  a model, and a text of any length, whole or in pieces.
Out: `Score`; each `ScoredToken` as it comes, for those who want them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lmhead import checks
from lmhead.analysis.reading import read_hidden, stream_ids
from lmhead.analysis.tokens import Piece, Token, finite, piece_of
from lmhead.models import LanguageModel

WINDOW = 1024  # tokens that are read at once, if the model can see as many


@dataclass(frozen=True)
class ScoredToken:
    """A token of a text, and what the model thought of it before it came.

    Attributes:
        position: its number in the text, from 0.
        token: its figures.
        entropy: of the distribution that it came from, in nats.
    """

    position: int
    token: Token
    entropy: float

    @property
    def bits(self) -> float:
        """How surprising it was."""
        return -self.token.log_prob / math.log(2)

    def to_json(self) -> dict[str, Any]:
        """The token with `position`, `entropy` and `bits`."""
        more = {"position": self.position, "entropy": self.entropy, "bits": finite(self.bits)}
        return {**self.token.to_json(), **more}


@dataclass
class Score:
    """What a text comes to. The figures count the tokens that were scored.

    Attributes:
        window: how many tokens the model saw at once.
        stride: how far apart windows begin.
        tokens: how many were scored: all but the first one, which nothing comes before.
        bytes: how many bytes of the text they make, in UTF-8.
        log_prob: of all of them together, in nats.
        entropy_sum: of all distributions, in nats.
        first_choices: how many were what the model held most likely.
        in_top_10: how many were among the ten most likely words.
    """

    window: int
    stride: int
    tokens: int = 0
    bytes: int = 0
    log_prob: float = 0.0
    entropy_sum: float = field(default=0.0, repr=False)
    first_choices: int = 0
    in_top_10: int = 0

    @property
    def perplexity(self) -> float:
        """exp(-log_prob / tokens); inf where a token had no probability."""
        mean = -self.log_prob / self.tokens
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """-log₂ p of the text, by its length in bytes: does not depend on the tokenizer."""
        return -self.log_prob / math.log(2) / self.bytes if self.bytes else math.inf

    @property
    def bits_per_token(self) -> float:
        """-log₂ p of the text, by its tokens."""
        return -self.log_prob / math.log(2) / self.tokens

    @property
    def entropy(self) -> float:
        """The mean entropy of the distributions, in nats: how unsure the model was."""
        return self.entropy_sum / self.tokens

    def to_json(self) -> dict[str, Any]:
        """Sums and means; null for what is infinite."""
        return {
            "perplexity": finite(self.perplexity),
            "bits_per_byte": finite(self.bits_per_byte),
            "bits_per_token": finite(self.bits_per_token),
            "log_prob": finite(self.log_prob),
            "scored_tokens": self.tokens,
            "scored_bytes": self.bytes,
            "entropy": self.entropy,
            "first_choices": self.first_choices / self.tokens,
            "in_top_10": self.in_top_10 / self.tokens,
            "window": self.window,
            "stride": self.stride,
        }


def score(
    model: LanguageModel,
    text: str | Iterable[str],
    *,
    window: int | None = None,
    stride: int | None = None,
    each: Callable[[ScoredToken], object] | None = None,
) -> Score:
    """The log-probability of a text under a model, with a sliding window.

    Equivalent to: -F.cross_entropy(logits, ids[1:], reduction="sum"), in windows

    The model reads the tokens [0, window), then [stride, stride + window), and so on. In each
    window only those predictions count that the one before did not have: every token but the first
    is scored once, from the second window on behind more than `window - stride` others. Each window
    asks the head once, for everything. Nothing of the text is kept: memory is that of one window,
    however long the text is.

    Args:
        model: any `LanguageModel` with a tokenizer.
        text: the text, or an iterable of pieces of it.
        window: how many tokens the model sees at once; None for 1024, or less if it can see less.
        stride: how far apart windows begin; None for half a window.
        each: called with every `ScoredToken`, in the order of the text.

    Raises:
        ValueError: fewer than two tokens, or a window that the model cannot see.
    """
    window = default_window(model) if window is None else window
    checks.check_whole("window", window, low=1, high=model.max_length)
    stride = max(1, window // 2) if stride is None else stride
    checks.check_whole("stride", stride, low=1, high=window)
    result = Score(window, stride)
    counted = _Counted([text] if isinstance(text, str) else text)
    first: Piece | None = None
    for ids, fresh in windows(stream_ids(model, counted), window, stride):
        if first is None:
            first = piece_of(model, ids[0])
        for scored in _score_window(model, ids, fresh, result.tokens + 1):
            _add(result, scored)
            if each is not None:
                each(scored)
    if first is None:
        raise ValueError(
            "text must have at least two tokens: the first one is not scored, since nothing comes "
            "before it"
        )
    result.bytes = counted.bytes - len(first.bytes)
    return result


def default_window(model: LanguageModel) -> int:
    """How many tokens a model sees at once where nobody says it."""
    return min(WINDOW, model.max_length or WINDOW)


def windows(
    portions: Iterable[list[int]], window: int, stride: int
) -> Iterator[tuple[list[int], int]]:
    """Cut a stream of ids: each entry has the ids of a window and one more, and how many are new.

    In a window `ids[:-1]` are read, and the last `fresh` of `ids` are scored.

    >>> list(windows([[1, 2, 3], [4, 5, 6, 7]], window=4, stride=2))
    [([1, 2, 3, 4, 5], 4), ([3, 4, 5, 6, 7], 2)]
    """
    held: list[int] = []
    seen = 1  # how many of those that are held need no score any more
    for portion in portions:
        held += portion
        while len(held) > window:
            yield held[: window + 1], window + 1 - seen
            held = held[stride:]
            seen = window + 1 - stride
    if len(held) > seen:
        yield held, len(held) - seen


@torch.no_grad()
def _score_window(
    model: LanguageModel, ids: list[int], fresh: int, position: int
) -> Iterator[ScoredToken]:
    hidden = read_hidden(model, ids[:-1])[-fresh:]
    targets = torch.tensor(ids[-fresh:])
    answers = (
        model.head(hidden)
        .double()
        .ask(log_prob=targets, rank=targets, entropy=True, logsumexp=True)
    )
    assert answers.log_prob is not None
    assert answers.logsumexp is not None
    assert answers.rank is not None
    assert answers.entropy is not None
    logits = answers.log_prob + answers.logsumexp
    figures = zip(
        *(t.tolist() for t in (answers.log_prob, logits, answers.rank, answers.entropy)),
        strict=True,
    )
    for i, (log_prob, logit, rank, entropy) in enumerate(figures):
        at = len(ids) - fresh + i
        piece = piece_of(model, ids[at], ids[at - 1])
        token = Token(piece, logit, log_prob, math.exp(log_prob), rank)
        yield ScoredToken(position + i, token, entropy)


def _add(result: Score, scored: ScoredToken) -> None:
    result.tokens += 1
    result.log_prob += scored.token.log_prob
    result.entropy_sum += scored.entropy
    result.first_choices += scored.token.rank == 0
    result.in_top_10 += 0 <= scored.token.rank < 10


class _Counted:
    """Pieces of text, and how many bytes went through."""

    def __init__(self, pieces: Iterable[str]) -> None:
        self._pieces, self.bytes = pieces, 0

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            self.bytes += len(piece.encode("utf-8"))
            yield piece
