"""`lmhead score`: how well a model expects a text: perplexity, bits per byte, every token."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lmhead.cli import _json
from lmhead.cli._model import (
    check_file,
    check_window,
    checked_text,
    model_json,
    model_options,
    open_model,
    read_text,
    split,
)
from lmhead.cli._terminal import (
    Progress,
    bar,
    clip,
    columns,
    cyan,
    dim,
    echo,
    left,
    right,
    tail,
    width,
)
from lmhead.cli._tokens import readable, shown

if TYPE_CHECKING:
    from lmhead.analysis import Piece, Score, ScoredToken
    from lmhead.models import LanguageModel

_MARGIN = "  "
_WORD = 18  # columns of a token


@click.command("score")
@click.argument("arguments", nargs=-1, metavar="[MODEL] FILE")
@click.option("--text", help="Score this text, in place of a file.")
@click.option("--window", type=click.IntRange(1), help="Tokens seen at once.  [default: 1024]")
@click.option("--stride", type=click.IntRange(1), help="Tokens between windows.  [default: half]")
@click.option(
    "--tokens/--no-tokens", default=None, help="Show every token.  [default: only with --text]"
)
@click.option(
    "--worst", type=click.IntRange(0), default=10, show_default=True, help="Surprises to show."
)
@model_options
@_json.json_option
def command(
    arguments: tuple[str, ...],
    text: str | None,
    window: int | None,
    stride: int | None,
    tokens: bool | None,
    worst: int,
    as_json: bool,
    **options: Any,
) -> None:
    """How well a model expects a text.

    Perplexity and bits per byte of the whole; log-probability, entropy and rank of every token. A
    long file is read with a sliding window, in bounded memory.

    FILE is a text in UTF-8, or - for standard input.

    \b
    Examples:
      lmhead score --text "The cat sat on the mat."
      lmhead score smollm2 book.txt
      lmhead score smollm2 book.txt --window 512 --stride 512
      lmhead score book.txt --json --tokens > tokens.json
      cat chapter*.txt | lmhead score ./model -
    """
    where, file = _where(arguments, text)
    if file is not None:
        check_file(file)
    model = open_model(where, download=options["download"], threads=options["threads"])
    from lmhead.analysis import score

    every = tokens if tokens is not None else text is not None
    size = Path(file).stat().st_size if file not in (None, "-") else 0
    with Progress() as progress:
        if as_json:
            view: _View = _JsonView(model, every, progress, size)
        else:
            view = _TableView(every, worst, progress, size)
        pieces = read_text(file) if file is not None else [checked_text(text or "", "--text")]
        _check_stride(model, window, stride)
        result = score(model, pieces, window=window, stride=stride, each=view.add)
    view.finish(model, result)


def _where(arguments: tuple[str, ...], text: str | None) -> tuple[str | None, str | None]:
    """The model and the file; None for the default model, and for no file."""
    if text is None:
        return split(arguments, "FILE")
    if len(arguments) > 1:
        raise click.UsageError("Give a FILE or --text, not both.")
    return (arguments[0] if arguments else None), None


def _check_stride(model: LanguageModel, window: int | None, stride: int | None) -> None:
    from lmhead.analysis.score import default_window

    check_window(model, window)
    window = default_window(model) if window is None else window
    if stride is not None and stride > window:
        raise click.UsageError(f"--stride must be at most the window, {window}; got {stride}")


class _View(ABC):
    """What is shown of every token, as it comes, and at the end."""

    def __init__(self, progress: Progress, size: int) -> None:
        self._progress, self._size, self._bytes, self._tokens = progress, size, 0, 0

    def add(self, scored: ScoredToken) -> None:
        """One more token."""
        self._tokens += 1
        self._bytes += len(scored.token.piece.bytes)
        if self._tokens % 256 == 0:
            part = f", {self._bytes / self._size:.0%}" if self._size else ""
            self._progress(f"Scoring: {self._tokens:,} tokens{part}")

    @abstractmethod
    def finish(self, model: LanguageModel, result: Score) -> None:
        """The whole."""


class _JsonView(_View):
    def __init__(self, model: LanguageModel, every: bool, progress: Progress, size: int) -> None:
        super().__init__(progress, size)
        self._stream = None
        if every:
            self._stream = _json.Stream("score", "tokens", model=model_json(model))

    def add(self, scored: ScoredToken) -> None:
        super().add(scored)
        if self._stream is not None:
            self._stream.add(scored.to_json())

    def finish(self, model: LanguageModel, result: Score) -> None:
        if self._stream is not None:
            self._stream.close(**result.to_json())
        else:
            _json.write("score", model=model_json(model), tokens=None, **result.to_json())


class _TableView(_View):
    def __init__(self, every: bool, worst: int, progress: Progress, size: int) -> None:
        super().__init__(progress, size)
        self._every, self._worst = every, 0 if every else worst
        self._before: deque[Piece] = deque(maxlen=24)
        self._found: list[tuple[float, int, ScoredToken, tuple[Piece, ...]]] = []
        self._bars = min(30, max(8, width() - 54))
        if every:
            heads = [left("token", _WORD), "    bits", "        p", "   rank", " entropy"]
            echo(["", dim(_MARGIN + "".join(heads))])

    def add(self, scored: ScoredToken) -> None:
        super().add(scored)
        if self._every:
            echo(self._row(scored))
        elif self._worst:
            entry = (scored.bits, -scored.position, scored, tuple(self._before))
            if len(self._found) < self._worst:
                heapq.heappush(self._found, entry)
            elif entry > self._found[0]:
                heapq.heapreplace(self._found, entry)
            self._before.append(scored.token.piece)

    def _row(self, scored: ScoredToken) -> str:
        token = scored.token
        word = left(clip(shown(token.piece), _WORD - 1), _WORD)
        figures = f"{scored.bits:8.2f}{token.p:9.4f}{token.rank:7,}{scored.entropy:8.2f}"
        drawn = bar(min(scored.bits / 20, 1.0), self._bars)
        return f"{_MARGIN}{word}{figures}" + (f"  {_heat(scored.bits, drawn)}" if drawn else "")

    def finish(self, model: LanguageModel, result: Score) -> None:
        echo(["", *(_MARGIN + line for line in _summary(result)), ""])
        if self._found:
            echo(self._surprises())
        echo(dim(f"{_MARGIN}{model.name}"))

    def _surprises(self) -> Iterator[str]:
        yield dim(f"{_MARGIN}    bits     rank   most surprising")
        for bits, _, scored, before in sorted(self._found, reverse=True):
            word = shown(scored.token.piece)
            figures = f"{bits:8.2f}{scored.token.rank:9,}   "
            room = width() - len(_MARGIN) - len(figures) - columns(word)
            yield f"{_MARGIN}{figures}{dim(tail(readable(before), max(room, 8)))}{cyan(word)}"
        yield ""


def _heat(bits: float, drawn: str) -> str:
    """Green for what was expected, red for what was not."""
    return click.style(drawn, fg="green" if bits < 3 else "yellow" if bits < 8 else "red")


def _summary(result: Score) -> Iterator[str]:
    bits = -result.log_prob / math.log(2)
    how = f"windows of {result.window:,}, {result.stride:,} apart"
    rows = [
        ("perplexity", f"{result.perplexity:,.4f}", "per token"),
        ("bits per byte", f"{result.bits_per_byte:.4f}", f"{bits:,.1f} bits in all"),
        ("bits per token", f"{result.bits_per_token:.4f}", ""),
        ("tokens", f"{result.tokens:,}", f"{result.bytes:,} bytes; {how}"),
        ("entropy", f"{result.entropy:.4f}", "nats, mean: how unsure the model was"),
        ("first choice", f"{result.first_choices / result.tokens:.1%}", "of the tokens"),
        ("in its top 10", f"{result.in_top_10 / result.tokens:.1%}", ""),
    ]
    for name, value, note in rows:
        yield f"{left(name, 15)}{right(value, 14)}" + (f"   {dim(note)}" if note else "")
