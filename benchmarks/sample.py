"""From logits to a token: lmhead, and Hugging Face's processors with `torch.multinomial`.

Both get the same logits, of generated peaked distributions, in one process, one call after the
other. Before anything is timed, the tokens that both keep are compared: they must be the same, with
the same probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks import report
from benchmarks.inputs import generate
from benchmarks.machine import version
from benchmarks.plots import OURS, PEERS, Figure, bars, label, new_figure
from benchmarks.report import Columns, Document
from benchmarks.runner import Run, benchmark, rounds
from benchmarks.timing import ratio, summary, time_calls
from lmhead import Sampler

VOCAB = 262144
BATCHES = (1, 8)
_HIDDEN = 64  # hidden size of the generated inputs; the product is not timed
_TOLERANCE = 1e-5  # of a probability: the peer sums in float32


@dataclass(frozen=True)
class Case:
    """Options of `Sampler` besides a temperature of 0.8, and the same as a processor of the peer.

    Attributes:
        at_most: goal for our time over the peer's; None for no goal.
    """

    name: str
    options: dict[str, Any]
    processor: str | None
    at_most: float | None

    @property
    def label(self) -> str:
        """Shown in tables."""
        return ", ".join(["temperature 0.8", *(f"{k} {v}" for k, v in self.options.items())])


CASES = (
    Case("top_p", {"top_p": 0.9}, "TopPLogitsWarper", 1 / 20),
    Case("typical", {"typical_p": 0.9}, "TypicalLogitsWarper", 1 / 20),
    Case("top_k", {"top_k": 50}, "TopKLogitsWarper", 1 / 2),
    Case("min_p", {"min_p": 0.05}, "MinPLogitsWarper", 1 / 2),
    Case("temperature", {}, None, None),
)


def _measure_case(case: Case, logits: Tensor, rounds: int) -> dict[str, Any]:
    sampler = Sampler(seed=0, temperature=0.8, **case.options)
    process = huggingface_process(case.processor, *case.options.values())
    wrong = _difference(sampler.process(logits), process(logits))
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: sampler(logits),
        "theirs": lambda: torch.multinomial(process(logits).softmax(-1), 1),
    }
    seconds = time_calls(calls, rounds, lambda _: None)
    times = ratio(seconds["ours"], seconds["theirs"])
    return {
        "name": case.name,
        "label": case.label,
        "batch": len(logits),
        "kept": sampler(logits).kept.counts(),
        "ours": asdict(summary(seconds["ours"])),
        "theirs": asdict(summary(seconds["theirs"])),
        "ratio": asdict(times),
        "at_most": case.at_most,
        "within": case.at_most is None or times.median <= case.at_most,
        "wrong": wrong,
    }


def huggingface_process(processor: str | None, *arguments: float) -> Callable[[Tensor], Tensor]:
    """Return Hugging Face's way from logits to logits: temperature 0.8, then a processor."""
    from transformers.generation import logits_process

    chain = logits_process.LogitsProcessorList([logits_process.TemperatureLogitsWarper(0.8)])
    if processor is not None:
        chain.append(getattr(logits_process, processor)(*arguments))

    def process(logits: Tensor) -> Tensor:
        processed: Tensor = chain(torch.zeros(len(logits), 1, dtype=torch.int64), logits)
        return processed

    return process


def _difference(ours: Tensor, theirs: Tensor) -> str | None:
    """Return how two sets of processed logits differ; None if they are the same."""
    if not bool(((ours > -math.inf) == (theirs > -math.inf)).all()):
        return "not the same tokens are kept"
    off = float((ours.double().softmax(-1) - theirs.double().softmax(-1)).abs().max())
    return None if off <= _TOLERANCE else f"a probability differs by {off:.1e}"


def lines(document: Document, width: int) -> list[str]:
    """Return the table."""
    rows = document["results"]
    columns: Columns = [
        ("", [f"batch {r['batch']}: {r['label']}" for r in rows]),
        ("tokens kept", [_range(r["kept"]) for r in rows]),
        ("lmhead/ms", [f"{1e3 * r['ours']['median']:.2f}" for r in rows]),
        ("Hugging Face/ms", [f"{1e3 * r['theirs']['median']:.2f}" for r in rows]),
        ("ratio", [f"1/{1 / r['ratio']['median']:.1f}" for r in rows]),
        ("goal", ["" if r["at_most"] is None else f"1/{1 / r['at_most']:.0f}" for r in rows]),
        ("within", [_verdict(r) for r in rows]),
    ]
    return [
        f"V {document['vocab']:,}, float32, generated distributions, mean entropy "
        f"{document.get('entropy', math.nan):.2f}; compared with transformers "
        f"{document['transformers']} and torch.multinomial",
        "",
        *report.table(columns, width),
        "",
        f"Medians of {document['rounds']} interleaved rounds; ratio: median of the ratios within a",
        "round. lmhead also returns log-probabilities and the kept tokens.",
        *[f"WRONG: batch {r['batch']}, {r['label']}: {r['wrong']}" for r in rows if r["wrong"]],
    ]


def _range(counts: list[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} - {high:,}"


def _verdict(row: dict[str, Any]) -> str:
    if row["wrong"]:
        return "WRONG"
    return "" if row["at_most"] is None else "yes" if row["within"] else "NO"


def draw(document: Document) -> Figure:
    """Draw the times, a panel per batch size."""
    rows = document["results"]
    batches = sorted({r["batch"] for r in rows})
    title = f"sample: {document['title']}; V = {document['vocab']:,}"
    figure, axes = new_figure(document, len(batches), 3.6, title=title)
    for ax, batch in zip(axes, batches, strict=True):
        shown = []
        for r in (r for r in rows if r["batch"] == batch):
            ours, theirs = (1e3 * r[who]["median"] for who in ("ours", "theirs"))
            note = f"{ours:.2f} ms, 1/{1 / r['ratio']['median']:.0f}"
            shown.append((r["label"], ours, note, OURS))
            shown.append(("Hugging Face", theirs, f"{theirs:.2f} ms", PEERS))
        bars(ax, shown)
        label(ax, title=f"milliseconds, median; batch of {batch}")
    return figure


@benchmark(
    "sample", "a token from the logits: temperature, cut, draw", lines, draw=draw, quick=True
)
@click.option("--vocab", type=click.IntRange(2), help="V.  [default: 262144]")
@rounds(15)
def command(run: Run, vocab: int | None, rounds: int) -> None:
    """Time one token from logits: lmhead, and Hugging Face's processors with torch.multinomial.

    \b
    Examples:
      lmhead bench sample
      lmhead bench sample --vocab 49152 --threads 1
    """
    transformers = version("transformers")
    if transformers is None:
        raise ValueError("this compares with transformers: pip install 'lmhead[hf]'")
    vocab = vocab or (8192 if run.quick else VOCAB)
    rounds = min(rounds, 3) if run.quick else rounds
    rows: list[dict[str, Any]] = []
    run.name = f"sample-{vocab}"
    run.document |= {"vocab": vocab, "rounds": rounds, "transformers": transformers}
    run.document["results"] = rows
    run.progress("logits")
    inputs = generate(vocab, _HIDDEN, max(BATCHES))
    logits = inputs.hidden @ inputs.weight.T
    run.document["entropy"] = inputs.entropy
    for batch in BATCHES:
        for case in CASES:
            run.progress(f"batch {batch}: {case.label}")
            rows.append(_measure_case(case, logits[:batch].contiguous(), rounds))
    run.wrong = any(row["wrong"] for row in rows)
