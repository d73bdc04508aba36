"""Is training with this package as fast as the loop that everyone writes? Side by side.

    python benchmarks/train_speed.py --data input.txt      (a few minutes; quiet machine, please)

The same body, weights and batches, in one process, rounds interleaved:

    lmhead     the package's trainer: no logits tensor, fused AdamW
    filter     the same with grad_filter=0.02
    dense      the package's trainer with torch's dense cross-entropy
    plain      F.cross_entropy(F.linear(hidden, weight), targets), torch's AdamW as it comes
    fused      the plain loop with AdamW(fused=True)

at the character-level set-up (V = 65) and with V = 50,257 words of random text with Zipf's
frequencies. Every step's loss is compared with the plain loop's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW

from lmhead.bench.machine import describe
from lmhead.train.config import TrainConfig, make_config
from lmhead.train.heads import make_loss
from lmhead.train.loop import Trainer
from lmhead.train.progress import Silence
from lmhead.train.schedule import learning_rate
from lmhead.train.text import TextTask, make_model

WAYS = ("lmhead", "filter", "dense", "plain", "fused")
AGREE = 1e-3  # relative, of every step's loss
Step = Callable[[], float]


class OnTokens(TextTask):
    """The task on ids in memory, without files."""

    def __init__(self, config: TrainConfig, ids: Any, vocab: int) -> None:
        self.config = config
        counts = np.bincount(ids, minlength=vocab)
        tokens: Any = SimpleNamespace(train=ids, vocab_size=vocab, counts=lambda: counts)
        self.tokens = tokens
        torch.manual_seed(config.seed)
        self.model = make_model(config, self.tokens)
        self.criterion = make_loss(config, self.model.head, self.tokens.counts)


def ours(config: TrainConfig, ids: Any, vocab: int, folder: Path) -> Step:
    """A step of the package's trainer."""
    trainer = Trainer(OnTokens(config, ids, vocab), config, folder, Silence())
    trainer.task.model.train()

    def step() -> float:
        before = trainer.state.sums[0]
        trainer.step()
        return trainer.state.sums[0] - before

    return step


def plain(config: TrainConfig, ids: Any, vocab: int, *, fused: bool) -> Step:
    """A step as it is written by hand."""
    task = OnTokens(config, ids, vocab)
    model, weight = task.model, task.model.head.weight
    assert isinstance(weight, nn.Parameter)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    optimizer = AdamW(groups, lr=config.learning_rate, betas=betas, fused=fused or None)
    done = 0

    def step() -> float:
        nonlocal done
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, config)
        batch = task.batch(done, 0)
        logits = F.linear(model.hidden(batch.ids), weight)
        loss = F.cross_entropy(logits.view(-1, vocab), batch.targets.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        done += 1
        return loss.item()

    return step


def make_step(way: str, config: TrainConfig, ids: Any, vocab: int, folder: Path) -> Step:
    if way in ("plain", "fused"):
        return plain(config, ids, vocab, fused=way == "fused")
    if way == "filter":
        config = config.replace(grad_filter=0.02)
    elif way == "dense":
        config = config.replace(loss="dense")
    return ours(config, ids, vocab, folder)


def measure(
    config: TrainConfig, ids: Any, vocab: int, ways: list[str], rounds: int, steps: int
) -> dict[str, Any]:
    """Steps per second of each way, and their ratio to the plain loop's of the same round."""
    with tempfile.TemporaryDirectory() as folder:
        made = {way: make_step(way, config, ids, vocab, Path(folder)) for way in ways}
        losses: dict[str, list[float]] = {way: [] for way in ways}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                start = time.perf_counter()
                losses[way] += [made[way]() for _ in range(steps)]
                if number:  # the first round warms up
                    seconds[way].append((time.perf_counter() - start) / steps)
    results = []
    for way in ways:
        off = [abs(a / b - 1) for a, b in zip(losses[way], losses["plain"], strict=True)]
        ratios = [a / b for a, b in zip(seconds["plain"], seconds[way], strict=True)]
        results.append(
            {
                "name": way,
                "steps_per_second": 1 / median(seconds[way]),
                "tokens_per_second": config.batch * config.block / median(seconds[way]),
                "speed_to_plain": median(ratios),
                "ratios": ratios,
                "loss_off_by": max(off),
                "wrong": way != "filter" and max(off) > AGREE,
            }
        )
    tokens = config.batch * config.block
    return {"vocab": vocab, "tokens": tokens, "settings": asdict(config), "results": results}


def characters(path: Path | None) -> tuple[Any, int]:
    """The ids of a text, character by character; random ones without a text."""
    if path is None:
        return np.random.default_rng(0).integers(65, size=200_000).astype(np.uint16), 65
    text = path.read_text(encoding="utf-8")
    ids = {character: id for id, character in enumerate(sorted(set(text)))}
    return np.array([ids[character] for character in text], np.uint16), len(ids)


def zipf(vocab: int) -> tuple[Any, int]:
    """Random ids whose frequencies fall as 1 / rank."""
    shares = 1 / np.arange(1, vocab + 1)
    draw = np.random.default_rng(0)
    return draw.choice(vocab, 200_000, p=shares / shares.sum()).astype(np.uint16), vocab


def main() -> None:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="a text; without it, random characters")
    parser.add_argument("--out", type=Path, default=here / "results" / "train-speed.json")
    parser.add_argument("--way", action="append", choices=WAYS, help="all by default")
    parser.add_argument("--vocab", type=int, default=50_257)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="of a round")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    ways = [way for way in WAYS if way == "plain" or not given.way or way in given.way]
    small = make_config({"steps": 10**6}, preset="shakespeare-char")
    large = small.replace(width=256, block=128, batch=8)
    documents = []
    for config, (ids, vocab) in ((small, characters(given.data)), (large, zipf(given.vocab))):
        print(f"V = {vocab:,}, {config.batch * config.block} tokens a step, width {config.width}")
        found = measure(config, ids, vocab, ways, given.rounds, given.steps)
        documents.append(found)
        for row in found["results"]:
            print(
                f"  {row['name']:8s} {row['steps_per_second']:8.2f} steps/s   "
                f"{row['speed_to_plain']:5.2f} x plain   loss off by {row['loss_off_by']:.1e}"
                + ("   WRONG" if row["wrong"] else ""),
                flush=True,
            )
    document = {
        "benchmark": "train-speed",
        "title": "steps per second beside a plain torch loop",
        **describe(torch.get_num_threads()),
        "runs": documents,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if any(row["wrong"] for run in documents for row in run["results"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
