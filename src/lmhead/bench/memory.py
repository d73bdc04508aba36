"""How far a call makes the memory of a process grow.

Linux keeps the high-water mark of a process's resident memory, VmHWM, and lets the process reset
it; elsewhere `getrusage` tells the mark over the whole life of the process. Either way the process
must be a fresh one that has done nothing but make the inputs.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmhead.bench.task import Step

# In the environment of a process that is measured: the C library gives back every block of 128 KiB
# and more when it is freed, so that resident memory is memory in use.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Growth:
    """Peak growth of the process, in bytes.

    Attributes:
        first: of the first call: libraries that load themselves and code that is compiled count.
        later: of the second call; None where the system cannot tell.
        results: of what the call returned, e.g. gradients; the rest is temporary.
    """

    first: int
    later: int | None
    results: int

    @property
    def temporary(self) -> int | None:
        """What a call takes beside its results."""
        return None if self.later is None else max(0, self.later - self.results)


def peak_growth(step: Step) -> Growth | None:
    """Of two calls of `step` in this process; None where the system does not tell."""
    resettable = _reset()
    if not resettable and sys.platform == "win32":
        return None
    calls, size = [], 0
    for _ in range(2):
        gc.collect()
        _give_back()
        before = _status("VmRSS") if _reset() else _lifetime_peak()
        results = step()
        calls.append((_status("VmHWM") if resettable else _lifetime_peak()) - before)
        size = sum(t.numel() * t.element_size() for t in results.values())
        del results
    return Growth(calls[0], calls[1] if resettable else None, size)


def _reset() -> bool:
    """Set the high-water mark to the memory in use now, where Linux lets us."""
    try:
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _lifetime_peak() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status(key: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {key}")


def _give_back() -> None:
    """Have the C library return what is free, where it is glibc."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return
