"""`lmhead score`: perplexity and bits per byte of a text, log-probability of every token."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lmhead.cli import _json
from lmhead.cli._model_arguments import (
    check_file,
    check_utf8,
    check_window,
    model_json,
    model_options,
    open_model,
    read_text,
    split_arguments,
)
from lmhead.cli._terminal import (
    bar,
    clip,
    columns,
    cyan,
    dim,
    echo,
    left,
    one_line,
    right,
    tail,
    token_label,
    width,
)
from lmhead.progress import Progress

if TYPE_CHECKING:
    from lmhead.analysis import Piece, Score, ScoredToken
    from lmhead.models import LanguageModel

_MARGIN = "  "
_TOKEN = 18  # columns of a token


@click.command("score")
@click.argument("arguments", nargs=-1, metavar="[MODEL] FILE...")
@click.option("--text", help="Score this text instead of a file.")
@click.option("--window", type=click.IntRange(1), help="Context window in tokens.  [default: 1024]")
@click.option(
    "--stride", type=click.IntRange(1), help="Tokens between window starts.  [default: half]"
)
@click.option(
    "--tokens/--no-tokens", default=None, help="Show every token.  [default: only with --text]"
)
@click.option(
    "--worst",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    help="Number of most surprising tokens to show.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write one row per token to this file, .jsonl or .parquet; continues an unfinished run.",
)
@click.option("--top-k", type=click.IntRange(0), help="With --out: most probable tokens per row.")
@click.option(
    "--restart", is_flag=True, help="With --out: start over, and replace the file if it exists."
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
    out: Path | None,
    top_k: int | None,
    restart: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Score a text: perplexity, bits per byte, every token.

    Perplexity and bits per byte of the whole text; surprisal in bits, probability, rank and entropy
    of every token. Ranks start at 1 in the table, at 0 in JSON. A long file is read with a sliding
    window, in bounded memory.

    The first token is not scored unless the tokenizer starts the text with a special token (BOS).
    Perplexity is per scored token; perplexity per word and bits per byte divide the same
    log-probability by words (separated by white space) and bytes, and can be compared between
    tokenizers.

    FILE is a text in UTF-8, or - for standard input. Several files need --out and MODEL.

    \b
    Examples:
      lmhead score --text "The cat sat on the mat."
      lmhead score smollm2 book.txt
      lmhead score smollm2 book.txt --window 512 --stride 512
      lmhead score book.txt --json --tokens > tokens.json
      cat chapter*.txt | lmhead score ./model -
      lmhead score smollm2 chapter*.txt --out tokens.parquet --top-k 5
    """
    if out is not None:
        if text is not None or tokens is not None:
            raise click.UsageError("--out cannot be combined with --text or --tokens.")
        _score_to_file(arguments, out, window, stride, top_k or 0, restart, as_json, options)
        return
    if restart or top_k is not None:
        raise click.UsageError(f"--{'restart' if restart else 'top-k'} needs --out.")
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
        pieces = read_text(file) if file is not None else [check_utf8(text or "", "--text")]
        _check_stride(model, window, stride)
        result = score(model, pieces, window=window, stride=stride, on_token=view.add)
    view.finish(model, result)


