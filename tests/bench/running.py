"""Run a benchmark in this process."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from benchmarks.commands import command

# Options of `loss` and `query`.
TINY = ["--shape", "200x16", "--tokens", "24", "--rounds", "2", "--threads", "1", "--no-memory"]


def run(*arguments: object) -> Result:
    """Run `lmhead bench ARGUMENTS`."""
    return CliRunner().invoke(command, list(map(str, arguments)), standalone_mode=True)


def document_of(*arguments: object, out: Path) -> dict[str, Any]:
    """Run a benchmark whose results are all correct, and return its document."""
    done = run(*arguments, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    return document
