"""A small Transformer on WikiText-2, V = 33,278, with each head for huge vocabularies.

35 minutes on two cores. Same seed, same batches, same steps. The perplexity is that of the exact
distribution on the whole validation text, for all. When all are trained, they are timed in
interleaved rounds, each on the hidden states of its own model, with torch's full and adaptive
softmax beside them; memory is that of one training step of the head in a fresh process.

A trained head is kept in `--work`, and the results are written after each: an interrupted run
continues with the next head.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks import report, wikitext
from benchmarks import vocab_heads as heads
from benchmarks.fresh_process import growth_of
from benchmarks.goals import VOCAB, lines_of
from benchmarks.machine import ROOT, commit
from benchmarks.plots import LINES, PRODUCT, Figure, bars, label, new_figure
from benchmarks.report import Document
from benchmarks.runner import FOLDER, Run, benchmark
from benchmarks.task import Step
from benchmarks.timing import Progress
from benchmarks.wikitext import Body, Settings, Text, train_curve, windows
from lmhead.train.run_files import temporary_name

LAST_RATE = 0.1


@dataclass(frozen=True)
class HeadSettings(Settings):
    """Settings of the model, its training and the sampled loss."""

    samples: int


DEFAULTS = HeadSettings(500, 100, 16, 64, 256, 2, 2e-3, 20_000, 0, 1024)


def train(kind: str, text: Text, s: HeadSettings, progress: Progress) -> dict[str, Any]:
    """Train once; return the result, the head's state, and hidden states to time it on."""
    torch.manual_seed(s.seed)
    body = Body(text.vocab, s, shared=True)
    shared = body.tokens.weight if kind == "tied" else None
    output = heads.Output(kind, s.width, text.counts, samples=s.samples, weight=shared)
    progress(kind)
    curve = train_curve(
        body,
        output,
        output,
        output.total,
        text,
        s,
        progress,
        last_rate=LAST_RATE,
        validate_all=True,
    )
    ids, targets = windows(text.valid, s, s.tokens)[0]
    with torch.no_grad():
        hidden = body(ids)
    result = {
        "kind": kind,
        "head": repr(output.head),
        "parameters": 0 if kind == "tied" else sum(p.numel() for p in output.head.parameters()),
        "perplexity": math.exp(curve[-1]["valid"]),
        "step_seconds": curve[-1]["seconds"] / s.steps,
        "commit": commit(),
        "curve": curve,
    }
    learned = {"head": output.state_dict(), "hidden": hidden, "targets": targets}
    return {"result": result, "frequencies": text.counts, "settings": asdict(s), **learned}


def save(made: dict[str, Any], file: Path) -> None:
    """Replace the file at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(made, temporary_name(file))
    os.replace(temporary_name(file), file)


def result_in(file: Path, frequencies: Tensor, s: HeadSettings) -> dict[str, Any] | None:
    """Return the result of a head trained with these settings on this text, or None."""
    if not file.is_file():
        return None
    found: dict[str, Any] = torch.load(file)
    if found["settings"] != asdict(s) or not torch.equal(found["frequencies"], frequencies):
        return None
    result: dict[str, Any] = found["result"]
    return result


def load(kind: str, file: Path) -> tuple[heads.Output, Tensor, Tensor]:
    """Return a trained head, hidden states of its model (N, D) and targets (N,)."""
    made = torch.load(file)
    hidden, samples = made["hidden"], made["settings"]["samples"]
    output = heads.Output(kind, hidden.shape[1], made["frequencies"], samples=samples)
    output.load_state_dict(made["head"])
    return output, hidden, made["targets"]


class TrainingStep:
    """A training step of a trained head, for a fresh process."""

    def prepare(self, name: str, inputs: Path, max_bytes: int | None) -> Step:  # noqa: ARG002
        """Return the step of the head in a file."""
        output, hidden, targets = load(name, inputs)
        return lambda: heads.gradients(output, hidden, targets)


TASK = TrainingStep()


def memory(kind: str, file: Path) -> dict[str, Any] | None:
    """Return the peak growth of a training step of the head in a file, in a fresh process."""
    growth = growth_of("benchmarks.vocab_training", kind, file, torch.get_num_threads())
    return None if growth is None else {**asdict(growth), "temporary": growth.temporary}


def time_all(document: Document, work: Path, progress: Progress, *, seconds: float) -> None:
    """Time all heads of the document and torch's, and add the times to the document."""
    calls = {}
    for result in document["results"]:
        kind = result["kind"]
        output, hidden, targets = load(kind, work / f"{kind}.pt")
        heads.check(output, hidden[:4], targets[:4])
        calls[kind] = heads.questions(output, hidden, targets)
        theirs = heads.peer(output, hidden, targets) if kind in heads.PEERS else None
        if theirs is not None:
            calls[heads.PEERS[kind]] = theirs
    found = heads.time_heads(calls, progress, seconds=seconds, most=50)
    for result in document["results"]:
        result["timing"] = found.pop(result["kind"])
    document["peers"] = [{"name": name, "timing": timing} for name, timing in found.items()]


