"""A token for every row of a batch of lazy logits, for one row, and with a screened head.

Before anything is timed the tokens are compared: those of the batch must be those of each row
alone, of the batch in another order, and of the screened head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks import report
from benchmarks.inputs import generate
from benchmarks.plots import OURS, PEERS, Figure, bars, label, new_figure
from benchmarks.report import Columns, Document
from benchmarks.runner import Run, benchmark, rounds
from benchmarks.timing import ratio, summary, time_calls
from lmhead import LMHead, Sampler

VOCAB, HIDDEN, BATCH = 49152, 576, 8
CASES: dict[str, dict[str, Any]] = {
    "temperature 0.8": {},
    "temperature 0.8, top_p 0.9": {"top_p": 0.9},
    "temperature 0.8, top_k 50": {"top_k": 50},
    "temperature 0.8, min_p 0.05": {"min_p": 0.05},
}
# Goals: the time of the batch over that of one row, and with a screened head over the batch.
BATCH_AT_MOST, SCREENED_AT_MOST = 1.5, 0.5


def _measure_case(
    case: str, plain: LMHead, screened: LMHead, hidden: Tensor, rounds: int
) -> dict[str, Any]:
    seeds = list(range(len(hidden)))

    def sampler(*rows: int) -> Sampler:
        return Sampler(temperature=0.8, seed=[seeds[i] for i in rows], **CASES[case])

    batch_sampler, row_sampler = sampler(*seeds), sampler(0)
    tokens = batch_sampler(plain(hidden)).token
    alone = torch.cat([sampler(i)(plain(hidden[i : i + 1])).token for i in seeds])
    turned = sampler(*seeds[::-1])(plain(hidden.flip(0))).token.flip(0)
    others = {
        "each row alone": alone,
        "the batch in another order": turned,
        "a screened head": batch_sampler(screened(hidden)).token,
    }
    wrong = [name for name, other in others.items() if not torch.equal(other, tokens)]
    calls: dict[str, Callable[[], object]] = {
        "one row": lambda: row_sampler(plain(hidden[:1])),
        "batch": lambda: batch_sampler(plain(hidden)),
        "screened": lambda: batch_sampler(screened(hidden)).token,
    }
    seconds = time_calls(calls, rounds, lambda _: None)
    return {
        "label": case,
        **{name: asdict(summary(times)) for name, times in seconds.items()},
        "batch_ratio": asdict(ratio(seconds["batch"], seconds["one row"])),
        "screened_ratio": asdict(ratio(seconds["screened"], seconds["batch"])),
        "wrong": ", ".join(wrong) or None,
    }


def lines(document: Document, width: int) -> list[str]:
    """Return the table."""
    rows = document["results"]
    columns: Columns = [
        ("", [r["label"] for r in rows]),
        *[
            (f"{name}/ms", [f"{1e3 * r[name]['median']:.2f}" for r in rows])
            for name in ("one row", "batch", "screened")
        ],
        ("batch / row", [_verdict(r["batch_ratio"], BATCH_AT_MOST) for r in rows]),
        ("screened / batch", [_verdict(r["screened_ratio"], SCREENED_AT_MOST) for r in rows]),
    ]
    return [
        f"V {document['vocab']:,}, D {document['hidden']}, batch of {document['batch']}, float32, "
        f"generated distributions, mean entropy {document.get('entropy', math.nan):.2f}",
        "",
        *report.table(columns, width),
        "",
        f"Goals: at most {BATCH_AT_MOST} and {SCREENED_AT_MOST}. Medians of {document['rounds']} "
        "interleaved rounds.",
        *[f"WRONG: {r['label']}: other tokens in {r['wrong']}" for r in rows if r["wrong"]],
    ]


def _verdict(times: dict[str, float], at_most: float) -> str:
    return f"{times['median']:.2f}{'' if times['median'] <= at_most else ' (above)'}"


def draw(document: Document) -> Figure:
    """Draw the times."""
    title = f"sample-batch: {document['title']}; V = {document['vocab']:,}"
    figure, (ax,) = new_figure(document, 1, 3.6, title=title)
    shown = []
    for r in document["results"]:
        for name, colour in (("one row", PEERS), ("batch", OURS), ("screened", OURS)):
            ms = 1e3 * r[name]["median"]
            shown.append((f"{r['label']}: {name}", ms, f"{ms:.2f} ms", colour))
    bars(ax, shown)
    label(ax, title=f"milliseconds, median; batch of {document['batch']}")
    return figure


@benchmark("sample-batch", "a token per row of lazy logits", lines, draw=draw, quick=True)
@click.option("--vocab", type=click.IntRange(2), help=f"V.  [default: {VOCAB}]")
@rounds(15)
def command(run: Run, vocab: int | None, rounds: int) -> None:
    """Time a token for every row of a batch of lazy logits, for one row, and with a screened head.

    \b
    Examples:
      lmhead bench sample-batch
      lmhead bench sample-batch --threads 1
    """
    vocab = vocab or (8192 if run.quick else VOCAB)
    hidden_size, rounds = (64, min(rounds, 3)) if run.quick else (HIDDEN, rounds)
    rows: list[dict[str, Any]] = []
    run.name = f"sample-batch-{vocab}"
    run.document |= {"vocab": vocab, "hidden": hidden_size, "batch": BATCH, "rounds": rounds}
    run.document["results"] = rows
    run.progress("inputs")
    inputs = generate(vocab, hidden_size, BATCH)
    run.document["entropy"] = inputs.entropy
    plain, screened = (LMHead(hidden_size, vocab).requires_grad_(False) for _ in range(2))
    for head in (plain, screened):
        head.weight.copy_(inputs.weight)
    screened.screen()
    with torch.no_grad():
        for case in CASES:
            run.progress(case)
            rows.append(_measure_case(case, plain, screened, inputs.hidden, rounds))
    run.wrong = any(row["wrong"] for row in rows)
