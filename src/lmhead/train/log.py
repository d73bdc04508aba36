"""The log of a run: one JSON object per line, and the loss curve drawn from it.

    {"step": 10, "loss": 3.9, "rate": 0.0001, "norm": 2.1, "tokens_per_second": 41000, ...}
    {"step": 250, "valid": {"loss": 2.5}}
    {"step": 250, "sample": "..."}

A run that goes on from step n keeps the lines up to n, so that the log is that of a run which was
never disturbed (but for the times in it).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from lmhead.train.files import part_of, write_text

Line = dict[str, Any]


class Log:
    """A log to append to.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log.jsonl"
    >>> with Log(path, 0) as log:
    ...     log.write(step=1, loss=4.0)
    ...     log.write(step=2, loss=3.0)
    >>> with Log(path, 1) as log:  # go on from step 1
    ...     read_log(path)
    [{'step': 1, 'loss': 4.0}]
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in read_log(path) if line["step"] <= step] if step else []
        write_text(path, "".join(map(_line, kept)))
        self._file = path.open("a", encoding="utf-8")

    def write(self, **line: Any) -> None:
        """Append a line; whole lines reach the file."""
        self._file.write(_line(line))
        self._file.flush()

    def sync(self) -> None:
        """Flush the file to the disk."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
        except OSError:
            if error is None:
                raise


def read_log(path: Path) -> list[Line]:
    """The whole lines of a log; a line that a killed run left unfinished is passed over."""
    lines: list[Line] = []
    if path.exists():
        for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines


def draw_curve(log: Path, picture: Path) -> bool:
    """Draw the losses of a log as PNG; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    lines = read_log(log)
    train = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    valid = [(line["step"], line["valid"]["loss"]) for line in lines if line.get("valid")]
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for points, label, style in ((train, "training", "-"), (valid, "validation", "o-")):
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1.2, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.grid(alpha=0.3)
    if train or valid:
        axes.legend(frameon=False)
    part = part_of(picture)
    figure.savefig(part, format="png")
    os.replace(part, picture)
    return True


def _line(line: Line) -> str:
    return json.dumps(line, ensure_ascii=False) + "\n"