def lines(document: Document, width: int) -> list[str]:
    """Return perplexity, time and memory of each head, torch's below; then the goals."""
    results, rows = document["results"], [*document["results"], *document["peers"]]
    full = next((r["perplexity"] for r in results if r["kind"] == "full"), None)
    columns = [("", [r.get("kind") or r["name"] for r in rows])]

    def add(heading: str, cells: list[str]) -> None:
        columns.append((heading, cells + [""] * (len(rows) - len(cells))))

    add("parameters", [f"{r['parameters']:,}" for r in results])
    add("perplexity", [f"{r['perplexity']:.1f}" for r in results])
    if full is not None:
        add("of full", [f"{r['perplexity'] / full - 1:+.1%}" for r in results])
    columns += heads.timing_columns([r["timing"] for r in rows])
    for heading, key in (("MiB", "later"), ("temporary", "temporary")):
        add(heading, [report.mib((r["memory"] or {}).get(key)) for r in results])
    s = document["settings"]
    return [
        f"V {document['vocab']:,}, D {s['width']}, layers: {s['layers']}, {s['steps']} steps of "
        f"{s['batch'] * s['window']:,} tokens",
        "",
        *report.table(columns, width),
        "",
        "x: how many times as fast as full, median of the rounds.",
        "MiB: peak growth in a training step of the head, with gradients; temporary: without.",
        "",
        *lines_of(document, VOCAB),
    ]


def draw(document: Document) -> Figure:
    """Draw perplexity against steps, and the time of the head's training step."""
    s = document["settings"]
    title = f"{document['title']}: V {document['vocab']:,}, D {s['width']}"
    figure, (curves, times) = new_figure(document, 2, 4.2, width=4.6, title=title)
    colors = dict(zip(heads.HEADS, LINES, strict=True))
    for result in document["results"]:
        points = [p for p in result["curve"] if p["step"] > 0]
        x, y = [p["step"] for p in points], [math.exp(p["valid"]) for p in points]
        kind = result["kind"]
        curves.plot(x, y, "o-", color=colors[kind], label=kind, markersize=3)
    curves.set_yscale("log")
    label(curves, title="validation perplexity", x="training steps", legend=True)
    rows = []
    for r in (*document["results"], *document["peers"]):
        name, seconds = r.get("kind") or r["name"], r["timing"][heads.QUESTIONS[0]]["median"]
        rows.append((name, 1e3 * seconds, heads.milliseconds(seconds), colors.get(name, PRODUCT)))
    bars(times, rows)
    label(times, title=f"loss and gradients of the head, N {s['batch'] * s['window']:,}")
    return figure


@benchmark(VOCAB, "heads for huge vocabularies, trained on WikiText-2", lines, draw=draw)
@click.option(
    "--work",
    type=FOLDER,
    default=ROOT / "build" / "vocab_heads",
    help="Folder of trained heads.  [default: build/vocab_heads]",
)
@click.option("--fresh", is_flag=True, help="Train the heads in --work again.")
@click.option("--head", multiple=True, type=click.Choice(heads.HEADS), help="All by default.")
@click.option(
    "--timing-seconds", type=float, default=120.0, help="Time of all rounds.", show_default=True
)
@wikitext.training_options(DEFAULTS)
def command(
    run: Run,
    work: Path,
    fresh: bool,
    head: tuple[str, ...],
    timing_seconds: float,
    data: Path,
    **given: Any,
) -> None:
    """Train heads for huge vocabularies on WikiText-2: perplexity, time, memory."""
    s, text = HeadSettings(**given), wikitext.read_text(data)
    results: list[dict[str, Any]] = []
    settings = {**asdict(s), "last_rate": LAST_RATE}
    run.document |= {"vocab": text.vocab, "settings": settings, "results": results, "peers": []}
    for kind in head or heads.HEADS:
        file = work / f"{kind}.pt"
        result = None if fresh else result_in(file, text.counts, s)
        if result is None:
            made = train(kind, text, s, run.progress)
            save(made, file)
            result = made["result"]
        else:
            run.progress(f"{kind} was trained before, at {result['commit']}: {file}")
        results.append(result)
        run.save()
    time_all(run.document, work, run.progress, seconds=timing_seconds)
    for result in results:
        run.progress(f"memory: {result['kind']}")
        result["memory"] = memory(result["kind"], work / f"{result['kind']}.pt")
