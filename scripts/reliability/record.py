"""Keep the summary of a long run with its date, commit and machine."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from lmhead.sweep import kernels

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "reliability.json"


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=RESULTS.parent,
    )
    return done.stdout.strip() or "unknown"


COMMIT = _commit()  # at the start: other commits may follow during the run


def keep(name: str, summary: dict[str, Any], *, write: bool) -> None:
    """Print a summary; with `write`, put it into docs/reliability.json in place of the last one."""
    entry = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": COMMIT,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        **summary,
    }
    print(json.dumps({name: entry}, indent=1))
    if write:
        results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        results[name] = entry
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def instruction_sets() -> list[str]:
    """Return the instruction sets of this machine that the compiled core has kernels for."""
    core = kernels.core
    if core is None:
        raise SystemExit("the compiled core is not installed")
    return list(core.instruction_sets())
