"""Seconds of calls taken side by side, and the memory of one in a fresh process.

A round makes every call once, one after the other, so that a machine that slows down slows all of
them down; short calls are repeated within the round, and their mean counts. Ratios are taken within
a round, and the median over rounds is what is reported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.vocab_heads.heads import QUESTIONS, Calls
from benchmarks.wikitext import ROOT
from lmhead.bench.memory import ENVIRONMENT, peak_growth
from lmhead.bench.statistics import ratio, summary

_SHORT = 0.03  # seconds for which a short call is repeated in a round

Timing = dict[str, dict[str, Any]]


def side_by_side(
    calls: Mapping[str, Calls], *, seconds: float, least: int, most: int, baseline: str = "full"
) -> dict[str, Timing]:
    """Times of every question to everyone: by name, then by question.

    Args:
        calls: of each, by name.
        seconds: rounds are made until so many have passed,
        least: but at least so many,
        most: and at most so many.
        baseline: whose times the ratios are of.
    """
    everyone = [(name, question) for question in QUESTIONS for name in calls]
    for name, question in everyone:  # the first call does not count
        calls[name][question]()
    taken: dict[tuple[str, str], list[float]] = {pair: [] for pair in everyone}
    start = time.perf_counter()
    done = 0
    while done < least or (done < most and time.perf_counter() - start < seconds):
        for name, question in everyone:
            taken[name, question].append(_mean(calls[name][question]))
        done += 1
    found: dict[str, Timing] = {name: {} for name in calls}
    for (name, question), values in taken.items():
        found[name][question] = {**asdict(summary(values)), "seconds": values}
        if baseline in calls:
            times = ratio(taken[baseline, question], values)
            found[name][question]["faster"] = times.median
    return found


def _mean(call: Callable[[], object]) -> float:
    """Seconds of a call: the mean of as many as fit into a moment."""
    start = time.perf_counter()
    count = 0
    while count == 0 or time.perf_counter() - start < _SHORT:
        call()
        count += 1
    return (time.perf_counter() - start) / count


def memory(kind: str, file: Path) -> dict[str, Any] | None:
    """Peak growth of a training step of the head in a file, measured in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, kind, str(file), str(torch.get_num_threads())],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
    )
    found: dict[str, Any] | None = json.loads(done.stdout.splitlines()[-1])
    return found


def main(kind: str, file: str, threads: str) -> None:
    """What the fresh process does."""
    from benchmarks.vocab_heads.heads import gradients
    from benchmarks.vocab_heads.training import load

    torch.set_num_threads(int(threads))
    output, hidden, targets = load(kind, Path(file))
    growth = peak_growth(lambda: gradients(output, hidden, targets))
    print(json.dumps(growth and {**asdict(growth), "temporary": growth.temporary}))


if __name__ == "__main__":
    main(*sys.argv[1:])
