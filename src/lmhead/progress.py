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