def _score_to_file(
    arguments: tuple[str, ...],
    out: Path,
    window: int | None,
    stride: int | None,
    top_k: int,
    restart: bool,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    where = arguments[0] if len(arguments) > 1 else None
    files = arguments[1:] or arguments
    if not files:
        raise click.UsageError("Missing argument 'FILE'.")
    if len(set(files)) < len(files):
        raise click.UsageError("The same FILE is given twice.")
    for file in files:
        check_file(file)
    _check_out(out, restart)
    model = open_model(where, download=options["download"], threads=options["threads"])
    from lmhead.analysis.score_file import score_files

    _check_stride(model, window, stride)
    if top_k > model.head.vocab_size:
        most = model.head.vocab_size
        raise click.UsageError(f"--top-k must be at most {most}, the vocabulary; got {top_k}")
    scored = 0
    with Progress() as progress:

        def show(name: str, token: ScoredToken) -> None:  # noqa: ARG001
            nonlocal scored
            scored += 1
            if scored % 256 == 0:
                number = f"{files.index(name) + 1} of {len(files)}"
                progress(f"Scoring file {number}, {name}: {scored:,} tokens")

        found = score_files(
            model,
            {file: partial(read_text, file) for file in files},
            out,
            window=window,
            stride=stride,
            top_k=top_k,
            restart=restart,
            on_token=show,
            on_resume=lambda rows: click.echo(f"Continuing after {rows:,} tokens.", err=True),
        )
    short = [name for name, result in found.items() if not result.tokens]
    for name in short:
        click.echo(f"Skipped {name}: it has fewer than two tokens.", err=True)
    results = [result for result in found.values() if result.tokens]
    if not results:
        raise click.ClickException("no file has two tokens or more.")
    total = sum(results[1:], results[0])
    if as_json:
        each = [
            {"file": name, **(_document(result) if result.tokens else {"scored_tokens": 0})}
            for name, result in found.items()
        ]
        document = {"tokens": None, **_document(total), "out": str(out), "files": each}
        _json.write("score", model=model_json(model), **document)
        return
    names = f"{len(files)} files" if len(files) > 1 else files[0]
    echo(["", *(_MARGIN + line for line in _summary(total)), ""])
    echo(dim(f"{_MARGIN}{model.name}, {names}: {total.tokens:,} rows in {out}"))


def _check_out(out: Path, restart: bool) -> None:
    """Refuse an output file that cannot be written, before a model is loaded."""
    if out.suffix not in (".jsonl", ".parquet"):
        raise click.UsageError(f"--out must end in .jsonl or .parquet; got {out.name!r}")
    if out.exists() and not restart:
        raise click.UsageError(f"{out} exists; choose another --out, or replace it with --restart.")
    if not out.parent.is_dir():
        raise click.UsageError(f"the folder of --out must exist; {out.parent} does not.")
    if out.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise click.ClickException("pyarrow is not installed; run: pip install 'lmhead[parquet]'")


def _document(result: Score) -> dict[str, Any]:
    """Return the totals as JSON, with those that depend on a definition of words."""
    more = {"word_perplexity": _finite(result.word_perplexity), "words": result.words}
    return {**result.to_json(), **more, "bos": result.bos}


def _finite(x: float) -> float | None:
    """Return the number, or None for infinities and NaN, which JSON cannot hold."""
    return x if math.isfinite(x) else None


def _where(arguments: tuple[str, ...], text: str | None) -> tuple[str | None, str | None]:
    """Return the model and the file; None for the default model, and for no file."""
    if text is None:
        return split_arguments(arguments, "FILE")
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
    """Output of every token, and at the end."""

    def __init__(self, progress: Progress, size: int) -> None:
        self._progress, self._size, self._bytes, self._tokens = progress, size, 0, 0

    def add(self, scored: ScoredToken) -> None:
        """Show one more token."""
        self._tokens += 1
        self._bytes += len(scored.token.piece.bytes)
        if self._tokens % 256 == 0:
            part = f", {self._bytes / self._size:.0%}" if self._size else ""
            self._progress(f"Scoring: {self._tokens:,} tokens{part}")

    @abstractmethod
    def finish(self, model: LanguageModel, result: Score) -> None:
        """Show the totals."""


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
            self._stream.close(**_document(result))
        else:
            _json.write("score", model=model_json(model), tokens=None, **_document(result))


class _TableView(_View):
    def __init__(self, every: bool, worst: int, progress: Progress, size: int) -> None:
        super().__init__(progress, size)
        self._every, self._worst = every, 0 if every else worst
        self._before: deque[Piece] = deque(maxlen=24)
        self._found: list[tuple[float, int, ScoredToken, tuple[Piece, ...]]] = []
        self._bars = min(30, max(8, width() - 54))
        if every:
            heads = [left("token", _TOKEN), "    bits", "        p", "   rank", " entropy"]
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
        label = left(clip(token_label(token.piece), _TOKEN - 1), _TOKEN)
        figures = f"{scored.bits:8.2f}{token.p:9.4f}{token.rank + 1:7,}{scored.entropy:8.2f}"
        drawn = bar(min(scored.bits / 20, 1.0), self._bars)
        return f"{_MARGIN}{label}{figures}" + (f"  {_heat(scored.bits, drawn)}" if drawn else "")

    def finish(self, model: LanguageModel, result: Score) -> None:
        echo(["", *(_MARGIN + line for line in _summary(result)), ""])
        if self._found:
            echo(self._surprises())
        echo(dim(f"{_MARGIN}{model.name}"))

    def _surprises(self) -> Iterator[str]:
        yield dim(f"{_MARGIN}    bits     rank   most surprising")
        for bits, _, scored, before in sorted(self._found, reverse=True):
            label = token_label(scored.token.piece)
            figures = f"{bits:8.2f}{scored.token.rank + 1:9,}   "
            space = width() - len(_MARGIN) - len(figures) - columns(label)
            yield f"{_MARGIN}{figures}{dim(tail(one_line(before), max(space, 8)))}{cyan(label)}"
        yield ""


def _heat(bits: float, drawn: str) -> str:
    """Colour by surprisal: green is expected, red is not."""
    return click.style(drawn, fg="green" if bits < 3 else "yellow" if bits < 8 else "red")


def _large(x: float) -> str:
    return f"{x:,.4f}" if x < 1e7 else f"{x:.4e}"


def _summary(result: Score) -> Iterator[str]:
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
    for name, value, note in rows:
        yield f"{left(name, 15)}{right(value, 14)}" + (f"   {dim(note)}" if note else "")
