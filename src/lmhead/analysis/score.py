"""`score`: log-probability, rank and entropy of every token of a text, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from lmhead import checks
from lmhead.analysis.token_text import (
    Piece,
    Token,
    finite,
    hidden_states,
    piece_of,
    stream_ids,
    top_log_probs,
)
from lmhead.html_table import html_table
from lmhead.models import LanguageModel

T = TypeVar("T")
WINDOW = 1024  # default tokens per window, if the model's context allows


class TextTooShort(ValueError):  # noqa: N818
    """A text of fewer than two tokens: there is nothing to score."""


@dataclass(frozen=True)
class ScoredToken:
    """A token of a text and how well the model predicted it."""

    position: int  # its index in the text, from 0
    token: Token  # its text, log-probability and rank
    entropy: float  # of the predicted distribution, in nats
    # the `top_k` most probable tokens, as (id, log-probability), best first
    top: tuple[tuple[int, float], ...] = ()

    @property
    def bits(self) -> float:
        """Surprisal, -log₂ p."""
        return -self.token.log_prob / math.log(2)

    def to_json(self) -> dict[str, Any]:
        """Return the token with `position`, `entropy` and `bits`."""
        more = {"position": self.position, "entropy": self.entropy, "bits": finite(self.bits)}
        return {**self.token.to_json(), **more}


@dataclass
class Score:
    """Totals of a scored text."""

    window: int  # tokens the model sees at once
    stride: int  # tokens between the starts of two windows
    tokens: int = 0  # number of scored tokens: all but the first, which has no context
    bytes: int = 0  # length of their text in UTF-8
    words: int = 0  # number of words of the text, separated by white space
    # whether the tokenizer put a special token before the text; if not, the first token of the text
    # is not scored
    bos: bool = False
    log_prob: float = 0.0  # sum over all scored tokens, in nats
    entropy_sum: float = field(default=0.0, repr=False)  # sum of the entropies, in nats
    first_choices: int = 0  # number of tokens with rank 0
    in_top_10: int = 0  # number of tokens with rank 0 to 9

    @property
    def perplexity(self) -> float:
        """exp(-log_prob / tokens); inf where a token had no probability."""
        mean = -self.log_prob / self.tokens
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """-log₂ p of the text per byte: does not depend on the tokenizer."""
        return -self.log_prob / math.log(2) / self.bytes if self.bytes else math.inf

    @property
    def word_perplexity(self) -> float:
        """exp(-log_prob / words), as in lm-evaluation-harness."""
        mean = -self.log_prob / self.words if self.words else math.inf
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def bits_per_token(self) -> float:
        """-log₂ p of the text per token."""
        return -self.log_prob / math.log(2) / self.tokens

    @property
    def entropy(self) -> float:
        """Mean entropy of the predicted distributions, in nats."""
        return self.entropy_sum / self.tokens

    def __add__(self, other: Score) -> Score:
        """Return the totals of two texts, scored with the same window and stride."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)[2:]}
        return Score(self.window, self.stride, **{**sums, "bos": self.bos or other.bos})

    def add(self, log_prob: float, entropy: float, rank: int) -> None:
        """Count one more token."""
        self.tokens += 1
        self.log_prob += log_prob
        self.entropy_sum += entropy
        self.first_choices += rank == 0
        self.in_top_10 += 0 <= rank < 10

    def _repr_html_(self) -> str:
        return html_table("Score", ["", ""], self.to_json().items() if self.tokens else [])

    def to_json(self) -> dict[str, Any]:
        """Return sums and means; null for infinite values."""
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


class Window(NamedTuple):
    """A part of a text: `ids[:-1]` are read, the last `new` of `ids` are scored."""

    ids: list[int]  # of the tokens
    new: int  # number of tokens to score
    position: int  # of the first of them in the text


