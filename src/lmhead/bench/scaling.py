"""Time against the number of tokens and against the size of the vocabulary: both must be linear.

The hidden size is small, so that a vocabulary of a million words takes seconds.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmhead.bench import losses, machine, queries
from lmhead.bench.report import Columns, Document, conditions, table
from lmhead.bench.runner import Progress, WorkerError, WorkerProcess, worker
from lmhead.bench.shapes import Shape
from lmhead.bench.statistics import exponent
from lmhead.bench.task import Task

HIDDEN_SIZE = 64
_TASKS = {"loss": losses.TASK, "query": queries.TASK}


@dataclass(frozen=True)
class Axis:
    """What grows, and what stays."""

    name: str
    shapes: tuple[Shape, ...]

    def size(self, shape: Shape) -> int:
        """Of the thing that grows."""
        return shape.vocab if self.name == "vocab" else shape.tokens


def axes(*, quick: bool = False) -> tuple[Axis, Axis]:
    """The vocabulary up to 2^20 words of 256 tokens, and up to 8192 tokens of 32768 words.

    >>> [shape.vocab for shape in axes(quick=True)[0].shapes]
    [4096, 8192, 16384]
    """
    vocab = range(12, 15) if quick else range(14, 21)
    tokens = range(6, 9) if quick else range(8, 14)
    return (
        Axis("vocab", tuple(Shape(f"2^{v}", 2**v, HIDDEN_SIZE, 256) for v in vocab)),
        Axis("tokens", tuple(Shape(f"2^{n}", 2**15, HIDDEN_SIZE, 2**n) for n in tokens)),
    )


def scaling(
    lines_of: tuple[Axis, ...],
    progress: Progress,
    *,
    rounds: int = 3,
    threads: int | None = None,
) -> Document:
    """Time our losses and queries at every size; the best of the rounds counts.

    Ctrl-C ends the run early; what was measured until then is returned.
    """
    import torch

    from lmhead.sweep import native

    ours = [(task, i) for task in _TASKS.values() for i in task.implementations.values() if i.ours]
    points: list[dict[str, Any]] = []
    document: Document = {
        "benchmark": "scaling",
        "title": f"time against vocabulary and tokens, D {HIDDEN_SIZE}, float32",
        "rounds": rounds,
        "interrupted": False,
        "native": native.core is not None,
        **machine.describe(threads or torch.get_num_threads()),
        "points": points,
    }
    with tempfile.TemporaryDirectory(prefix="lmhead-bench-") as folder:
        try:
            with contextlib.ExitStack() as stack:
                workers = [stack.enter_context(worker(threads)) for _ in ours]
                for axis in lines_of:
                    for shape in axis.shapes:
                        progress(f"{axis.name} {axis.size(shape):,}: inputs and truth")
                        made = _Made(Path(folder), shape)
                        some = [
                            _Point(task, i.name, process)
                            for (task, i), process in zip(ours, workers, strict=True)
                        ]
                        for point in some:
                            point.start(made, progress)
                        for _ in range(rounds):
                            for point in some:
                                point.time()
                        points += [point.document(axis, shape) for point in some]
        except KeyboardInterrupt:
            document["interrupted"] = True
    document["series"] = _series(points)
    return document


class _Made:
    """The inputs of a shape and the truth about them, in files."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        import torch

        from lmhead.bench.generator import generate
        from lmhead.bench.truth import truth_of

        self.inputs = folder / "inputs.pt"
        inputs = generate(shape.vocab, shape.hidden_size, shape.tokens)
        inputs.save(self.inputs)
        self.truth = {}
        for name in _TASKS:
            self.truth[name] = folder / f"{name}.pt"
            torch.save(truth_of(name, inputs, top_k=queries.TOP_K), self.truth[name])


class _Point:
    """One implementation at one size."""

    def __init__(self, task: Task, name: str, process: WorkerProcess) -> None:
        self.task, self.name, self.process = task, name, process
        self.seconds: list[float] = []
        self.wrong: list[str] = []
        self.failed: str | None = None

    def start(self, made: _Made, progress: Progress) -> None:
        """Load and check."""
        progress(self.task.implementations[self.name].label)
        try:
            self.process.load(self.task, self.name, made.inputs)
            errors = self.process.ask("check", truth=str(made.truth[self.task.name]))["errors"]
            self.wrong = self.task.too_far(self.name, "float32", errors)
        except WorkerError as error:
            self.failed = str(error)

    def time(self) -> None:
        """Once more."""
        if self.failed is None:
            try:
                self.seconds.append(self.process.ask("time")["seconds"])
            except WorkerError as error:
                self.failed = str(error)

    def document(self, axis: Axis, shape: Shape) -> dict[str, Any]:
        """For JSON."""
        return {
            "axis": axis.name,
            "size": axis.size(shape),
            "name": f"{self.task.name}/{self.name}",
            "label": self.task.implementations[self.name].label,
            "seconds": min(self.seconds) if self.seconds else None,
            "wrong": self.wrong,
            "failed": self.failed,
        }


def _series(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Points that belong together, and the power that the time grows with."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for p in points:
        if p["seconds"] is not None:
            key = (p["axis"], p["name"])
            empty: dict[str, Any] = {"label": p["label"], "sizes": [], "seconds": []}
            series = found.setdefault(key, {"axis": p["axis"], "name": p["name"], **empty})
            series["sizes"].append(p["size"])
            series["seconds"].append(p["seconds"])
    for series in found.values():
        enough = len(series["sizes"]) > 1
        series["exponent"] = exponent(series["sizes"], series["seconds"]) if enough else None
    return list(found.values())


def lines(document: Document, width: int) -> list[str]:
    """A table per axis for the terminal."""
    out = [f"scaling: {document['title']}", *conditions(document)]
    for axis in ("vocab", "tokens"):
        series = [s for s in document["series"] if s["axis"] == axis]
        if not series:
            continue
        sizes = series[0]["sizes"]
        names = [f"{axis} {size:,}" for size in sizes] + ["time grows with the power"]
        columns: Columns = [("seconds", names)]
        for s in series:
            cells = [f"{t:.4f}" for t in s["seconds"]] + [""] * (len(sizes) - len(s["seconds"]))
            power = s["exponent"]
            columns.append((s["label"], [*cells, "" if power is None else f"{power:.3f}"]))
        out += ["", *table(columns, width)]
    for p in document["points"]:
        where = f"{p['label']}, {p['axis']} {p['size']:,}"
        out += [f"WRONG: {where}: {', '.join(p['wrong'])}"] if p["wrong"] else []
        out += [f"Failed: {where}: {p['failed']}"] if p["failed"] else []
    return out + (["Interrupted."] if document["interrupted"] else [])
