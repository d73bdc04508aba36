"""`lmhead bench`: run the `benchmarks` package of the clone."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import click


class _NoCloneError(click.ClickException):
    exit_code = 2


def find_clone() -> Path | None:
    """Return the clone that this file is in, or the one in the working directory."""
    for root in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (root / "src" / "lmhead").is_dir() and (root / "benchmarks" / "commands.py").is_file():
            return root
    return None


def load_command() -> click.Command:
    """Return the command group of `benchmarks`; without a clone, a command that raises."""
    root = find_clone()
    if root is None:
        return _missing
    sys.path.insert(0, str(root))
    try:
        group: click.Command = import_module("benchmarks.commands").command
        return group
    finally:
        sys.path.remove(str(root))


@click.command(
    "bench",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def _missing() -> None:
    raise _NoCloneError(
        "lmhead bench needs a clone of the repository: run it there, or pip install --editable it"
    )


command = load_command()
