"""The parent: a process per implementation, kept alive, and rounds that time each of them once.

Interleaving makes the ratios honest: a machine that slows down for a minute slows everybody down,
and a ratio is taken within a round.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmhead.bench import memory
from lmhead.bench.task import Implementation, Task

# Called with what is being done.
Progress = Callable[[str], None]
# Between two calls: threads of the one before spin for a moment before they sleep.
_PAUSE = 0.05


class WorkerError(Exception):
    """A worker could not do what it was asked; the message says why."""


@dataclass
class Measured:
    """What is known of one implementation.

    Attributes:
        implementation: which.
        seconds: by rounds; an entry is in the round of the same index.
        errors: of its results against float64.
        wrong: the results that are further off than they may be.
        growth: of the memory of a fresh process, None if it was not measured.
        skipped: why there is nothing to see; None if there is.
        failed: whether that is its fault.
    """

    implementation: Implementation
    seconds: list[float] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    growth: memory.Growth | None = None
    skipped: str | None = None
    failed: bool = False


class WorkerProcess:
    """A worker, seen from the parent."""

    def __init__(self, threads: int | None = None, env: Mapping[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONPATH": path, **(env or {})}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        self._threads = threads
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lmhead.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            env=environment,
        )

    def load(self, task: Task, name: str, inputs: Path, *, max_bytes: int | None = None) -> int:
        """Prepare an implementation. Returns how many threads it has."""
        answer = self.ask(
            "load",
            task=task.module,
            name=name,
            inputs=str(inputs),
            threads=self._threads,
            max_bytes=max_bytes,
        )
        return int(answer["threads"])

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """One request, one answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(f"its process ended with code {self._process.wait()}{self._last()}")
        answer: dict[str, Any] = json.loads(line)
        for reason in ("missing", "failed"):
            if reason in answer:
                raise WorkerError(answer[reason])
        return answer

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._log.closed:
            return
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _last(self) -> str:
        """The last thing that it printed."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else " (-9: was there enough memory?)"


@contextlib.contextmanager
def worker(
    threads: int | None = None, env: Mapping[str, str] | None = None
) -> Iterator[WorkerProcess]:
    """A worker process that ends with the block."""
    process = WorkerProcess(threads, env)
    try:
        yield process
    finally:
        process.close()


@dataclass
class Run:
    """Everybody's measurements, filled as they come in: an interrupt loses nothing.

    Attributes:
        task: what is done.
        dtype: of the inputs, by name.
        measured: one entry per implementation, in the order of the table.
        threads: of torch.
        interrupted: whether somebody pressed Ctrl-C.
    """

    task: Task
    dtype: str
    measured: list[Measured]
    threads: int | None = None
    interrupted: bool = False

    def time(self, inputs: Path, truth: Path, rounds: int, progress: Progress) -> None:
        """Check and time all of them, in rounds."""
        with contextlib.ExitStack() as stack:
            workers: dict[str, WorkerProcess] = {}
            for m in self.measured:
                name = m.implementation.name
                progress(f"{m.implementation.label}: first call, compared with float64")
                process = stack.enter_context(worker(self.threads))
                try:
                    self.threads = process.load(self.task, name, inputs)
                    m.errors = process.ask("check", truth=str(truth))["errors"]
                except WorkerError as error:
                    self._skip(m, error)
                    process.close()
                    continue
                m.wrong = self.task.too_far(name, self.dtype, m.errors)
                workers[name] = process
            for r in range(rounds):
                for m in self.measured:
                    if m.skipped is not None:
                        continue
                    progress(f"round {r + 1} of {rounds}: {m.implementation.label}")
                    time.sleep(_PAUSE)
                    try:
                        answer = workers[m.implementation.name].ask("time")
                    except WorkerError as error:
                        self._skip(m, error)
                        continue
                    m.seconds.append(answer["seconds"])
                    m.wrong += [x for x in answer["changed"] if x not in m.wrong]

    def memory(self, inputs: Path, progress: Progress) -> None:
        """Peak growth of a fresh process for each of them."""
        for m in self.measured:
            if m.skipped is None and m.implementation.work is None:
                progress(f"memory: {m.implementation.label}")
                try:
                    m.growth = growth_of(self.task, m.implementation.name, inputs, self.threads)
                except WorkerError as error:
                    self._skip(m, error)

    def _skip(self, m: Measured, error: WorkerError) -> None:
        m.skipped = str(error)
        m.failed = m.implementation.ours


def growth_of(
    task: Task, name: str, inputs: Path, threads: int | None, max_bytes: int | None = None
) -> memory.Growth | None:
    """Peak growth of the memory of a fresh process."""
    with worker(threads, memory.ENVIRONMENT) as process:
        process.load(task, name, inputs, max_bytes=max_bytes)
        growth = process.ask("peak")["growth"]
        return memory.Growth(**growth) if growth else None
