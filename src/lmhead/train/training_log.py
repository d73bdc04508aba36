"""The log of a run: JSON lines, the loss curve drawn from them, and reading while it is written.

    {"step": 10, "loss": 3.9, "rate": 0.0001, "norm": 2.1, "tokens_per_second": 41000, ...}
    {"step": 250, "valid": {"loss": 2.5}}
    {"step": 250, "sample": "..."}

A run that is resumed from step n keeps the lines up to n: apart from the times, the log is that of
an uninterrupted run.

`follow` returns the lines since the last call. An offset alone is not enough: a resumed run
rewrites its log, shorter, and it may have grown past the offset by the next call. So each call also
returns a hash of the bytes before the offset; if they differ the next time, reading starts over.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import time
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lmhead.train.run_files import temporary_name, write_text

MAX_BYTES = 1 << 18  # read by one call of `follow`
_HASHED = 1 << 10  # bytes before the offset: a few lines, unique by the times in them
_MAX_SAMPLE = 10_000  # characters
_NUMBERS = ("loss", "rate", "norm", "tokens", "tokens_per_second", "seconds")

Line = dict[str, Any]


class TrainingLog:
    """A log to append to, from a step on.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log.jsonl"
    >>> with TrainingLog(path, 0) as log:
    ...     log.write(step=1, loss=4.0)
    ...     log.write(step=2, loss=3.0)
    >>> with TrainingLog(path, 1) as log:  # resume from step 1
    ...     read_log(path)
    [{'step': 1, 'loss': 4.0}]
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in read_log(path) if line["step"] <= step] if step else []
        write_text(path, "".join(map(_encode, kept)))
        self._file = path.open("a", encoding="utf-8")

    def write(self, **line: Any) -> None:
        """Append a line and flush it to the operating system."""
        self._file.write(_encode(line))
        self._file.flush()

    def sync(self) -> None:
        """Flush the file to disk."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> TrainingLog:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._file.close()
        except OSError:
            if error is None:
                raise


def read_log(path: Path) -> list[Line]:
    """Return the lines of a log; skip a line that a killed run left unfinished."""
    texts = path.read_bytes().split(b"\n") if path.exists() else []
    return [line for text in texts if (line := _decode(text)) is not None]


def _decode(text: bytes) -> Line | None:
    """Return a line; None if it is not one of a log."""
    try:
        line = json.loads(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def draw_curve(log: Path, picture: Path) -> bool:
    """Draw the losses of a log as PNG; return False if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    lines = _parse(log.read_bytes())
    train = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    metrics = [(line["step"], line.get("valid", {})) for line in lines]
    valid = [(step, values["loss"]) for step, values in metrics if "loss" in values]
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
    temporary = temporary_name(picture)
    figure.savefig(temporary, format="png")
    os.replace(temporary, picture)
    return True


def _encode(line: Line) -> str:
    return json.dumps(line, ensure_ascii=False) + "\n"


class News(NamedTuple):
    """New lines of a log."""

    start: int  # offset of the first line; 0 if reading starts over or has just begun
    # end, mark: offset and hash to pass to the next call
    end: int
    mark: str
    more: bool  # whether more lines are available already, beyond `MAX_BYTES`
    age: float | None  # seconds since the last write; None without a file
    lines: list[dict[str, Any]]  # the complete lines, reduced to the known fields


def follow(log: Path, end: int = 0, mark: str = "") -> News:
    r"""Return what is new in a log that may be growing, truncated, replaced or absent.

    >>> import tempfile
    >>> log = Path(tempfile.mkdtemp()) / "log.jsonl"
    >>> follow(log).lines
    []
    >>> _ = log.write_text('{"step": 10, "loss": 4.5}\n{"step": 20, "lo')
    >>> news = follow(log)
    >>> news.lines
    [{'step': 10, 'loss': 4.5}]
    >>> _ = log.write_text('{"step": 10, "loss": 4.5}\n{"step": 20, "loss": 4.0}\n')
    >>> follow(log, news.end, news.mark).lines
    [{'step': 20, 'loss': 4.0}]
    """
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer; only regular files are read.
        handle = os.open(log, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return News(0, 0, "", False, None, [])
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode):
        os.close(handle)
        return News(0, 0, "", False, None, [])
    with os.fdopen(handle, "rb") as file:
        start = end if 0 < end <= facts.st_size and _hash(file, end) == mark else 0
        file.seek(start)
        new = file.read(MAX_BYTES)
        cut = new.rfind(b"\n") + 1
        if not cut and len(new) == MAX_BYTES:
            cut = MAX_BYTES  # one endless line: not written by a run; skip it
        age = max(0.0, time.time() - facts.st_mtime)
        end = start + cut
        more = len(new) == MAX_BYTES
        return News(start, end, _hash(file, end), more, age, _parse(new[:cut]))


def _hash(file: BinaryIO, end: int) -> str:
    file.seek(max(0, end - _HASHED))
    return hashlib.blake2b(file.read(min(end, _HASHED)), digest_size=8).hexdigest()


def _parse(text: bytes) -> list[dict[str, Any]]:
    lines = (_known_fields(line) for line in text.split(b"\n"))
    return [line for line in lines if line is not None]


def _known_fields(text: bytes) -> dict[str, Any] | None:
    """Return the known fields of a line; None if it is not a log line."""
    line = _decode(text)
    if line is None:
        return None
    kept: dict[str, Any] = {name: line[name] for name in _NUMBERS if _is_number(line.get(name))}
    if isinstance(line.get("valid"), dict):
        metrics = {str(k): v for k, v in line["valid"].items() if _is_number(v)}
        kept |= {"valid": metrics} if metrics else {}
    if isinstance(line.get("sample"), str):
        kept["sample"] = line["sample"][:_MAX_SAMPLE]
    return {"step": line["step"], **kept}


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 2**53 if isinstance(value, int) else math.isfinite(value)