class Spread(Protocol):
    """A function that scores windows, such as `score_windows`."""

    def __call__(
        self, model: LanguageModel, windows: Iterable[tuple[T, Window | None]], top_k: int
    ) -> Iterator[tuple[T, list[ScoredToken]]]:
        """Yield the scored tokens of each window, in order; none for None."""


def score(
    model: LanguageModel,
    text: str | Iterable[str],
    *,
    window: int | None = None,
    stride: int | None = None,
    top_k: int = 0,
    on_token: Callable[[ScoredToken], object] | None = None,
    spread: Spread | None = None,
) -> Score:
    """Return the log-probability of a text under a model, with a sliding window.

    Equivalent to: -F.cross_entropy(logits, ids[1:], reduction="sum"), in windows

    The model reads the tokens [0, window), then [stride, stride + window), and so on. Every token
    but the first is scored once, in the first window that contains it; from the second window on it
    has more than `window - stride` tokens of context. No special token is put before a window. Each
    window queries the head once. Memory is that of one window, however long the text is.

    Args:
        model: any `LanguageModel` with a tokenizer.
        text: the text, or an iterable of pieces of it.
        window: tokens the model sees at once; None for 1024 or the model's context.
        stride: tokens between the starts of two windows; None for half a window.
        top_k: number of most probable tokens to return with each token.
        on_token: called with every `ScoredToken`, in order.
        spread: scores the windows; None for `score_windows`.

    Raises:
        TextTooShort: fewer than two tokens.
        ValueError: a window longer than the model's context, or a `top_k` above the vocabulary.
    """
    options = {"window": window, "stride": stride, "top_k": top_k, "spread": spread}
    for tokens, result in stream_score(model, text, **options):  # noqa: B007
        if on_token is not None:
            for token in tokens:
                on_token(token)
    return result


def stream_score(
    model: LanguageModel, text: str | Iterable[str], **options: Any
) -> Iterator[tuple[list[ScoredToken], Score]]:
    """Yield the scored tokens of each window, and the totals so far: one object, which grows.

    Arguments and errors are those of `score`. `bytes` and `words` are those of the whole text once
    the iterator has ended; before, `bytes` counts the tokens scored so far.
    """
    for entry, tokens in stream_scores(model, [(text, 0)], **options):
        if entry.ended and entry.first is None:
            raise TextTooShort(
                "text must have at least two tokens; the first one is not scored, it has no context"
            )
        if not entry.ended:
            yield tokens, entry.result


@dataclass
class ScoredText:
    """One of several texts while it is scored."""

    result: Score  # the totals so far
    # number of tokens that were scored before, not counting the first; they are not scored again
    # and not counted, except in `bytes` and `words`
    skip: int = 0
    first: Piece | None = None  # the first token; None if there are fewer than two
    ended: bool = False  # whether all of it is scored


