"""Peak growth of a process's memory during a call.

Linux keeps the peak of a process's resident memory (VmHWM) and lets the process reset it; elsewhere
`getrusage` gives the peak over the whole life of the process. Measure in a fresh process that has
done nothing but create the inputs.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

if sys.platform != "win32":
    import resource

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Growth:
    """Peak growth of the process, in bytes."""

    first: int  # in the first call, including loaded libraries and compiled code
    later: int | None  # in the second call; None if the system does not report it
    results: int  # size of the tensors that the call returned, e.g. gradients

    @property
    def temporary(self) -> int | None:
        """Growth without the results."""
        return None if self.later is None else max(0, self.later - self.results)


def peak_growth(step: Callable[[], Mapping[str, Tensor]]) -> Growth | None:
    """Return the growth in two calls of `step`; None if the system does not report it."""
    if not _reset() and sys.platform == "win32":
        return None
    results, first = call_with_growth(step)
    del results  # before the second call begins
    results, later = call_with_growth(step)
    size = sum(tensor.numel() * tensor.element_size() for tensor in results.values())
    return Growth(first, later if _reset() else None, size)


def call_with_growth(call: Callable[[], _T]) -> tuple[_T, int]:
    """Return the result of a call, and the peak growth of the process in bytes."""
    gc.collect()
    with suppress(AttributeError, OSError, TypeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
    if _reset():
        before = _status("VmRSS")
        result = call()
        return result, _status("VmHWM") - before
    before = _lifetime_peak()
    result = call()
    return result, _lifetime_peak() - before


def _reset() -> bool:
    """Set the peak to the memory in use now; False where the system has no such reset."""
    try:
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _lifetime_peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status(key: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {key}")
