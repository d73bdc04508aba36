"""Peak memory of a call in a fresh process: `python -m benchmarks.fresh_process`.

The process prepares one implementation, calls it twice, and prints the growth as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.machine import ROOT
from benchmarks.task import UnavailableError
from lmhead.cli._peak_memory import Growth, peak_growth

# With these the C library returns every freed block of 128 KiB and more to the system at once, so
# that resident memory is memory in use.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def growth_of(
    module: str, name: str, inputs: Path, threads: int, max_bytes: int | None = None
) -> Growth | None:
    """Return the peak growth of a fresh process in a call; None if the system does not report it.

    Args:
        module: `module`.TASK prepares the call.
        name: of the implementation.
        inputs: file of the inputs.
        threads: of torch.
        max_bytes: limit of temporary memory.

    Raises:
        UnavailableError: the process failed.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry)
    arguments = json.dumps([module, name, str(inputs), threads, max_bytes])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fresh_process", arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            **RETURN_FREED_MEMORY,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": str(threads),
        },
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["-9: was there enough memory?"]
        raise UnavailableError(f"its process ended with code {done.returncode}: {last[0]}")
    growth = json.loads(done.stdout.splitlines()[-1])
    return Growth(**growth) if growth else None


def main(module: str, name: str, inputs: str, threads: int, max_bytes: int | None) -> None:
    """Measure in this process and print the result."""
    torch.set_num_threads(threads)
    growth = peak_growth(import_module(module).TASK.prepare(name, Path(inputs), max_bytes))
    print("\n" + json.dumps(growth and asdict(growth)))


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
