"""How the screen reads its copy: measured once per machine.

One pass over a copy reads it in a stream, and memory is the limit. Some machines read faster if
several parts of a block are read side by side (`streams`), some with a software prefetch, which on
others costs a third of the speed. So the first pass over a large copy tries a few settings, about
a third of a second, and keeps the best in `calibration.json` of the cache folder. On a busy
machine, where other programs decide which is the fastest, it is kept for this process only.

`LMHEAD_STREAMS=N` (1, 2 or 4) and `LMHEAD_PREFETCH=BYTES` (0: none) set them instead; two numbers,
as in `0,2048`, are for copies of 8 and of 4 bits. Answers do not depend on either.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from lmhead.screen import huge_pages
from lmhead.sweep import kernels
from lmhead.sweep.cache_size import cache_bytes
from lmhead.user_cache import cache_folder


class Setting(NamedTuple):
    """How one pass reads: parts of a block side by side, bytes of prefetch."""

    streams: int
    prefetch: int


Settings = tuple[Setting, Setting]
"""For copies of 8 and of 4 bits."""

CANDIDATES = (
    *(Setting(2, 0), Setting(1, 0), Setting(4, 0)),
    *(Setting(1, 1024), Setting(2, 1024), Setting(1, 4096), Setting(2, 4096)),
)
"""The settings that are measured; the first is kept unless another is faster."""
LARGE = min(cache_bytes(3), 64 << 20)
"""Bytes of a copy from which on it is not in a processor's cache between two passes."""
_SECONDS = 0.15  # of passes over each kind of copy; each setting is tried at least once
_GAIN = 0.97  # of the time of the first candidate


@cache
def choose() -> Settings:
    """Set how copies of 8 and of 4 bits are read, and return it; once per process."""
    core = kernels.core_with("set_streams")
    if core is None:
        return (CANDIDATES[0], CANDIDATES[0])
    streams = _from_environment("LMHEAD_STREAMS", (1, 2, 4), "of streams, 1, 2 or 4, as in '1,2'")
    prefetch = _from_environment(
        "LMHEAD_PREFETCH", range(65537), "of bytes from 0 to 65536, as in '0,2048'"
    )
    found = None
    if streams is None or prefetch is None:
        found = _read()
        if found is None:
            busy = _is_busy()
            found = measure()
            if not busy:
                _write(found)
        streams = streams or (found[0].streams, found[1].streams)
        prefetch = prefetch or (found[0].prefetch, found[1].prefetch)
    core.set_streams(*streams)
    core.set_prefetch(*prefetch)
    return Setting(streams[0], prefetch[0]), Setting(streams[1], prefetch[1])


def _is_busy() -> bool:
    """Return whether the load is more than this process's threads and half a processor."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5 + kernels.threads()


def _from_environment(name: str, allowed: Iterable[int], meaning: str) -> tuple[int, int] | None:
    text = os.environ.get(name, "")
    if not text:
        return None
    parts = text.split(",")
    numbers = [int(p) for p in parts if p.strip().isdigit() and int(p) in allowed]
    if len(numbers) != len(parts) or len(parts) > 2:
        raise ValueError(f"{name} must be one or two numbers {meaning}; got {text!r}")
    return numbers[0], numbers[-1]


def measure(nbytes: int = 3 * LARGE) -> Settings:
    """Return the fastest settings for copies of 8 and of 4 bits, by passes over memory."""
    core, width = kernels.compiled(), 2048
    vocab = nbytes // width
    whole = huge_pages.empty(vocab, width, dtype=torch.int8).fill_(1)
    kinds = ((whole, None), (None, whole.view(torch.uint8).view(2 * vocab, width // 2)))
    before, best = (core.streams(), core.prefetch()), []
    for kind in kinds:
        rows = vocab if kind[0] is not None else 2 * vocab
        lead, scales = torch.zeros(rows, 0, dtype=torch.int16), torch.ones(rows)
        states, one = torch.ones(1, width, dtype=torch.int16), torch.ones(1, dtype=torch.float64)
        lead_states = torch.zeros(1, 0, dtype=torch.int16)
        approx, top = torch.empty(1, rows), torch.empty(1, -(-rows // core.SCREEN_BLOCK))
        weights = (*kind, lead, scales, scales, None)
        given = (*weights, states, lead_states, one, one, None, approx, top)

        def one_pass(given: tuple[object, ...] = given) -> None:
            core.screen_products(*given, kernels.threads())

        best.append(_fastest(one_pass))
    core.set_streams(*before[0])
    core.set_prefetch(*before[1])
    return best[0], best[1]


def _fastest(one_pass: Callable[[], None]) -> Setting:
    core = kernels.compiled()
    times = dict.fromkeys(CANDIDATES, float("inf"))
    one_pass()
    end = time.perf_counter() + _SECONDS
    while True:
        for setting in CANDIDATES:  # interleaved: other load affects all alike
            core.set_streams(setting.streams, setting.streams)
            core.set_prefetch(setting.prefetch, setting.prefetch)
            begin = time.process_time()  # other programs may run meanwhile
            one_pass()
            times[setting] = min(times[setting], time.process_time() - begin)
        if time.perf_counter() > end:
            fastest = min(times, key=lambda s: times[s])
            return fastest if times[fastest] < _GAIN * times[CANDIDATES[0]] else CANDIDATES[0]


def _file() -> Path:
    return cache_folder() / "calibration.json"


def _machine() -> str:
    """Return the processor and the instruction set, by which a measurement is kept."""
    name = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        line = next(line for line in lines if line.startswith("model name"))
        name = line.partition(":")[2].strip()
    return f"{name}, {kernels.compiled().instruction_set()}, {kernels.threads()} threads"


def _read() -> Settings | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(_file().read_text(encoding="utf-8"))[_machine()]
        whole, nibbles = (Setting(*setting) for setting in kept)
        if whole in CANDIDATES and nibbles in CANDIDATES:
            return whole, nibbles
    return None


def _write(found: Settings) -> None:
    known = {}
    with suppress(OSError, ValueError):
        known = json.loads(_file().read_text(encoding="utf-8"))
    known = known if isinstance(known, dict) else {}
    with suppress(OSError):  # a folder that cannot be written to is measured again next time
        _file().parent.mkdir(parents=True, exist_ok=True)
        part = _file().with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(known | {_machine(): found}, indent=1), encoding="utf-8")
        part.replace(_file())
