"""How Ctrl-C ends a program that is still loading.

An import that is interrupted leaves half a module behind, and libraries may catch the exception and
go on with it. So while modules are loaded, Ctrl-C ends the process at once, with the code that
shells have for it. Nothing is imported here that costs time.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Within this block Ctrl-C ends the process with code 130, and no traceback.

    Where somebody else handles or ignores the signal, and in other threads, nothing changes.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    try:
        signal.signal(signal.SIGINT, _leave)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(*_: object) -> None:
    os.write(2, b"\nInterrupted.\n")
    os._exit(INTERRUPTED)
