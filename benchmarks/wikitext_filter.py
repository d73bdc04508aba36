"""Does the gradient filter change what a model learns? Train on WikiText-2 from scratch.

A quarter of an hour on two cores. A small Transformer (V = 33,278), same seed, same
batches, four losses:

    exact       exact gradients
    filter      grad_filter=0.02: a rank-one term with the same sums replaces the tokens that carry
                the last 2 % of a chunk's probability mass
    threshold   such a term replaces the tokens whose probability is below 2^-12 in every row of a
                chunk
    dropped     these tokens are left out without a replacement

An untrained distribution is flat: nearly every token is below any fixed threshold, while a fraction
of the mass is always the same fraction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import lmhead
from benchmarks import report
from benchmarks.report import Document
from benchmarks.runner import Run, benchmark
from benchmarks.timing import Progress
from benchmarks.wikitext import Body, Settings, Text, read_text, train_curve, training_options

THRESHOLD = 2.0**-12
TAIL_MASS = 0.02
CHUNK = 256  # rows, as in the filter

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _threshold(keep_mass: bool) -> Loss:
    """Return mean cross-entropy whose gradient drops, or averages, tokens below the threshold."""

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            value, d_hidden, d_weight = _with_gradients(hidden, weight, targets, keep_mass)
        # The gradients of this sum are d_hidden and d_weight; its value is subtracted again.
        linear = (hidden * d_hidden).sum() + (weight * d_weight).sum()
        return value + linear - linear.detach()

    return loss


def _with_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, keep_mass: bool
) -> tuple[Tensor, Tensor, Tensor]:
    d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
    total = hidden.new_zeros(())
    for start in range(0, len(hidden), CHUNK):
        here = slice(start, start + CHUNK)
        h, y = hidden[here], targets[here]
        log_p = (h @ weight.T).log_softmax(-1)
        total += -log_p.gather(-1, y[:, None]).sum()
        p = log_p.exp_()
        kept = p.amax(0) >= THRESHOLD
        kept[y] = True
        tail = p * ~kept
        p[torch.arange(len(y)), y] -= 1
        g = p[:, kept]
        d_hidden[here] = g @ weight[kept]
        d_weight[kept] += g.T @ h
        rows, columns = tail.sum(1), tail.sum(0)
        mass = rows.sum()
        if keep_mass and mass > 0:  # T ≈ rows columnsᵀ / mass
            d_hidden[here] += torch.outer(rows, columns @ weight / mass)
            d_weight += torch.outer(columns, rows @ h / mass)
    return total / len(hidden), d_hidden / len(hidden), d_weight / len(hidden)


LOSSES: dict[str, Loss] = {
    "exact": lmhead.linear_cross_entropy,
    "filter": lambda h, w, t: lmhead.linear_cross_entropy(h, w, t, grad_filter=TAIL_MASS),
    "threshold": _threshold(keep_mass=True),
    "dropped": _threshold(keep_mass=False),
}


def train(loss: Loss, text: Text, s: Settings, progress: Progress) -> list[dict[str, Any]]:
    """Train once; return validation losses by steps."""
    torch.manual_seed(s.seed)
    body, head = Body(text.vocab, s), lmhead.LMHead(s.width, text.vocab)

    def total(hidden: Tensor, targets: Tensor) -> Tensor:
        return lmhead.linear_cross_entropy(hidden, head.weight, targets, reduction="sum")

    def chosen(hidden: Tensor, targets: Tensor) -> Tensor:
        return loss(hidden, head.weight, targets)

    return train_curve(body, head, chosen, total, text, s, progress)


def lines(document: Document, width: int) -> list[str]:
    """Return a table of the last validation losses."""
    last = {name: curve[-1]["valid"] for name, curve in document["curves"].items()}
    columns = [("", list(last)), ("validation loss", [f"{value:.4f}" for value in last.values()])]
    if "exact" in last:
        off = [f"{value / last['exact'] - 1:+.2%}" for value in last.values()]
        columns.append(("from exact", off))
    return report.table(columns, width)


@benchmark("wikitext-filter", "validation loss, trained from scratch on WikiText-2", lines)
@click.option("--variant", multiple=True, type=click.Choice(list(LOSSES)), help="All by default.")
@training_options(Settings(400, 50, 16, 64, 128, 2, 1e-3, 20_000, 0))
def command(run: Run, variant: tuple[str, ...], data: Path, **given: Any) -> None:
    """Train on WikiText-2 from scratch, with and without the gradient filter."""
    settings, text = Settings(**given), read_text(data)
    curves: dict[str, list[dict[str, Any]]] = {}
    run.document |= {"vocab": text.vocab, "settings": asdict(settings), "curves": curves}
    for name in variant or LOSSES:
        run.progress(f"{name}: {len(text.train):,} tokens, V = {text.vocab:,}")
        curves[name] = train(LOSSES[name], text, settings, run.progress)
        run.save()
