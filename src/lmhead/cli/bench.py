"""`lmhead bench`: speed, memory and errors beside everything else a user could pick.

Nothing here loads torch before the options are known to be right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from lmhead.bench import losses, queries
from lmhead.bench.shapes import SHAPES, Shape, parse_shape
from lmhead.bench.task import Task
from lmhead.cli._results import Progress, check_out, finish

_F = TypeVar("_F", bound=Callable[..., Any])
_DTYPES = ("float32", "bfloat16", "float16")


class _ShapeType(click.ParamType[Shape]):
    name = "shape"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Shape:
        try:
            return value if isinstance(value, Shape) else parse_shape(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _options(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    def add(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


_shape_help = f"{', '.join(SHAPES)}, or VxD such as 50257x768."
_threads = click.option("--threads", type=click.IntRange(1), help="Threads.  [default: torch's]")
_quick = click.option("--quick", is_flag=True, help="Few tokens and rounds: to see that it works.")
_dtype = click.option(
    "--dtype", type=click.Choice(_DTYPES), default="float32", show_default=True, help="Of tensors."
)
_output = _options(
    click.option(
        "--out",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder for JSON and plot.  [default: benchmarks/results in a checkout, else none]",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table."),
    click.option("--plot/--no-plot", default=True, help="Draw PNG and SVG.  [default: --plot]"),
)


def _task_options(task: Task) -> Callable[[_F], _F]:
    names = ", ".join(task.implementations)
    return _options(
        click.option("--shape", type=_ShapeType(), default="smollm2", help=_shape_help),
        click.option("--tokens", type=click.IntRange(1), help="N.  [default: what fits the shape]"),
        _dtype,
        _threads,
        click.option("--rounds", type=click.IntRange(1), default=5, show_default=True),
        click.option("--only", multiple=True, metavar="NAME", help=f"Some of: {names}."),
        click.option(
            "--baseline",
            multiple=True,
            metavar="NAME",
            help=f"Divide times by this one's.  [default: {', '.join(task.baselines)}]",
        ),
        click.option(
            "--data",
            type=click.Path(file_okay=False, path_type=Path),
            help="Folder of SmolLM2's hidden states and head.  [default: LMHEAD_BENCH_DATA]",
        ),
        click.option("--memory/--no-memory", default=True, help="Measure peak memory too."),
        _quick,
        _output,
    )


@click.group()
def command() -> None:
    """Speed, memory and errors, beside everything else a user could pick.

    Every result is compared with float64 before it is timed. Rounds are interleaved, so that a
    ratio is taken between calls that were made one after the other.

    \b
    Examples:
      lmhead bench loss
      lmhead bench loss --shape gpt2 --only lmhead --only compile
      lmhead bench query --threads 2
      lmhead bench sample
      lmhead bench decode
      lmhead bench memory
      lmhead bench scaling --quick
    """


@command.command()
@_task_options(losses.TASK)
def loss(**options: Any) -> None:
    """Cross-entropy and both gradients: ours, and every other way to get them.

    \b
    Examples:
      lmhead bench loss                            SmolLM2, N = 2048, float32
      lmhead bench loss --dtype bfloat16 --tokens 256
      lmhead bench loss --shape 32000x256 --quick --only lmhead --only eager
    """
    _run_task(losses.TASK, **options)


@command.command()
@_task_options(queries.TASK)
def query(**options: Any) -> None:
    """Log-probability, entropy, rank, argmax and top 20 at once.

    \b
    Examples:
      lmhead bench query
      lmhead bench query --shape gemma-3-270m --rounds 3
    """
    _run_task(queries.TASK, **options)


@command.command()
@click.option("--shape", "shapes", multiple=True, type=_ShapeType(), help=_shape_help)
@click.option("--tokens", type=click.IntRange(1), help="N.  [default: what fits the shape]")
@_dtype
@_threads
@click.option("--max-bytes", type=click.IntRange(1), help="The bound.  [default: 128 MiB]")
@_quick
@_output
def memory(
    shapes: tuple[Shape, ...],
    tokens: int | None,
    dtype: str,
    threads: int | None,
    max_bytes: int | None,
    quick: bool,
    **output: Any,
) -> None:
    """Temporary memory against max_bytes, at every shape.

    \b
    Examples:
      lmhead bench memory
      lmhead bench memory --shape 131072x64 --tokens 8192
      lmhead bench memory --max-bytes 16777216
    """
    from lmhead.bench import footprint

    check_out(output["out"])
    chosen = shapes or (footprint.ALL_SHAPES[:1] if quick else footprint.ALL_SHAPES)
    tokens = tokens or (256 if quick else None)
    with Progress() as progress:
        document = footprint.footprint(
            [replace(shape, tokens=tokens or shape.tokens) for shape in chosen],
            progress,
            dtype=dtype,
            max_bytes=max_bytes,
            threads=threads,
        )
    bad = any(not row.get("within", False) for row in document["results"])
    finish(document, f"memory-{dtype}", footprint.lines, bad, quick=quick, **output)


@command.command()
@_threads
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@_quick
@_output
def scaling(threads: int | None, rounds: int, quick: bool, **output: Any) -> None:
    """Time against the vocabulary, up to a million words, and against the number of tokens.

    \b
    Examples:
      lmhead bench scaling
      lmhead bench scaling --quick --no-plot
    """
    from lmhead.bench import scaling

    check_out(output["out"])
    with Progress() as progress:
        axes = scaling.axes(quick=quick)
        document = scaling.scaling(axes, progress, rounds=rounds, threads=threads)
    bad = any(point["wrong"] or point["failed"] for point in document["points"])
    finish(document, "scaling", scaling.lines, bad, quick=quick, **output)


@command.command()
@click.option("--vocab", type=click.IntRange(2), help="V.  [default: 262144]")
@_threads
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True)
@_quick
@_output
def sample(vocab: int | None, threads: int | None, rounds: int, quick: bool, **output: Any) -> None:
    """A token from the logits, beside Hugging Face's processors and torch.multinomial.

    \b
    Examples:
      lmhead bench sample
      lmhead bench sample --vocab 49152 --threads 1
    """
    from lmhead.bench import samples

    check_out(output["out"])
    vocab = vocab or (8192 if quick else samples.VOCAB)
    try:
        with Progress() as progress:
            document = samples.samples(
                progress, vocab=vocab, rounds=min(rounds, 3) if quick else rounds, threads=threads
            )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    bad = any(row["wrong"] for row in document["results"])
    finish(document, f"sample-{vocab}", samples.lines, bad, quick=quick, **output)


@command.command()
@_threads
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@_quick
@_output
def decode(threads: int | None, rounds: int, quick: bool, **output: Any) -> None:
    """One token from a hidden state: certified decode beside full products.

    \b
    Examples:
      lmhead bench decode                 several GB of memory, a few minutes
      lmhead bench decode --quick
    """
    from lmhead.bench import decode

    check_out(output["out"])
    settings, growth = decode.SETTINGS, decode.GROWTH
    if quick:
        settings = tuple(replace(s, vocab=8192, hidden_size=128, goals=()) for s in settings)
        growth, rounds = (2048, 8192), min(rounds, 2)
    with Progress() as progress:
        document = decode.decode(settings, growth, progress, rounds=rounds, threads=threads)
    measured = (*document["results"], *document["growth"])
    bad = any(way["ours"] and way["wrong"] for result in measured for way in result["ways"])
    finish(document, "decode", decode.lines, bad, quick=quick, **output)


def _run_task(
    task: Task,
    *,
    shape: Shape,
    tokens: int | None,
    dtype: str,
    threads: int | None,
    rounds: int,
    only: tuple[str, ...],
    baseline: tuple[str, ...],
    data: Path | None,
    memory: bool,
    quick: bool,
    **output: Any,
) -> None:
    from lmhead.bench.compare import Settings, compare
    from lmhead.bench.report import comparison

    check_out(output["out"])
    if quick:
        rounds, memory = min(rounds, 2), False
        tokens = tokens or max(16, shape.tokens // 8)
    shape = replace(shape, tokens=tokens or shape.tokens)
    settings = Settings(shape, dtype, rounds, threads, only, data, memory)
    try:
        task.pick(baseline, "baseline")
        task = replace(task, baselines=baseline or task.baselines)
        with Progress() as progress:
            document = compare(task, settings, progress)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    bad = any(r["wrong"] for r in document["results"]) or any(
        s["failed"] for s in document["skipped"]
    )
    stem = f"{task.name}-{shape.name}-{shape.tokens}-{dtype}"
    finish(document, stem, comparison, bad, quick=quick, **output)
