"""Output of `lmhead score`: a table or JSON, every token and the totals."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from lmhead.cli import _json
from lmhead.cli import _terminal as term
from lmhead.cli._model_arguments import model_json
from lmhead.progress import Progress

if TYPE_CHECKING:
    from lmhead.analysis import Piece, Score, ScoredToken
    from lmhead.models import LanguageModel

_TOKEN = 18  # columns of a token


class View:
    """Progress while a text is scored."""

    def __init__(self, progress: Progress, size: int) -> None:
        self._progress, self._size, self._bytes, self._tokens = progress, size, 0, 0

    def add(self, scored: ScoredToken) -> None:
        """Show one more token."""
        self._tokens += 1
        self._bytes += len(scored.token.piece.bytes)
        if self._tokens % 256 == 0:
            part = f", {self._bytes / self._size:.0%}" if self._size else ""
            self._progress(f"Scoring: {self._tokens:,} tokens{part}")


class JsonView(View):
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
            self._stream.close(**document_of(result))
        else:
            _json.write("score", model=model_json(model), tokens=None, **document_of(result))


class TableView(View):
    def __init__(self, every: bool, worst: int, progress: Progress, size: int) -> None:
        super().__init__(progress, size)
        self._every, self._worst = every, 0 if every else worst
        self._before: deque[Piece] = deque(maxlen=24)
        self._found: list[tuple[float, int, ScoredToken, tuple[Piece, ...]]] = []
        self._bars = min(30, max(8, term.width() - 54))
        if every:
            heads = [term.left("token", _TOKEN), "    bits", "        p", "   rank", " entropy"]
            term.echo(["", term.dim(term.MARGIN + "".join(heads))])

    def add(self, scored: ScoredToken) -> None:
        super().add(scored)
        if self._every:
            term.echo(self._row(scored))
        elif self._worst:
            entry = (scored.bits, -scored.position, scored, tuple(self._before))
            if len(self._found) < self._worst:
                heapq.heappush(self._found, entry)
            elif entry > self._found[0]:
                heapq.heapreplace(self._found, entry)
            self._before.append(scored.token.piece)

    def _row(self, scored: ScoredToken) -> str:
        token = scored.token
        label = term.left(term.clip(term.token_label(token.piece), _TOKEN - 1), _TOKEN)
        figures = f"{scored.bits:8.2f}{token.p:9.4f}{token.rank + 1:7,}{scored.entropy:8.2f}"
        drawn = term.bar(min(scored.bits / 20, 1.0), self._bars)
        # Green is expected, red is not.
        color = "green" if scored.bits < 3 else "yellow" if scored.bits < 8 else "red"
        return f"{term.MARGIN}{label}{figures}" + ("  " + click.style(drawn, fg=color)) * bool(
            drawn
        )

    def finish(self, model: LanguageModel, result: Score) -> None:
        term.echo(["", *summary(result), ""])
        if self._found:
            term.echo(self._most_surprising())
        term.echo(term.dim(f"{term.MARGIN}{model.name}"))

    def _most_surprising(self) -> Iterator[str]:
        yield term.dim(f"{term.MARGIN}    bits     rank   most surprising")
        for bits, _, scored, before in sorted(self._found, reverse=True):
            label = term.token_label(scored.token.piece)
            figures = f"{bits:8.2f}{scored.token.rank + 1:9,}   "
            space = term.width() - len(term.MARGIN) - len(figures) - term.columns(label)
            shown = term.dim(term.tail(term.one_line(before), max(space, 8)))
            yield f"{term.MARGIN}{figures}{shown}{term.cyan(label)}"
        yield ""


def _large(x: float) -> str:
    return f"{x:,.4f}" if x < 1e7 else f"{x:.4e}"


def summary(result: Score) -> Iterator[str]:
    bits = -result.log_prob / math.log(2)
    first = "after BOS" if result.bos else "the first is not scored"
    how = f"windows of {result.window:,}, stride {result.stride:,}"
    rows = [
        ("perplexity", _large(result.perplexity), "per token"),
        ("", _large(result.word_perplexity), f"per word, {result.words:,} words"),
        ("bits per byte", f"{result.bits_per_byte:.4f}", f"{bits:,.1f} bits in total"),
        ("bits per token", f"{result.bits_per_token:.4f}", ""),
        ("tokens", f"{result.tokens:,}", f"{result.bytes:,} bytes; {how}; {first}"),
        ("entropy", f"{result.entropy:.4f}", "nats, mean"),
        ("rank 1", f"{result.first_choices / result.tokens:.1%}", "of the tokens"),
        ("rank 1 to 10", f"{result.in_top_10 / result.tokens:.1%}", ""),
    ]
    yield from term.facts(rows, 15)


def table_of_files(results: dict[str, Score]) -> Iterator[str]:
    """Return a line for each file."""
    yield term.dim(f"{term.MARGIN}    perplexity  bits/byte       tokens   file")
    for name, result in results.items():
        figures = f"{_large(result.perplexity):>14}{result.bits_per_byte:11.4f}{result.tokens:13,}"
        yield f"{term.MARGIN}{figures}   {name}"
    yield ""


def document_of(result: Score) -> dict[str, Any]:
    """Return the totals as JSON, with those that depend on a definition of words."""
    from lmhead.analysis.token_text import finite

    more_fields = {"word_perplexity": finite(result.word_perplexity), "words": result.words}
    return {**result.to_json(), **more_fields, "bos": result.bos}
