"""Interleaved rounds of measurements, and their summary: best, median, spread, ratios.

A round measures every item once, one after the other, so that a machine that slows down slows all
of them down. Ratios are taken within a round; the median over the rounds is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import linear_regression, median, quantiles
from time import perf_counter
from typing import Protocol, TypeVar

# Called with what is being done.
Progress = Callable[[str], None]
Call = Callable[[], object]
_Key = TypeVar("_Key", str, tuple[str, str])

_SHORT = 0.03  # seconds for which `mean_seconds` repeats a short call


class Measurable(Protocol):
    """Something that is measured once per round."""

    @property
    def label(self) -> str:
        """Shown as progress."""

    def measure(self) -> None:
        """Take one measurement and keep it."""


def interleave(
    items: Sequence[Measurable],
    rounds: int,
    progress: Progress,
    *,
    seconds: float = math.inf,
    at_least: int = 1,
) -> None:
    """Measure every item once per round; each round begins with another item.

    Args:
        items: they keep their measurements, so that an interrupt loses nothing.
        rounds: maximum number.
        progress: called before each measurement.
        seconds: no new round begins after this time,
        at_least: except to make this number of rounds.
    """
    start = perf_counter()
    for r in range(rounds):
        if r >= at_least and perf_counter() - start > seconds:
            return
        first = r % max(1, len(items))
        for item in (*items[first:], *items[:first]):
            progress(f"round {r + 1} of {rounds}: {item.label}")
            item.measure()


def one_call(call: Call) -> float:
    """Return the seconds of one call."""
    start = perf_counter()
    call()
    return perf_counter() - start


def best_of_four(call: Call) -> float:
    """Return the seconds of the fastest of four calls."""
    return min(one_call(call) for _ in range(4))


def mean_seconds(call: Call) -> float:
    """Return the mean seconds of as many calls as fit into 30 ms, at least one."""
    start, count = perf_counter(), 0
    while count == 0 or perf_counter() - start < _SHORT:
        call()
        count += 1
    return (perf_counter() - start) / count


@dataclass
class _TimedCall:
    label: str
    call: Call
    clock: Callable[[Call], float]
    seconds: list[float] = field(default_factory=list)

    def measure(self) -> None:
        self.seconds.append(self.clock(self.call))


def time_calls(
    calls: Mapping[_Key, Call],
    rounds: int,
    progress: Progress,
    *,
    clock: Callable[[Call], float] = one_call,
    seconds: float = math.inf,
    at_least: int = 1,
) -> dict[_Key, list[float]]:
    """Return the seconds of calls in this process, by rounds; a first call each is not counted."""
    timed = {key: _TimedCall(_label(key), call, clock) for key, call in calls.items()}
    for call in calls.values():
        call()
    interleave(list(timed.values()), rounds, progress, seconds=seconds, at_least=at_least)
    return {key: item.seconds for key, item in timed.items()}


def _label(key: str | tuple[str, ...]) -> str:
    return key if isinstance(key, str) else ", ".join(key)


@dataclass(frozen=True)
class Summary:
    """Best, median, and half the distance between the quartiles."""

    best: float
    median: float
    spread: float


def summary(values: Sequence[float]) -> Summary:
    """Summarize a list of numbers.

    >>> summary([1.0, 2.0, 3.0, 4.0, 9.0])
    Summary(best=1.0, median=3.0, spread=1.0)
    >>> summary([2.0])
    Summary(best=2.0, median=2.0, spread=0.0)
    """
    if len(values) == 1:
        return Summary(values[0], values[0], 0.0)
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Summary(min(values), median(values), (high - low) / 2)


def ratio(values: Sequence[float], baseline: Sequence[float]) -> Summary:
    """Summarize the ratios within rounds; a round that only one list has is not counted.

    >>> ratio([1.0, 2.0, 1.2], [2.0, 4.0])
    Summary(best=0.5, median=0.5, spread=0.0)
    """
    return summary([a / b for a, b in zip(values, baseline, strict=False)])


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the power of the size that the time grows with: the slope of log time over log size.

    >>> round(exponent([1, 2, 4], [3, 6, 12]), 6)
    1.0
    """
    x, y = [math.log(s) for s in sizes], [math.log(s) for s in seconds]
    return linear_regression(x, y).slope
