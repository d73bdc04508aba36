"""What a run says of itself: a line that changes on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

_BAR = 20


class Progress:
    """Reports on standard error.

    Args:
        steps: of the whole run.
        stream: where to write; None for standard error.

    >>> progress = Progress(100, stream=sys.stdout)
    >>> progress.step(50, 2.345, 12_000.0, left=90.0)
    step 50/100   loss 2.3450   12,000 tokens/s   1:30 left
    """

    def __init__(self, steps: int, stream: TextIO | None = None) -> None:
        self.steps = steps
        self._stream = sys.stderr if stream is None else stream
        self._changes = self._stream.isatty()
        self._open = False  # whether a line is being changed
        self._shown = 0.0

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._open:
            self._write("\r\x1b[2K")
            self._open = False
        self._write(text + "\n")

    def step(self, step: int, loss: float, speed: float, left: float) -> None:
        """Where the run is; `left` in seconds."""
        facts = f"loss {loss:.4f}   {speed:,.0f} tokens/s   {clock(left)} left"
        if not self._changes:
            self.say(f"step {step}/{self.steps}   {facts}")
            return
        now = time.monotonic()
        if now - self._shown < 0.1 and step < self.steps:
            return
        self._shown = now
        done = "█" * round(_BAR * step / self.steps)
        line = f"{done:·<{_BAR}} {step}/{self.steps}   {facts}"
        width = shutil.get_terminal_size().columns - 1
        self._write(f"\r\x1b[2K{line[:width]}")
        self._open = True

    def sample(self, text: str) -> None:
        """Text that the model made, behind a bar; a terminal must not obey what is in it."""
        shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
        self.say("\n".join(f"  │ {line}" for line in shown.split("\n")))

    def close(self) -> None:
        """End the line that is being changed."""
        if self._open:
            self._write("\n")
            self._open = False

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


class Silence(Progress):
    """Says nothing."""

    def __init__(self) -> None:
        super().__init__(1)

    def say(self, text: str) -> None:
        """Nothing."""

    def step(self, step: int, loss: float, speed: float, left: float) -> None:
        """Nothing."""


def clock(seconds: float) -> str:
    """Seconds as people read them.

    >>> clock(5), clock(65), clock(3700)
    ('0:05', '1:05', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
