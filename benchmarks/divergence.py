"""Jensen-Shannon divergence of two heads: forward, and with the student's backward pass.

The teacher has the head of the shape; the student has the same with noise on its hidden states.
`two products` are the logits of both, hidden @ weight.T, and nothing else: the minimum of any
method. `row weights`: the loss is a sum of the rows with a weight each, instead of their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click
import torch
from torch import Tensor

import lmhead
from benchmarks.model_inputs import make_inputs
from benchmarks.report import Document, table
from benchmarks.runner import SHAPE_HELP, Run, ShapeType, benchmark, integer, rounds
from benchmarks.shapes import SHAPES, Shape
from benchmarks.timing import ratio, summary, time_calls
from lmhead.scores.protocol import divergence_of

_TITLE = "Jensen-Shannon divergence of two heads"
# Largest ratio to the two products alone.
GOALS = {"lmhead": 2.4, "lmhead, backward": 3.0, "lmhead, backward, row weights": 3.0}


def _dense(hidden: list[Tensor], weight: list[Tensor]) -> Tensor:
    log_p, log_q = ((h @ w.T).log_softmax(-1) for h, w in zip(hidden, weight, strict=True))
    log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
    both = ((x.exp() * (x - log_m)).sum(-1) for x in (log_p, log_q))
    return 0.5 * next(both) + 0.5 * next(both)


def _lines(document: Document, width: int) -> list[str]:
    methods = document["methods"]
    return [
        f"{document['rows']} rows, vocabulary {document['vocab']:,}, width {document['width']}",
        *table(
            [
                ("", list(methods)),
                ("ms", [f"{1000 * m['seconds']['median']:.0f}" for m in methods.values()]),
                ("ratio", [f"{m['ratio']['median']:.2f}" for m in methods.values()]),
                ("goal", [f"{m['goal'] or '':}" for m in methods.values()]),
                ("error", [f"{m['error']:.1e}" for m in methods.values()]),
            ],
            width,
        ),
    ]


@benchmark("divergence", _TITLE, _lines, quick=True)
@click.option("--shape", type=ShapeType(), default="smollm2", show_default=True, help=SHAPE_HELP)
@integer("--rows", 512, "Number of rows N.")
@rounds(5)
def command(run: Run, shape: Shape, rows: int, **options: Any) -> None:
    """Time the JSD of two heads, and dense torch's, as ratios to the two products alone.

    \b
    Examples:
      lmhead bench divergence
      lmhead bench divergence --rows 2048 --threads 2
    """
    if run.quick:
        shape, rows = SHAPES["smollm2"], 32
    inputs = make_inputs(Shape(shape.name, shape.vocab, shape.hidden_size, rows), "float32")
    torch.manual_seed(0)
    noise = 0.05 * torch.randn(inputs.hidden.shape)
    hidden = [inputs.hidden, (inputs.hidden + noise).requires_grad_()]
    weight = [inputs.weight, inputs.weight.clone().requires_grad_()]
    row_weights = torch.rand(rows)
    p, q = ((h, w) for h, w in zip(hidden, weight, strict=True))

    def products() -> None:
        with torch.no_grad():
            for h, w in (p, q):
                h @ w.T

    def forward(values: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return torch.no_grad()(values)

    def backward(values: Callable[[], Tensor], *, by_row: bool = False) -> Callable[[], None]:
        def call() -> None:
            hidden[1].grad = weight[1].grad = None
            result = values()
            loss = result @ row_weights if by_row else result.mean()
            loss.backward()  # type: ignore[no-untyped-call]

        return call

    def ours() -> Tensor:
        return lmhead.divergence(p, q, kind="jsd")

    def dense() -> Tensor:
        return _dense(hidden, weight)

    calls: dict[str, Callable[[], Any]] = {
        "two products": products,
        "lmhead": forward(ours),
        "torch": forward(dense),
        "lmhead, backward": backward(ours),
        "torch, backward": backward(dense),
        "lmhead, backward, row weights": backward(ours, by_row=True),
        "torch, backward, row weights": backward(dense, by_row=True),
    }
    with torch.no_grad():
        exact = [w.double() for w in weight]
        truth = torch.cat(
            [
                divergence_of(a.double() @ exact[0].T, b.double() @ exact[1].T, "jsd")
                for a, b in zip(*(torch.split(h, 64) for h in hidden), strict=True)
            ]
        )
        errors = {"lmhead": ours(), "torch": dense()}
    error = {name: float((value - truth).abs().max()) for name, value in errors.items()}
    run.wrong = error["lmhead"] > 2 * error["torch"] + 1e-6
    n = 1 if run.quick else options["rounds"]
    seconds = time_calls(calls, n, run.progress)
    run.document |= {
        "rows": rows,
        "vocab": shape.vocab,
        "width": shape.hidden_size,
        "origin": inputs.origin,
        "methods": {
            name: {
                "seconds": asdict(summary(times)),
                "ratio": asdict(ratio(times, seconds["two products"])),
                "goal": GOALS.get(name),
                "error": error.get(name.partition(",")[0], 0.0),
            }
            for name, times in seconds.items()
        },
    }