def stream_scores(
    model: LanguageModel,
    texts: Iterable[tuple[str | Iterable[str], int]],
    *,
    window: int | None = None,
    stride: int | None = None,
    top_k: int = 0,
    spread: Spread | None = None,
) -> Iterator[tuple[ScoredText, list[ScoredToken]]]:
    """Yield the scored tokens of each window of several texts; at the end of a text, once more.

    A text comes with the number of its tokens to skip, see `ScoredText`. Other arguments: `score`.
    """
    window = default_window(model) if window is None else window
    checks.check_integer("window", window, low=1, high=model.max_length)
    stride = max(1, window // 2) if stride is None else stride
    checks.check_integer("stride", stride, low=1, high=window)
    checks.check_integer("top_k", top_k, low=0, high=model.head.vocab_size)
    pairs = _all_windows(model, texts, window, stride)
    for (entry, size), tokens in (spread or score_windows)(model, pairs, top_k):
        result, counted = entry.result, [t for t in tokens if t.position > entry.skip]
        for token in counted:
            result.add(token.token.log_prob, token.entropy, token.token.rank)
            result.bytes += len(token.token.piece.bytes)
        if size is not None:
            entry.ended = True
            result.bytes, result.words = size
        yield entry, counted


def _all_windows(
    model: LanguageModel, texts: Iterable[tuple[str | Iterable[str], int]], window: int, stride: int
) -> Iterator[tuple[tuple[ScoredText, tuple[int, int] | None], Window | None]]:
    """Yield the windows of all texts; after each text None, with its bytes and words."""
    for text, skip in texts:
        entry = ScoredText(Score(window, stride), skip)
        counted = _Counted([text] if isinstance(text, str) else text)
        position = 1
        for ids, new in windows(stream_ids(model, counted), window, stride):
            if entry.first is None:
                entry.first = piece_of(model, ids[0])
                entry.result.bos = entry.first.special is not None
            scored = position + new - 1 > skip
            yield (entry, None), Window(ids, new, position) if scored else None
            position += new
        first = entry.first
        size = (0, 0) if first is None else (counted.bytes - len(first.bytes), counted.words)
        yield (entry, size), None


def score_windows(
    model: LanguageModel, windows: Iterable[tuple[T, Window | None]], top_k: int
) -> Iterator[tuple[T, list[ScoredToken]]]:
    """Yield the scored tokens of each window, in order, with the window's key; none for None."""
    for key, window in windows:
        yield key, [] if window is None else list(score_window(model, window, top_k))


def default_window(model: LanguageModel) -> int:
    """Return the default window of a model, in tokens."""
    return min(WINDOW, model.max_length or WINDOW)


def windows(
    portions: Iterable[list[int]], window: int, stride: int
) -> Iterator[tuple[list[int], int]]:
    """Split a stream of ids: yield the ids of each window and one more, and how many are new.

    In a window `ids[:-1]` are read, and the last `new` of `ids` are scored.

    >>> list(windows([[1, 2, 3], [4, 5, 6, 7]], window=4, stride=2))
    [([1, 2, 3, 4, 5], 4), ([3, 4, 5, 6, 7], 2)]
    """
    held: list[int] = []
    seen = 1  # held ids that need no score: the first of the text, or scored already
    for portion in portions:
        held += portion
        while len(held) > window:
            yield held[: window + 1], window + 1 - seen
            held = held[stride:]
            seen = window + 1 - stride
    if len(held) > seen:
        yield held, len(held) - seen


@torch.no_grad()
def score_window(model: LanguageModel, window: Window, top_k: int) -> Iterator[ScoredToken]:
    """Yield the scored tokens of one window: the head is queried once."""
    ids, new, position = window
    hidden = hidden_states(model, ids[:-1])[-new:]
    targets = torch.tensor(ids[-new:])
    logits = model.head(hidden).double()
    answers: Any = logits.ask(
        log_prob=targets, rank=targets, entropy=True, logsumexp=True, top_k=top_k
    )
    tops = top_log_probs(answers) if top_k else [()] * new
    target_logits = answers.log_prob + answers.logsumexp
    figures = zip(
        *(t.tolist() for t in (answers.log_prob, target_logits, answers.rank, answers.entropy)),
        strict=True,
    )
    for i, (log_prob, logit, rank, entropy) in enumerate(figures):
        index = len(ids) - new + i
        piece = piece_of(model, ids[index], ids[index - 1])
        token = Token(piece, logit, log_prob, math.exp(log_prob), rank)
        yield ScoredToken(position + i, token, entropy, tops[i])


class _Counted:
    """Pieces of text, with a count of the bytes and words read."""

    def __init__(self, pieces: Iterable[str]) -> None:
        self._pieces, self.bytes, self.words = pieces, 0, 0

    def __iter__(self) -> Iterator[str]:
        in_word = False  # whether the last piece ended within a word
        for piece in self._pieces:
            self.bytes += len(piece.encode("utf-8"))
            self.words += len(piece.split()) - (in_word and piece[:1].strip() != "")
            in_word = piece[-1].strip() != "" if piece else in_word
            yield piece
