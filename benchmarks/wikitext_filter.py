"""Does the gradient filter change what a model learns? Train from scratch on WikiText-2 and see.

    python benchmarks/wikitext_filter.py --data FOLDER      (a quarter of an hour on two cores)

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
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lmhead
from lmhead.bench.machine import describe

THRESHOLD = 2.0**-12
TAIL_MASS = 0.02
CHUNK = 256  # tokens, as the filter has it

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Settings:
    """Of the model and its training."""

    steps: int
    every: int
    batch: int
    window: int
    width: int
    layers: int
    rate: float
    valid_tokens: int
    seed: int


class Model(nn.Module):
    """Words and places, a causal Transformer, and a head's weight of its own."""

    def __init__(self, vocab: int, s: Settings) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, s.width)
        self.places = nn.Embedding(s.window, s.width)
        layer = nn.TransformerEncoderLayer(
            s.width, max(1, s.width // 32), 4 * s.width, 0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, s.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(s.width)
        self.head = lmhead.LMHead(s.width, vocab)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(s.window))

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, window) ids to (batch · window, width) hidden states."""
        x = self.words(ids) + self.places.weight
        hidden: Tensor = self.norm(self.body(x, mask=self.mask, is_causal=True))
        return hidden.flatten(0, 1)


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


def read(folder: Path) -> tuple[Tensor, Tensor, int]:
    """Ids of the training and of the validation words, and the size of the vocabulary."""
    ids: dict[str, int] = {}

    def words(name: str) -> list[int]:
        text = (folder / name).read_text(encoding="utf-8")
        lines = ([*line.split(), "<eos>"] for line in text.splitlines())
        return [ids.setdefault(word, len(ids)) for line in lines for word in line]

    train, valid = words("train.txt"), words("valid.txt")
    return torch.tensor(train), torch.tensor(valid), len(ids)


def train(
    loss: Loss, train_ids: Tensor, valid_ids: Tensor, vocab: int, s: Settings
) -> list[dict[str, Any]]:
    """One training run: validation losses by steps."""
    torch.manual_seed(s.seed)
    model = Model(vocab, s)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.rate, weight_decay=0.0)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 50))
    order = torch.Generator().manual_seed(s.seed)
    curve, start = [], time.perf_counter()
    for step in range(1, s.steps + 1):
        first = torch.randint(len(train_ids) - s.window, (s.batch, 1), generator=order)
        rows = train_ids[first + torch.arange(s.window + 1)]
        value = loss(model(rows[:, :-1]), model.head.weight, rows[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(value)
        optimizer.step()
        warm_up.step()
        if step % s.every == 0 or step == s.steps:
            point = {"step": step, "train": value.item(), "valid": validate(model, valid_ids, s)}
            curve.append({**point, "seconds": time.perf_counter() - start})
            print(
                f"  step {step:5d}   train {point['train']:.4f}   valid {point['valid']:.4f}",
                flush=True,
            )
    return curve


@torch.no_grad()
def validate(model: Model, ids: Tensor, s: Settings) -> float:
    """Mean loss of the validation words, the same for all."""
    windows = min(s.valid_tokens, len(ids) - 1) // s.window
    inputs = ids[: windows * s.window].view(windows, s.window)
    targets = ids[1 : windows * s.window + 1].view(windows, s.window)
    total = 0.0
    for x, y in zip(torch.split(inputs, s.batch), torch.split(targets, s.batch), strict=True):
        hidden = model(x)
        sum_ = lmhead.linear_cross_entropy(hidden, model.head.weight, y.flatten(), reduction="sum")
        total += float(sum_)
    return total / targets.numel()


def main() -> None:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=here.parents[1] / "shared/data/wikitext-2")
    parser.add_argument("--out", type=Path, default=here / "results" / "wikitext-filter.json")
    parser.add_argument("--variant", action="append", choices=LOSSES, help="all by default")
    parser.add_argument("--threads", type=int)
    for name, value in asdict(Settings(400, 50, 16, 64, 128, 2, 1e-3, 20_000, 0)).items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=type(value), default=value, help=f"default {value}")
    given = vars(parser.parse_args())
    folder, out, variants, threads = (given.pop(x) for x in ("data", "out", "variant", "threads"))
    if not (folder / "train.txt").is_file() or not (folder / "valid.txt").is_file():
        parser.error(f"--data must be a folder with train.txt and valid.txt; got {folder}")
    if threads:
        torch.set_num_threads(threads)
    settings = Settings(**given)
    train_ids, valid_ids, vocab = read(folder)
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
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    best = curves.get("exact")
    for name, curve in curves.items():
        last = curve[-1]["valid"]
        off = f"   {last / best[-1]['valid'] - 1:+.2%} of exact" if best else ""
        print(f"{name:10s} {last:.4f}{off}")


if __name__ == "__main__":
    main()
