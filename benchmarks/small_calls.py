"""Losses and log-probabilities of few rows: time per call, compared with torch's operations.

What a call costs beyond the arithmetic: a time is the fastest of many single calls, in turns.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lmhead
from benchmarks.report import Document, table
from benchmarks.runner import Run, benchmark, rounds

_TITLE = "Losses and log-probabilities of few rows"
GOAL = 100.0  # microseconds above torch
_CALLS = 20  # per round


def _backward(make: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], list[Tensor]]:
    def call() -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        make().backward()  # type: ignore[no-untyped-call]
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    return call


def _questions(rows: int, vocab: int, width: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return, for each question, torch's call and ours; both give the same numbers."""
    torch.manual_seed(0)
    hidden = torch.randn(rows, width)
    head = lmhead.LMHead(width, vocab)
    weight, ids = head.weight.detach().clone(), torch.randint(vocab, (rows,))
    leaf, trained = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    leaves = [leaf, trained]

    def log_prob(h: Tensor, w: Tensor) -> Tensor:
        return F.linear(h, w).log_softmax(-1).gather(1, ids[:, None])[:, 0]

    def ours(h: Tensor, w: Tensor) -> Tensor:
        found: Tensor = lmhead.query(h, w, log_prob=ids).log_prob
        return found

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w), ids)

    def swept(h: Tensor, w: Tensor) -> Tensor:
        return lmhead.linear_cross_entropy(h, w, ids)

    no_grad = torch.no_grad()
    return {
        "query": {
            "torch": no_grad(lambda: log_prob(hidden, weight)),
            "lmhead": no_grad(lambda: ours(hidden, weight)),
        },
        "query, backward": {
            "torch": _backward(lambda: log_prob(leaf, trained).sum(), leaves),
            "lmhead": _backward(lambda: ours(leaf, trained).sum(), leaves),
        },
        "loss": {
            "torch": no_grad(lambda: loss(hidden, weight)),
            "lmhead": no_grad(lambda: swept(hidden, weight)),
        },
        "loss, backward": {
            "torch": _backward(lambda: loss(leaf, trained), leaves),
            "lmhead": _backward(lambda: swept(leaf, trained), leaves),
        },
        "F.cross_entropy(head(h))": {
            "torch": no_grad(lambda: loss(hidden, weight)),
            "lmhead": no_grad(lambda: F.cross_entropy(head(hidden), ids)),
        },
        "F.cross_entropy(head(h)), backward": {
            "torch": _backward(lambda: loss(leaf, trained), leaves),
            "lmhead": _backward(lambda: F.cross_entropy(head(leaf), ids), [leaf, head.weight]),
        },
    }


def _agree(ours: Any, theirs: Any) -> bool:
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, list) else [(ours, theirs)]
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


def _fastest(calls: dict[str, Callable[[], Any]], n: int) -> dict[str, float]:
    """Return the microseconds of the fastest call of each."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(n):
        for name, call in calls.items():
            for _ in range(_CALLS):
                start = perf_counter()
                call()
                best[name] = min(best[name], 1e6 * (perf_counter() - start))
    return best


def _lines(document: Document, width: int) -> list[str]:
    found = document["calls"]
    return [
        f"microseconds per call; the goal is at most {GOAL:g} above torch",
        *table(
            [
                ("", [c["question"] for c in found]),
                ("N", [str(c["rows"]) for c in found]),
                ("V", [f"{c['vocab']:,}" for c in found]),
                ("D", [str(c["width"]) for c in found]),
                ("torch", [f"{c['torch']:.0f}" for c in found]),
                ("lmhead", [f"{c['lmhead']:.0f}" for c in found]),
                ("above", [f"{c['lmhead'] - c['torch']:+.0f}" for c in found]),
            ],
            width,
        ),
    ]


@benchmark("small-calls", _TITLE, _lines, quick=True)
@rounds(10)
def command(run: Run, **options: Any) -> None:
    """Time losses and log-probabilities of up to 63 rows, compared with torch's own operations.

    \b
    Examples:
      lmhead bench small-calls --threads 1
    """
    rows: tuple[int, ...]
    vocabs: tuple[int, ...]
    widths: tuple[int, ...]
    rows, vocabs, widths = (1, 8, 32, 63), (65, 512, 4096), (64, 256)
    if run.quick:
        rows, vocabs, widths = (8,), (65,), (64,)
    made = []
    for vocab in vocabs:
        for width in widths:
            for n in rows:
                for question, calls in _questions(n, vocab, width).items():
                    run.progress(f"{question}: {n} rows, {vocab} tokens, width {width}")
                    run.wrong |= not _agree(calls["lmhead"](), calls["torch"]())
                    times = _fastest(calls, 1 if run.quick else options["rounds"])
                    made.append(
                        {"question": question, "rows": n, "vocab": vocab, "width": width, **times}
                    )
    run.document |= {"goal": GOAL, "calls": made}
