"""The standard set: `make bench`, or `python -m benchmarks`. Half an hour on two cores.

Each line of the set is a command that can be run by itself. The files go to `benchmarks/results`.
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.goals import lines
from lmhead.bench.shapes import SHAPES
from lmhead.cli import main as lmhead

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
QUICK = tuple(f"{line} --quick" for line in STANDARD if not line.startswith("memory"))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Few tokens and rounds, memory left out.")
@click.option("--every-shape", is_flag=True, help="Loss and query at the other models' shapes too.")
@click.option("--threads", type=click.IntRange(1), help="Threads.  [default: torch's]")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(__file__).parent / "results",
    help="Folder for the files.  [default: benchmarks/results]",
)
def main(quick: bool, every_shape: bool, threads: int | None, out: Path) -> None:
    """Run the standard set of benchmarks and hold it to its goals."""
    commands = (QUICK if quick else STANDARD) + (OTHER_SHAPES if every_shape else ())
    options = ["--out", str(out), *(["--threads", str(threads)] if threads else [])]
    failed = []
    for line in commands:
        click.secho(f"\nlmhead bench {line}", bold=True)
        code = _run(["bench", *line.split(), *options])
        if code in (2, 130):
            raise SystemExit(code)
        if code:
            failed.append(line)
    if not quick:
        click.echo("\n" + "\n".join(lines(out)))
    for line in failed:
        click.echo(f"Wrong results: lmhead bench {line}")
    raise SystemExit(bool(failed))


def _run(arguments: list[str]) -> int:
    """The exit code of a command of ours, in this process."""
    try:
        lmhead.main(arguments, prog_name="lmhead")
        raise AssertionError("a command ends with SystemExit")
    except SystemExit as end:
        return int(end.code or 0)


if __name__ == "__main__":
    main()
