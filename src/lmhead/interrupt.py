"""Ctrl-C while modules are loading.

An interrupted import leaves a half-initialised module behind, and libraries may catch the exception
and continue with it. So while modules load, Ctrl-C ends the process at once, with the exit code
that shells use for it. Imports nothing that takes time.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """End the process with code 130, without a traceback, on Ctrl-C within this block.

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
