"""How far ahead the screen prefetches memory: measured once per machine.

One pass over a copy reads it in a stream. On some machines a software prefetch makes that faster,
on others it costs a third of the speed. So the first pass over a large copy measures a few
distances, a fraction of a second, and keeps the best in `prefetch.json` of the cache folder.
`LMHEAD_PREFETCH=BYTES`, or `BYTES,BYTES` for copies of 8 and of 4 bits, sets it instead; 0 is no
prefetch.

Answers do not depend on it.
"""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from lmhead.sweep import kernels
from lmhead.user_cache import cache_folder

DISTANCES = (0, 1024, 2048)
"""Bytes that are tried."""
LARGE = 32 << 20
"""Bytes of a copy from which on it is not in a processor's cache between two passes."""
_ROUNDS = 4


@cache
def choose() -> tuple[int, int]:
    """Set the distances for copies of 8 and of 4 bits, and return them; once per process."""
    core = kernels.core
    if core is None:
        return (0, 0)
    found = from_environment() or _read()
    if found is None:
        found = measure()
        _write(found)
    core.set_prefetch(*found)
    return found


def from_environment() -> tuple[int, int] | None:
    """Return what LMHEAD_PREFETCH says, None if it is not set.

    Raises:
        ValueError: it is not one or two numbers from 0 to 65536.
    """
    text = os.environ.get("LMHEAD_PREFETCH", "")
    if not text:
        return None
    parts = text.split(",")
    numbers = [int(p) for p in parts if p.strip().isdigit() and int(p) <= 65536]
    if len(numbers) != len(parts) or len(parts) > 2:
        raise ValueError(
            "LMHEAD_PREFETCH must be one or two numbers of bytes from 0 to 65536, as in "
            f"'0,2048'; got {text!r}"
        )
    return numbers[0], numbers[-1]


def measure(nbytes: int = 2 * LARGE) -> tuple[int, int]:
    """Return the fastest distances for copies of 8 and of 4 bits, by passes over memory."""
    core, width = kernels.compiled(), 2048
    vocab = nbytes // width
    whole = torch.full((vocab, width), 1, dtype=torch.int8)
    kinds = ((whole, None), (None, whole.view(torch.uint8).view(2 * vocab, width // 2)))
    before, best = core.prefetch(), []
    for kind in kinds:
        rows = vocab if kind[0] is not None else 2 * vocab
        lead, scales = torch.zeros(rows, 0, dtype=torch.int16), torch.ones(rows)
        states, one = torch.ones(1, width, dtype=torch.int16), torch.ones(1, dtype=torch.float64)
        lead_states = torch.zeros(1, 0, dtype=torch.int16)
        approx, top = torch.empty(1, rows), torch.empty(1, -(-rows // core.SCREEN_BLOCK))
        given = (*kind, lead, scales, scales, None, states, lead_states, one, one, approx, top)
        times = dict.fromkeys(DISTANCES, float("inf"))
        for _ in range(_ROUNDS):
            for distance in DISTANCES:  # in turn: whatever else the machine does meets all of them
                core.set_prefetch(distance, distance)
                begin = time.perf_counter()
                core.screen_products(*given, kernels.threads())
                times[distance] = min(times[distance], time.perf_counter() - begin)
        # A distance has to gain something: no prefetch is what other programs suffer least from.
        fastest = min(times, key=lambda d: times[d])
        best.append(fastest if times[fastest] < 0.97 * times[0] else 0)
    core.set_prefetch(*before)
    return best[0], best[1]


def _file() -> Path:
    return cache_folder() / "prefetch.json"


def _machine() -> str:
    """Return the processor and the instruction set, by which a measurement is kept."""
    name = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        line = next(line for line in lines if line.startswith("model name"))
        name = line.partition(":")[2].strip()
    return f"{name}, {kernels.compiled().instruction_set()}, {kernels.threads()} threads"


def _read() -> tuple[int, int] | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        whole, nibbles = json.loads(_file().read_text(encoding="utf-8"))[_machine()]
        if whole in DISTANCES and nibbles in DISTANCES:
            return whole, nibbles
    return None


def _write(found: tuple[int, int]) -> None:
    known = {}
    with suppress(OSError, ValueError):
        known = json.loads(_file().read_text(encoding="utf-8"))
    known = known if isinstance(known, dict) else {}
    with suppress(OSError):  # a folder that cannot be written to is measured again next time
        _file().parent.mkdir(parents=True, exist_ok=True)
        part = _file().with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(known | {_machine(): found}, indent=1), encoding="utf-8")
        part.replace(_file())
