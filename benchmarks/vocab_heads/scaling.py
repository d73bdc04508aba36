"""Cost against the size of the vocabulary, 10,000 to 1,000,000 words that follow Zipf's law.

    python -m benchmarks.vocab_heads.scaling     (8 minutes on two cores)

A training step, the log-probability of one word, and the best word of one state. At every size all
heads are alive at once and timed side by side. They are as they start: their biases know how
frequent words are, their weights are random, and so are the hidden states. Best words of a trained
model are found faster; `training` has these.

The results are written after each size, and an interrupted run goes on with the next.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.vocab_heads.heads import HEADS, Output, check, questions
from benchmarks.vocab_heads.report import plot_scaling, scaling_table
from benchmarks.vocab_heads.timing import Timing, side_by_side
from benchmarks.wikitext import ROOT
from lmhead import LMHead
from lmhead.bench.machine import describe
from lmhead.bench.report import Document, write_json
from lmhead.sweep import native
from lmhead.vocab.frequencies import zipf

SIZES = (10_000, 33_278, 100_000, 333_333, 1_000_000)
KINDS = tuple(kind for kind in HEADS if kind != "tied")  # which does what full does


def times(vocab: int, settings: dict[str, Any]) -> dict[str, Timing]:
    """Of all questions to all heads at one size."""
    torch.manual_seed(0)
    frequencies = zipf(vocab)
    width, tokens, samples = (settings[name] for name in ("width", "tokens", "samples"))
    hidden = torch.randn(tokens, width)
    targets = frequencies.multinomial(tokens, replacement=True)
    calls = {}
    weight: Tensor | None = None  # one for all heads that have a row per word
    for kind in KINDS:
        output = Output(kind, width, frequencies, samples=samples, weight=weight)
        if isinstance(output.head, LMHead):
            weight = output.head.weight
        check(output, hidden[:1], targets[:1])
        calls[kind] = questions(output, hidden, targets)
    return side_by_side(calls, seconds=settings["seconds"], least=3, most=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    out = ROOT / "benchmarks" / "results" / "vocab-scaling.json"
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--fresh", action="store_true", help="measure again what is in --out")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="of V")
    parser.add_argument("--threads", type=int)
    for name, value in {"width": 128, "tokens": 1024, "samples": 1024}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--seconds", type=float, default=45.0, help="at each size; default 45")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    settings = {name: getattr(given, name) for name in ("width", "tokens", "samples", "seconds")}
    settings["threads"] = torch.get_num_threads()
    points: dict[int, Any] = {}
    if given.out.is_file() and not given.fresh:
        old = json.loads(given.out.read_text(encoding="utf-8"))
        if old["settings"] == settings:
            points = {point["vocab"]: point for point in old["points"]}
    for vocab in given.sizes:
        if vocab in points:
            print(f"V {vocab:9,} was measured before: {given.out}", flush=True)
            continue
        start = time.perf_counter()
        points[vocab] = {"vocab": vocab, "timing": times(vocab, settings)}
        document: Document = {
            "benchmark": "vocab-scaling",
            "title": "cost against the vocabulary",
            "native": native.core is not None,
            **describe(torch.get_num_threads()),
            "settings": settings,
            "points": [points[v] for v in sorted(points)],
        }
        write_json(document, given.out)
        plot_scaling(document, given.out.with_suffix(""))
        print(f"V {vocab:9,} took {time.perf_counter() - start:.0f} s", flush=True)
        print("\n".join(scaling_table(points[vocab])), flush=True)
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
