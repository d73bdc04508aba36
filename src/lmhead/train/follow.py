"""Read a log while it is being written: what is new since the last look, and no more.

In:  the path of a log, how far it was read, and a mark of what was read.
Out: `News`, the whole lines that came since.

A place in the file alone does not do: a run that goes on from a checkpoint writes its log anew,
shorter, and it may have grown past the place by the next look. So each look gives a mark, a hash
of the bytes before the place. If they are other bytes now, the reading starts over.
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

MOST_BYTES = 1 << 18  # of one look
_MARKED = 1 << 10  # bytes under a mark: a few lines, and their times make them unlike all others
_LONGEST = 10_000  # characters of sample text
_NUMBERS = ("loss", "rate", "norm", "tokens", "tokens_per_second", "seconds")


class News(NamedTuple):
    """What a look found.

    Attributes:
        start: where these lines begin; 0 if the reading starts over, or has just begun.
        end, mark: for the next look.
        more: whether there is more already, beyond `MOST_BYTES`.
        age: seconds since something was written; None without a file.
        lines: whole lines, as objects that hold nothing but what a log has.
    """

    start: int
    end: int
    mark: str
    more: bool
    age: float | None
    lines: list[dict[str, Any]]


def follow(log: Path, end: int = 0, mark: str = "") -> News:
    r"""What is new in a log that may be growing, cut short, replaced or absent.

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
        # A pipe of that name is opened without waiting for who writes to it, and then left alone.
        handle = os.open(log, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return News(0, 0, "", False, None, [])
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode):
        os.close(handle)
        return News(0, 0, "", False, None, [])
    with os.fdopen(handle, "rb") as file:
        start = end if 0 < end <= facts.st_size and _mark(file, end) == mark else 0
        file.seek(start)
        new = file.read(MOST_BYTES)
        cut = new.rfind(b"\n") + 1
        if not cut and len(new) == MOST_BYTES:
            cut = MOST_BYTES  # one endless line: it is no line of ours, and is passed over
        age = max(0.0, time.time() - facts.st_mtime)
        there = start + cut
        more = len(new) == MOST_BYTES
        return News(start, there, _mark(file, there), more, age, _lines(new[:cut]))


def _mark(file: BinaryIO, end: int) -> str:
    file.seek(max(0, end - _MARKED))
    return hashlib.blake2b(file.read(min(end, _MARKED)), digest_size=8).hexdigest()


def _lines(text: bytes) -> list[dict[str, Any]]:
    found = (_line(line) for line in text.split(b"\n"))
    return [line for line in found if line is not None]


def _line(text: bytes) -> dict[str, Any] | None:
    """What is known of a line; None if it is none of a log."""
    try:
        line = json.loads(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return None
    kept: dict[str, Any] = {name: line[name] for name in _NUMBERS if _is_number(line.get(name))}
    if isinstance(line.get("valid"), dict):
        figures = {str(k): v for k, v in line["valid"].items() if _is_number(v)}
        kept |= {"valid": figures} if figures else {}
    if isinstance(line.get("sample"), str):
        kept["sample"] = line["sample"][:_LONGEST]
    return {"step": line["step"], **kept}


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 2**53 if isinstance(value, int) else math.isfinite(value)
