"""Cost of heads against the vocabulary: 10,000 to 1,000,000 tokens that follow Zipf's law.

Eight minutes on two cores. A training step, the log-probability of one token, and the argmax of one
row. At every size all heads exist at once and are timed in interleaved rounds. They are untrained:
biases are the log frequencies, weights and hidden states are random. The argmax of a trained model
is found faster; `vocab-training` measures that.

The results are written after each size, and an interrupted run is resumed.
"""

from __future__ import annotations

import json
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks import report
from benchmarks import vocab_heads as heads
from benchmarks.plots import LINES, Figure, label, new_figure
from benchmarks.report import Document
from benchmarks.runner import Run, benchmark, integer
from benchmarks.timing import Progress
from lmhead import LMHead
from lmhead.vocab.frequencies import zipf

SIZES = (10_000, 33_278, 100_000, 333_333, 1_000_000)
KINDS = tuple(kind for kind in heads.HEADS if kind != "tied")  # tied takes the time of full


def time_size(vocab: int, settings: dict[str, Any], progress: Progress) -> dict[str, heads.Timing]:
    """Time all questions to all heads at one size."""
    torch.manual_seed(0)
    frequencies = zipf(vocab)
    width, tokens, samples = (settings[name] for name in ("width", "tokens", "samples"))
    hidden = torch.randn(tokens, width)
    targets = frequencies.multinomial(tokens, replacement=True)
    calls = {}
    weight: Tensor | None = None  # shared by all heads with a row per token
    for kind in KINDS:
        output = heads.Output(kind, width, frequencies, samples=samples, weight=weight)
        if isinstance(output.head, LMHead):
            weight = output.head.weight
        heads.check(output, hidden[:1], targets[:1])
        calls[kind] = heads.questions(output, hidden, targets)
    return heads.time_heads(calls, progress, seconds=settings["seconds"], most=30)


def lines(document: Document, width: int) -> list[str]:
    """Return a table per size."""
    out = []
    for point in document["points"]:
        timing = point["timing"]
        columns = [("", list(timing)), *heads.timing_columns(list(timing.values()))]
        out += [f"V {point['vocab']:,}", *report.table(columns, width), ""]
    return out


def draw(document: Document) -> Figure:
    """Draw milliseconds against V, a panel per question."""
    points, s = document["points"], document["settings"]
    title = f"{document['title']}: D {s['width']}, N {s['tokens']:,} in training and 1 in queries"
    figure, axes = new_figure(document, len(heads.QUESTIONS), 4.2, width=4.6, title=title)
    for ax, question in zip(axes, heads.QUESTIONS, strict=True):
        for kind, color in zip(KINDS, LINES, strict=False):
            y = [1e3 * p["timing"][kind][question]["median"] for p in points]
            ax.loglog([p["vocab"] for p in points], y, "o-", color=color, label=kind, markersize=4)
        ax.grid(alpha=0.25)
        legend = question == heads.QUESTIONS[0]
        label(ax, title=question, x="vocabulary", y="milliseconds", legend=legend)
    return figure


@benchmark("vocab-scaling", "cost against the vocabulary", lines, draw=draw)
@click.option("--fresh", is_flag=True, help="Measure the sizes in the result file again.")
@click.option("--sizes", multiple=True, type=int, default=SIZES, help="V.", show_default=True)
@integer("--width", 128, "D.")
@integer("--tokens", 1024, "N of a training step.")
@integer("--samples", 1024, "K of the sampled loss.")
@click.option("--seconds", type=float, default=45.0, help="Time per size.", show_default=True)
def command(run: Run, fresh: bool, sizes: tuple[int, ...], **settings: Any) -> None:
    """Time heads for huge vocabularies of 10,000 to 1,000,000 tokens."""
    settings["threads"] = run.document["threads"]
    resumed = run.path.is_file() and not fresh
    old = json.loads(run.path.read_text(encoding="utf-8")) if resumed else {}
    points = {p["vocab"]: p for p in old["points"]} if old.get("settings") == settings else {}
    run.document["settings"] = settings
    for vocab in sizes:
        if vocab in points:
            run.progress(f"V {vocab:,} was measured before: {run.path}")
        else:
            points[vocab] = {"vocab": vocab, "timing": time_size(vocab, settings, run.progress)}
        run.document["points"] = [points[v] for v in sorted(points)]
        run.save()
