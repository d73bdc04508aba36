"""`lmhead score`: perplexity and bits per byte of a text, log-probability of every token."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lmhead.cli import _json
from lmhead.cli import _model_arguments as inputs
from lmhead.cli._command_group import FILE, importing, integer_option
from lmhead.cli._score_views import JsonView, TableView, document_of, summary, table_of_files
from lmhead.cli._terminal import MARGIN, dim, echo
from lmhead.progress import Progress

if TYPE_CHECKING:
    from lmhead.analysis import ScoredToken
    from lmhead.analysis.score import Spread
    from lmhead.models import LanguageModel


@click.command("score")
@click.argument("arguments", nargs=-1, metavar="[MODEL] FILE...")
@click.option("--text", help="Score this text instead of a file.")
@click.option("--window", type=click.IntRange(1), help="Context window in tokens.  [default: 1024]")
@click.option(
    "--stride", type=click.IntRange(1), help="Tokens between starts of windows.  [default: half]"
)
@click.option(
    "--tokens/--no-tokens", default=None, help="Show every token.  [default: only with --text]"
)
@integer_option("--worst", default=10, low=0, help="Number of most surprising tokens to show.")
@click.option(
    "--out",
    type=FILE,
    help="Write one row per token to this file, .jsonl or .parquet; continues an unfinished run.",
)
@click.option("--top-k", type=click.IntRange(0), help="With --out: most probable tokens per row.")
@click.option(
    "--restart", is_flag=True, help="With --out: start over, and replace the file if it exists."
)
@inputs.model_options
@_json.json_option
def command(
    arguments: tuple[str, ...],
    text: str | None,
    tokens: bool | None,
    worst: int,
    out: Path | None,
    top_k: int | None,
    restart: bool,
    as_json: bool,
    **cuts: Any,
) -> None:
    """Score a text: perplexity, bits per byte, every token.

    Perplexity and bits per byte of the whole text; surprisal in bits, probability, rank and entropy
    of every token. Ranks start at 1 in the table, at 0 in JSON. A long file is read with a sliding
    window, in bounded memory.

    The first token is not scored unless the tokenizer starts the text with a special token (BOS).
    Perplexity is per scored token; perplexity per word and bits per byte divide the same
    log-probability by words (separated by white space) and bytes, and can be compared between
    tokenizers.

    FILE is a text in UTF-8, or - for standard input. Several files need MODEL.

    \b
    Examples:
      lmhead score --text "The cat sat on the mat."
      lmhead score smollm2 book.txt
      lmhead score smollm2 book.txt --window 512 --stride 512
      lmhead score book.txt --json --tokens > tokens.json
      cat chapter*.txt | lmhead score ./model -
      lmhead score smollm2 chapter*.txt --out tokens.parquet --top-k 5
      torchrun --nproc-per-node 4 -m lmhead score smollm2 book.txt
    """
    with _other_ranks() as workers:
        if workers is None:
            return
        if out is not None and (text is not None or tokens is not None):
            raise click.UsageError("--out cannot be combined with --text or --tokens.")
        if out is None and (restart or top_k is not None):
            raise click.UsageError(f"--{'restart' if restart else 'top-k'} needs --out.")
        if out is not None or (len(arguments) > 2 and text is None):
            if tokens:
                raise click.UsageError("--tokens needs a single FILE; write the tokens with --out.")
            if out is not None:
                _check_out(out, restart)
            _score_files(arguments, workers, cuts, as_json, out, top_k or 0, restart)
            return
        _score_text(arguments, text, workers, cuts, tokens, worst, as_json)


def _score_text(
    arguments: tuple[str, ...],
    text: str | None,
    workers: Any,
    cuts: dict[str, Any],
    tokens: bool | None,
    worst: int,
    as_json: bool,
) -> None:
    """Score one text; `cuts` are its window and stride."""
    where, file = _where(arguments, text)
    if file is not None:
        inputs.check_file(file)
    model, spread = _open(where, workers)
    from lmhead.analysis import score

    every = tokens if tokens is not None else text is not None
    size = Path(file).stat().st_size if file not in (None, "-") else 0
    with Progress() as progress:
        if as_json:
            view: JsonView | TableView = JsonView(model, every, progress, size)
        else:
            view = TableView(every, worst, progress, size)
        pieces = inputs.read_file_or_text(file, text)
        _check_stride(model, **cuts)
        result = score(model, pieces, on_token=view.add, spread=spread, **cuts)
    view.finish(model, result)


def _score_files(
    arguments: tuple[str, ...],
    workers: Any,
    cuts: dict[str, Any],
    as_json: bool,
    out: Path | None,
    top_k: int,
    restart: bool,
) -> None:
    """Score several texts, or any number into the file `out`."""
    where = arguments[0] if len(arguments) > 1 else None
    files = arguments[1:] or arguments
    if not files:
        raise click.UsageError("Missing argument 'FILE'.")
    if len(set(files)) < len(files):
        raise click.UsageError("The same FILE is given twice.")
    for file in files:
        inputs.check_file(file)
    model, spread = _open(where, workers)
    from lmhead.analysis.score import stream_scores
    from lmhead.analysis.score_file import score_files

    _check_stride(model, **cuts)
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

        if out is not None:
            found = score_files(
                model,
                {file: partial(inputs.read_text, file) for file in files},
                out,
                top_k=top_k,
                restart=restart,
                on_token=show,
                on_resume=lambda rows: click.echo(f"Continuing after {rows:,} tokens.", err=True),
                spread=spread,
                **cuts,
            )
        else:
            found = {}
            texts = ((inputs.read_text(file), 0) for file in files)
            for entry, tokens in stream_scores(model, texts, spread=spread, **cuts):
                for token in tokens:
                    show(files[len(found)], token)
                if entry.ended:
                    found[files[len(found)]] = entry.result
    short = [name for name, result in found.items() if not result.tokens]
    for name in short:
        click.echo(f"Skipped {name}: it has fewer than two tokens.", err=True)
    results = [result for result in found.values() if result.tokens]
    if not results:
        raise click.ClickException("no file has two tokens or more.")
    total = sum(results[1:], results[0])
    if as_json:
        each = [
            {"file": name, **(document_of(result) if result.tokens else {"scored_tokens": 0})}
            for name, result in found.items()
        ]
        where_out = {} if out is None else {"out": str(out)}
        document = {"tokens": None, **document_of(total), **where_out, "files": each}
        _json.write("score", model=inputs.model_json(model), **document)
        return
    names = f"{len(files)} files" if len(files) > 1 else files[0]
    echo(["", *summary(total), ""])
    if out is None:
        echo(table_of_files({name: s for name, s in found.items() if s.tokens}))
    rows = "" if out is None else f": {total.tokens:,} rows in {out}"
    echo(dim(f"{MARGIN}{model.name}, {names}{rows}"))


@contextmanager
def _other_ranks() -> Iterator[Any]:
    """Yield the other processes of torchrun, False for none; in those, None at the end."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield False
        return
    with importing():
        from lmhead.analysis.score_workers import ScoreWorkers, serve
        from lmhead.models import open_model as opened
        from lmhead.parallel.process_ranks import LostRankError, all_ranks
    try:
        with all_ranks() as ranks:
            if ranks.first:
                with ScoreWorkers(ranks) as workers:
                    yield workers
                return
            inputs.set_threads()
            serve(ranks, lambda where: opened(where, download=inputs.kept("download")))
            yield None
    except (LostRankError, KeyboardInterrupt) as error:
        if int(os.environ["RANK"]):
            raise SystemExit(1) from error  # rank 0 says what happened
        if isinstance(error, LostRankError):
            raise click.ClickException(str(error)) from error
        raise


def _open(where: str | None, workers: Any) -> tuple[LanguageModel, Spread | None]:
    """Open the model, on all ranks; return it and what scores windows."""
    if workers:
        workers.open(where)
    return inputs.open_model(where), workers.spread if workers else None


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


def _where(arguments: tuple[str, ...], text: str | None) -> tuple[str | None, str | None]:
    """Return the model and the file; None for the default model, and for no file."""
    if text is None:
        return inputs.split_arguments(arguments, "FILE")
    if len(arguments) > 1:
        raise click.UsageError("Give a FILE or --text, not both.")
    return (arguments[0] if arguments else None), None


def _check_stride(model: LanguageModel, window: int | None, stride: int | None) -> None:
    from lmhead.analysis.score import default_window

    inputs.check_window(model, window)
    window = default_window(model) if window is None else window
    if stride is not None and stride > window:
        raise click.UsageError(f"--stride must be at most the window, {window}; got {stride}")
