"""Does the gradient filter change what a model learns? Train from scratch on WikiText-2 and see.

    python -m benchmarks.wikitext_filter --data FOLDER      (a quarter of an hour on two cores)

A small Transformer on words (V = 33,278), same seed, same batches, four losses:

    exact       every gradient
    filter      grad_filter=0.02: a rank-one term with the same sums stands for the words that carry
                the last 2 % of a chunk's probability mass
    threshold   such a term stands for the words whose probability is below 2^-12 for every token
                of a chunk
    dropped     these words are left out altogether

An untrained distribution is flat: nearly every word is below any fixed threshold, while a share of
the mass is a share of the mass. FOLDER has `train.txt` and `valid.txt`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lmhead
from benchmarks.wikitext import ROOT, Body, Settings, add_options, learn, mean_loss, read
from lmhead.bench.machine import describe
from lmhead.bench.report import write_json

THRESHOLD = 2.0**-12
TAIL_MASS = 0.02
CHUNK = 256  # tokens, as the filter has it

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class ThresholdLoss(torch.autograd.Function):
    """Mean cross-entropy whose gradient leaves out, or averages, words below the threshold."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, keep_mass: bool
    ) -> Tensor:
        """The gradients are made here, chunk by chunk."""
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
        ctx.save_for_backward(d_hidden / len(hidden), d_weight / len(hidden))
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Scaled by what comes from above."""
        d_hidden, d_weight = ctx.saved_tensors
        return upstream * d_hidden, upstream * d_weight, None, None


def _threshold(keep_mass: bool) -> Loss:
    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        value: Tensor = ThresholdLoss.apply(hidden, weight, targets, keep_mass)  # type: ignore[no-untyped-call]
        return value

    return loss


LOSSES: dict[str, Loss] = {
    "exact": lmhead.linear_cross_entropy,
    "filter": lambda h, w, t: lmhead.linear_cross_entropy(h, w, t, grad_filter=TAIL_MASS),
    "threshold": _threshold(keep_mass=True),
    "dropped": _threshold(keep_mass=False),
}


def train(
    loss: Loss, train_ids: Tensor, valid_ids: Tensor, vocab: int, s: Settings
) -> list[dict[str, Any]]:
    """One training run: validation losses by steps."""
    torch.manual_seed(s.seed)
    body, head = Body(vocab, s), lmhead.LMHead(s.width, vocab)

    def total(hidden: Tensor, targets: Tensor) -> Tensor:
        return lmhead.linear_cross_entropy(hidden, head.weight, targets, reduction="sum")

    curve, start = [], time.perf_counter()
    steps = learn(body, head, lambda h, y: loss(h, head.weight, y), train_ids, s)
    for step, value in steps:
        if step % s.every == 0 or step == s.steps:
            valid = mean_loss(body, total, valid_ids, s, s.valid_tokens)
            seconds = time.perf_counter() - start
            curve.append({"step": step, "train": value, "valid": valid, "seconds": seconds})
            print(f"  step {step:5d}   train {value:.4f}   valid {valid:.4f}", flush=True)
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    out = ROOT / "benchmarks" / "results" / "wikitext-filter.json"
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--variant", action="append", choices=LOSSES, help="all by default")
    parser.add_argument("--threads", type=int)
    add_options(parser, Settings(400, 50, 16, 64, 128, 2, 1e-3, 20_000, 0))
    given = vars(parser.parse_args())
    folder, out, variants, threads = (given.pop(x) for x in ("data", "out", "variant", "threads"))
    if threads:
        torch.set_num_threads(threads)
    settings = Settings(**given)
    train_ids, valid_ids, frequencies = read(parser, folder)
    vocab = len(frequencies)
    print(f"{len(train_ids):,} words to train on, V = {vocab:,}, log V = {math.log(vocab):.2f}")
    curves: dict[str, list[dict[str, Any]]] = {}
    for name in variants or LOSSES:
        print(name)
        curves[name] = train(LOSSES[name], train_ids, valid_ids, vocab, settings)
        document = {
            "benchmark": "wikitext-filter",
            "title": "validation loss, trained from scratch on WikiText-2",
            "vocab": vocab,
            "settings": asdict(settings),
            **describe(torch.get_num_threads()),
            "curves": curves,
        }
        write_json(document, out)
    best = curves.get("exact")
    for name, curve in curves.items():
        last = curve[-1]["valid"]
        off = f"   {last / best[-1]['valid'] - 1:+.2%} of exact" if best else ""
        print(f"{name:10s} {last:.4f}{off}")


if __name__ == "__main__":
    main()
