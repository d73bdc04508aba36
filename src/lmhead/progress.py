"""Progress line of commands, and handling of Ctrl-C while modules are imported.

Progress is on standard error: one line that is rewritten on a terminal, plain lines elsewhere.
Imports nothing slow.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

_CLEAR = "\r\x1b[2K"


class Progress:
    """Report what a long computation is doing.

    Calling it shows a status, which on a terminal replaces the one before. `print` adds a line
    that stays. Leaving the `with` block, or `close`, erases the status.

    Args:
        stream: where to write; None for standard error, or nowhere if that is closed.
        plain: print each status as a line if the stream is not a terminal; otherwise it is dropped.

    >>> with Progress(sys.stdout, plain=True) as progress:
    ...     progress("loading")
    ...     progress.print("model loaded")
    loading
    model loaded
    """

    def __init__(self, stream: TextIO | None = None, *, plain: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream is not None and self._stream.isatty()
        self._plain = plain
        self._status_shown = False

    def __call__(self, status: str) -> None:
        """Show a status."""
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._write(_CLEAR + _cut(status, width))
            self._status_shown = True
        elif self._plain:
            self._write(status + "\n")

    def print(self, text: str) -> None:
        """Add a line that stays."""
        self.close()
        self._write(text + "\n")

    def close(self) -> None:
        """Erase the status."""
        if self._status_shown:
            self._write(_CLEAR)
            self._status_shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
        except OSError:  # the terminal or pipe is closed, which must not end the computation
            self._stream = None


def _cut(text: str, width: int) -> str:
    """Cut a text to a number of terminal columns; East Asian characters take two.

    >>> _cut("loading", 4), _cut("音乐会", 5)
    ('load', '音乐')
    """
    used = 0
    for index, character in enumerate(text):
        used += 1 + (unicodedata.east_asian_width(character) in "WF")
        if used > width:
            return text[:index]
    return text


_shown_on: ContextVar[Progress | None] = ContextVar("shown_on", default=None)


@contextmanager
def show_reads(progress: Progress) -> Iterator[None]:
    """Show on `progress` which file is being read, and how much of it, within this block."""
    token = _shown_on.set(progress)
    try:
        yield
    finally:
        _shown_on.reset(token)


def report_read(name: str, done: int, total: int) -> None:
    """Report that `done` of the `total` bytes of a file have been read.

    Does nothing outside of `show_reads`.

    >>> with show_reads(Progress(sys.stdout, plain=True)):
    ...     report_read("tokenizer.json", 0, 640_000)
    ...     report_read("model.safetensors", 135_000_000, 269_000_000)
    Reading tokenizer.json, 640 kB ...
    Reading model.safetensors: 50% of 269 MB
    """
    progress = _shown_on.get()
    if progress is None:
        return
    size = f"{total / 1e6:,.0f} MB" if total >= 1e6 else f"{total / 1e3:,.0f} kB"
    # Rounded down: 100% means that all has been read.
    part = f": {100 * done // max(total, 1)}% of {size}" if done else f", {size} ..."
    progress(f"Reading {name}{part}")


INTERRUPTED = 130


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """End the process with code 130, without a traceback, on Ctrl-C within this block.

    For imports: an interrupted one leaves a half-initialised module behind, and libraries may catch
    the exception and continue with it.

    Does nothing in other threads, and where SIGINT is ignored or has another handler.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    try:
        signal.signal(signal.SIGINT, _exit_now)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _exit_now(*_: object) -> None:
    os.write(2, b"\nInterrupted.\n")
    os._exit(INTERRUPTED)
