"""The runner of all benchmarks: options, conditions, progress, table, files, exit code.

A benchmark is a function of a `Run` that fills `run.document`, decorated with `benchmark`. Exit
codes: 0, 1 for a wrong result, 2 for a usage error, 130 for Ctrl-C.
"""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks import machine
from benchmarks.plots import Figure, can_plot, save_figure
from benchmarks.report import Document, full_text, is_result, to_json, write_json
from benchmarks.shapes import SHAPES, Shape, parse_shape
from lmhead.cli._command_group import combine_options
from lmhead.progress import Progress
from lmhead.sweep import kernels

Lines = Callable[[Document, int], list[str]]
Draw = Callable[[Document], Figure]
Option = Callable[[Callable[..., None]], Callable[..., None]]

FOLDER = click.Path(file_okay=False, path_type=Path)
THREADS = click.option("--threads", type=click.IntRange(1), help="Threads.  [default: torch's]")
OUT = click.option(
    "--out", type=FOLDER, help="Folder for the files.  [default: benchmarks/results/CPU-FAMILY]"
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
_PLOT = click.option("--plot/--no-plot", default=True, help="Draw PNG and SVG.  [default: --plot]")
_QUICK = click.option("--quick", is_flag=True, help="Few tokens and rounds: to see that it works.")


class Run:
    """A running benchmark.

    Attributes:
        document: the conditions, and the results that the benchmark adds.
        name: of the files, without suffix.
        progress: shows what is being done.
        quick: whether few tokens and rounds are enough.
        wrong: set by the benchmark if a result is wrong.
    """

    def __init__(self, benchmark: str, title: str, folder: Path, quick: bool) -> None:
        self.document: Document = {
            "benchmark": benchmark,
            "title": title,
            "interrupted": False,
            "native": kernels.core is not None,
            **machine.describe(torch.get_num_threads()),
        }
        self.name, self.folder, self.quick, self.wrong = benchmark, folder, quick, False
        self.progress = Progress(plain=True)

    @property
    def path(self) -> Path:
        """The JSON file."""
        return self.folder / f"{self.name}{'-quick' if self.quick else ''}.json"

    def save(self) -> None:
        """Write the JSON file; refuse to replace files that no benchmark wrote."""
        if not is_result(self.path):
            plots = (self.path.with_suffix(suffix) for suffix in (".png", ".svg"))
            for path in (self.path, *plots):
                if path.exists():
                    raise click.ClickException(
                        f"{path} exists and is not of a benchmark: choose another --out"
                    )
        write_json(self.document, self.path)

    def finish(self, as_json: bool, lines: Lines, draw: Draw | None) -> int:
        """Print the document, write the files, and return the exit code."""
        self.progress.close()
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
        text = full_text(self.document, lines, width)
        click.echo(to_json(self.document) if as_json else "\n".join(text))
        if self.document["interrupted"]:
            click.echo("No files were written: the run was interrupted.", err=True)
            return 130
        self.save()
        paths = [self.path]
        if draw is not None and can_plot():
            paths += save_figure(draw(self.document), self.path.with_suffix(""))
        elif draw is not None:
            click.echo("No plot: matplotlib is missing (pip install 'lmhead[bench]').", err=True)
        click.echo("Written: " + ", ".join(map(str, paths)), err=True)
        return int(self.wrong)


def benchmark(
    name: str, title: str, lines: Lines, *, draw: Draw | None = None, quick: bool = False
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function that is called with a `Run` and its own options.

    Args:
        name: of the command.
        title: what is measured.
        lines: returns the tables of the document for a terminal of some width.
        draw: returns the figure of the document.
        quick: whether the command has the option --quick.
    """
    more = [*([_QUICK] if quick else []), THREADS, OUT, _JSON, *([_PLOT] if draw else [])]

    def make(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def command(
            threads: int | None,
            out: Path | None,
            as_json: bool,
            quick: bool = False,
            plot: bool = False,
            **given: Any,
        ) -> None:
            machine.set_threads(threads)
            run = Run(name, title, results_folder(out), quick)
            try:
                function(run, **given)
            except KeyboardInterrupt:
                run.document["interrupted"] = True
            except ValueError as error:
                raise click.UsageError(str(error)) from error
            raise SystemExit(run.finish(as_json, lines, draw if plot else None))

        click_command = click.command(name)(combine_options(*more)(command))
        # In the help, the benchmark's own options come first.
        click_command.params = click_command.params[len(more) :] + click_command.params[: len(more)]
        return click_command

    return make


def results_folder(out: Path | None) -> Path:
    """Return the folder for files, created and writable; by default that of this CPU family."""
    folder = out or machine.RESULTS / machine.cpu_family()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise click.UsageError(f"cannot write to {folder}: {error.strerror}") from None


class ShapeType(click.ParamType[Shape]):
    """A shape by name, or as VxD."""

    name = "shape"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Shape:
        """Parse the text of an option."""
        try:
            return value if isinstance(value, Shape) else parse_shape(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


SHAPE_HELP = f"{', '.join(SHAPES)}, or VxD such as 50257x768."
TOKENS = click.option(
    "--tokens", type=click.IntRange(1), help="Number of rows N.  [default: what fits the shape]"
)
DTYPE = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of hidden states and weight.",
)


def integer(option: str, default: int, help: str) -> Option:
    """Return an option with a positive integer."""
    positive = click.IntRange(1)
    return click.option(option, type=positive, default=default, show_default=True, help=help)


def rounds(default: int) -> Option:
    """Return the option --rounds."""
    return integer("--rounds", default, "Number of interleaved rounds.")
