"""Ctrl-C and SIGTERM as a wish: finish the step, write a checkpoint, leave."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Notes the first SIGINT or SIGTERM; the second SIGINT interrupts at once, as ever.

    Attributes:
        signal: the one that came; None for none.

    >>> with Interrupts() as wish:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     wish.signal == signal.SIGTERM
    True
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
