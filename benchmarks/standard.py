"""The standard set of benchmarks: half an hour on two cores.

Each line of the set is a command that can be run by itself.
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks import commands, goals
from benchmarks.runner import OUT, THREADS, results_folder
from benchmarks.shapes import SHAPES

STANDARD = (
    "loss --shape smollm2",
    "query --shape smollm2",
    "loss --shape smollm2 --dtype bfloat16 --tokens 256",
    "sample",
    "memory",
    "scaling",
)
OTHER_SHAPES = tuple(
    f"{task} --shape {name}" for name in SHAPES if name != "smollm2" for task in ("loss", "query")
)
QUICK = tuple(f"{line} --quick" for line in STANDARD if line != "memory")


@click.command("standard")
@click.option("--quick", is_flag=True, help="Few tokens and rounds, without memory.")
@click.option("--every-shape", is_flag=True, help="Loss and query at the other models' shapes too.")
@THREADS
@OUT
def command(quick: bool, every_shape: bool, threads: int | None, out: Path | None) -> None:
    """Run the standard set of benchmarks and compare it with its goals."""
    folder = results_folder(out)
    lines = (QUICK if quick else STANDARD) + (OTHER_SHAPES if every_shape else ())
    given = ["--out", str(folder), *(["--threads", str(threads)] if threads else [])]
    failed = []
    for line in lines:
        click.secho(f"\nlmhead bench {line}", bold=True)
        code = _run([*line.split(), *given])
        if code in (2, 130):
            raise SystemExit(code)
        if code:
            failed.append(line)
    if not quick:
        click.echo("\n" + "\n".join(goals.lines(folder)))
    for line in failed:
        click.echo(f"Wrong results: lmhead bench {line}")
    raise SystemExit(bool(failed))


def _run(arguments: list[str]) -> int:
    """Run a benchmark in this process and return its exit code."""
    try:
        commands.command.main(arguments, prog_name="lmhead bench")
        raise AssertionError("a command ends with SystemExit")
    except SystemExit as end:
        return int(end.code or 0)
