"""What a benchmark command leaves behind: progress, a table or JSON, files, an exit code.

Exit codes: 0, 1 for a result that is wrong, 2 for a mistake of the user, 130 for Ctrl-C.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from lmhead.bench.report import Document, results_folder, to_json, write_json


def check_out(out: Path | None) -> None:
    """Make the folder for the files before the work of minutes, not after it."""
    folder = results_folder(out)
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise click.UsageError(f"cannot write to {folder}: {error.strerror}") from None


def finish(
    document: Document,
    stem: str,
    lines: Callable[[Document, int], list[str]],
    bad: bool,
    *,
    quick: bool,
    out: Path | None,
    as_json: bool,
    plot: bool,
) -> None:
    """Print, write files, and end with the right exit code."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    click.echo(to_json(document) if as_json else "\n".join(lines(document, width)))
    folder = results_folder(out)
    if folder is None:
        click.echo("No files were written: give --out DIR for JSON and plot.", err=True)
    elif document["interrupted"]:
        click.echo("No files were written: the run was interrupted.", err=True)
    else:
        _write(document, folder / (stem + ("-quick" if quick else "")), plot)
    if document["interrupted"]:
        raise SystemExit(130)
    if bad:
        raise SystemExit(1)


def _write(document: Document, stem: Path, plot: bool) -> None:
    from lmhead.bench.plots import can_plot, write_plot

    paths = [stem.with_name(stem.name + ".json")]
    write_json(document, paths[0])
    if plot and can_plot():
        paths += write_plot(document, stem)
    elif plot:
        click.echo("No plot: matplotlib is missing (pip install 'lmhead[bench]').", err=True)
    click.echo("Written: " + ", ".join(map(str, paths)), err=True)


class Progress:
    """What is being done, on standard error: one line that changes, or many where it cannot."""

    def __init__(self) -> None:
        self.changes = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def __call__(self, text: str) -> None:
        click.echo(f"\r\x1b[2K{text}" if self.changes else text, err=True, nl=not self.changes)

    def __exit__(self, *_: object) -> None:
        if self.changes:
            click.echo("\r\x1b[2K", err=True, nl=False)
