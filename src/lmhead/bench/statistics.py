"""Times of rounds in few numbers: best, median, spread, and ratios taken within a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True)
class Summary:
    """Of a list of numbers.

    Attributes:
        best: the least.
        median: the middle.
        spread: half the distance between the quartiles.
    """

    best: float
    median: float
    spread: float


def summary(values: Sequence[float]) -> Summary:
    """Best, median and spread.

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
    """Of two lists that were taken in the same rounds; a round that only one has does not count.

    >>> ratio([1.0, 2.0, 1.2], [2.0, 4.0])
    Summary(best=0.5, median=0.5, spread=0.0)
    """
    return summary([a / b for a, b in zip(values, baseline, strict=False)])


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The power of the size that the time grows with: the slope of log time over log size.

    >>> round(exponent([1, 2, 4], [3, 6, 12]), 6)
    1.0
    """
    x, y = [math.log(s) for s in sizes], [math.log(s) for s in seconds]
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True))
    return above / sum((a - x_mean) ** 2 for a in x)
