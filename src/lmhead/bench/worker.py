"""One implementation in a process of its own: `python -m lmhead.bench.worker`.

The parent drives it: a request is one line of JSON on standard input, its answer one line of JSON
on standard output. The process ends with its input. What libraries print goes to standard error.

    {"do": "load", "task": module, "name": ..., "inputs": path, "threads": n, "max_bytes": n}
    {"do": "check", "truth": path}      one call, compared with float64
    {"do": "time"}                      one call, timed, known to give what was checked
    {"do": "peak"}                      two calls, and how far the memory grew
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from lmhead.bench.task import Task, UnavailableError

if TYPE_CHECKING:
    from lmhead.bench.task import Step

# A timed call may differ from the checked one by the order of its sums.
_SAME = 1e-3


class Worker:
    """The implementation that was loaded, and what its checked call gave."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.checked: dict[str, float] = {}

    def load(
        self, task: str, name: str, inputs: str, threads: int | None, max_bytes: int | None
    ) -> dict[str, Any]:
        """Prepare an implementation; the one before it, if any, is forgotten."""
        import torch

        from lmhead.bench.data import Inputs

        self.step = None
        if threads is not None:
            torch.set_num_threads(threads)
        found: Task = import_module(task).TASK
        given = replace(Inputs.load(Path(inputs)), max_bytes=max_bytes)
        self.step = found.implementations[name].prepare(given)
        return {"threads": torch.get_num_threads()}

    def check(self, truth: str) -> dict[str, Any]:
        """Errors against the truth."""
        import torch

        from lmhead.bench.truth import errors, fingerprint

        assert self.step is not None
        results = self.step()
        self.checked = fingerprint(results)
        return {"errors": errors(results, torch.load(truth, weights_only=True, mmap=True))}

    def time(self) -> dict[str, Any]:
        """Seconds of one call, and the results that are not what was checked."""
        from lmhead.bench.truth import fingerprint

        assert self.step is not None
        start = perf_counter()
        results = self.step()
        seconds = perf_counter() - start
        found = fingerprint(results)
        changed = [
            name
            for name, value in self.checked.items()
            if not abs(found[name] - value) <= _SAME * abs(value)
        ]
        return {"seconds": seconds, "changed": changed}

    def peak(self) -> dict[str, Any]:
        """Growth of the memory."""
        from lmhead.bench.memory import peak_growth

        assert self.step is not None
        growth = peak_growth(self.step)
        return {"growth": asdict(growth) if growth else None}


def serve() -> None:
    """Answer requests until there are no more."""
    # Ctrl-C reaches the whole group of processes; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    worker = Worker()
    verbs: dict[str, Callable[..., dict[str, Any]]] = {
        "load": worker.load,
        "check": worker.check,
        "time": worker.time,
        "peak": worker.peak,
    }
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = verbs[request.pop("do")](**request)
        except UnavailableError as missing:
            answer = {"missing": str(missing)}
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines()
            answer = {"failed": f"{type(error).__name__}: {lines[0] if lines else ''}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
