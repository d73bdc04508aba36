"""Is training with this package as fast as a plain torch loop? A few minutes.

The same body, weights and batches, in one process, rounds interleaved:

    lmhead     the package's trainer: no logits tensor, fused AdamW
    filter     the same with grad_filter=0.02
    dense      the package's trainer with torch's dense cross-entropy
    plain      F.cross_entropy(F.linear(hidden, weight), targets), torch's default AdamW
    fused      the plain loop with AdamW(fused=True)

with characters (V = 65), and with random text of V = 50,257 tokens whose frequencies follow Zipf's
law. Every step's loss is compared with the plain loop's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW

from benchmarks import report
from benchmarks.report import Document
from benchmarks.runner import Run, benchmark, integer, rounds
from benchmarks.timing import Progress, ratio, time_calls
from lmhead.progress import Progress as TrainingProgress
from lmhead.train.text_task import TextTask, make_model
from lmhead.train.train_config import TrainConfig, make_config
from lmhead.train.training_loop import Trainer, learning_rate
from lmhead.train.training_loss import make_loss

LOOPS = ("lmhead", "filter", "dense", "plain", "fused")
AGREE = 1e-3  # relative, of every step's loss
Step = Callable[[], float]


class OnTokens(TextTask):
    """The text task on ids in memory, without files."""

    def __init__(self, config: TrainConfig, ids: Any, vocab: int) -> None:
        self.config = config
        counts = np.bincount(ids, minlength=vocab)
        tokens: Any = SimpleNamespace(train=ids, vocab_size=vocab, counts=lambda: counts)
        self.tokens = tokens
        torch.manual_seed(config.seed)
        self.model = make_model(config, self.tokens)
        self.criterion = make_loss(config, self.model.head, self.tokens.counts)


def ours(config: TrainConfig, ids: Any, vocab: int, folder: Path) -> Step:
    """Return a step of the package's trainer."""
    trainer = Trainer(OnTokens(config, ids, vocab), config, folder, TrainingProgress())
    trainer.task.model.train()

    def step() -> float:
        before = trainer.state.sums[0]
        trainer.step()
        return trainer.state.sums[0] - before

    return step


def plain(config: TrainConfig, ids: Any, vocab: int, *, fused: bool) -> Step:
    """Return a step of a loop written by hand."""
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


def make_step(loop: str, config: TrainConfig, ids: Any, vocab: int, folder: Path) -> Step:
    """Return a step of one of the loops."""
    if loop in ("plain", "fused"):
        return plain(config, ids, vocab, fused=loop == "fused")
    if loop == "filter":
        config = config.replace(grad_filter=0.02)
    elif loop == "dense":
        config = config.replace(loss="dense")
    return ours(config, ids, vocab, folder)


def measure(
    config: TrainConfig,
    ids: Any,
    vocab: int,
    loops: list[str],
    rounds: int,
    steps: int,
    progress: Progress,
) -> dict[str, Any]:
    """Measure steps per second of each loop, and their ratio to the plain loop's."""
    losses: dict[str, list[float]] = {loop: [] for loop in loops}
    with tempfile.TemporaryDirectory() as folder:
        steps_of = {loop: make_step(loop, config, ids, vocab, Path(folder)) for loop in loops}

        def several(loop: str) -> Callable[[], None]:
            return lambda: losses[loop].extend(steps_of[loop]() for _ in range(steps))

        seconds = time_calls({loop: several(loop) for loop in loops}, rounds, progress)
    results = []
    for loop in loops:
        off = max(abs(a / b - 1) for a, b in zip(losses[loop], losses["plain"], strict=True))
        per_second = steps / median(seconds[loop])
        results.append(
            {
                "name": loop,
                "steps_per_second": per_second,
                "tokens_per_second": config.batch * config.block * per_second,
                "speed_to_plain": ratio(seconds["plain"], seconds[loop]).median,
                "ratios": [a / b for a, b in zip(seconds["plain"], seconds[loop], strict=True)],
                "loss_off_by": off,
                "wrong": loop != "filter" and off > AGREE,
            }
        )
    tokens = config.batch * config.block
    return {"vocab": vocab, "tokens": tokens, "settings": asdict(config), "results": results}


def characters(path: Path | None) -> tuple[Any, int]:
    """Return the ids of a text's characters and V; random ids without a text."""
    if path is None:
        return np.random.default_rng(0).integers(65, size=200_000).astype(np.uint16), 65
    text = path.read_text(encoding="utf-8")
    ids = {character: id for id, character in enumerate(sorted(set(text)))}
    return np.array([ids[character] for character in text], np.uint16), len(ids)


def zipf(vocab: int) -> tuple[Any, int]:
    """Return random ids whose frequencies fall as 1 / rank, and V."""
    shares = 1 / np.arange(1, vocab + 1)
    draw = np.random.default_rng(0)
    return draw.choice(vocab, 200_000, p=shares / shares.sum()).astype(np.uint16), vocab


def lines(document: Document, width: int) -> list[str]:
    """Return a table per vocabulary."""
    out = []
    for run in document["runs"]:
        rows = run["results"]
        columns = [
            ("", [r["name"] for r in rows]),
            ("steps/s", [f"{r['steps_per_second']:.2f}" for r in rows]),
            ("of plain", [f"{r['speed_to_plain']:.2f}" for r in rows]),
            ("loss off by", [f"{r['loss_off_by']:.1e}" for r in rows]),
            ("", ["WRONG" if r["wrong"] else "" for r in rows]),
        ]
        size = run["settings"]["width"]
        out.append(f"V = {run['vocab']:,}, {run['tokens']} tokens per step, width {size}")
        out += [*report.table(columns, width), ""]
    return out


@benchmark("train-speed", "steps per second beside a plain torch loop", lines)
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Text file.  [default: random characters]",
)
@click.option("--way", "some", multiple=True, type=click.Choice(LOOPS), help="All by default.")
@integer("--vocab", 50_257, "V of the random text.")
@rounds(8)
@integer("--steps", 5, "Training steps per round.")
def command(
    run: Run, data: Path | None, some: tuple[str, ...], vocab: int, rounds: int, steps: int
) -> None:
    """Measure training steps per second, compared with a plain torch loop."""
    loops = [name for name in LOOPS if name == "plain" or not some or name in some]
    small = make_config({"steps": 10**6}, preset="shakespeare-char")
    large = small.replace(width=256, block=128, batch=8)
    run.document["runs"] = []
    for config, (ids, size) in ((small, characters(data)), (large, zipf(vocab))):
        result = measure(config, ids, size, loops, rounds, steps, run.progress)
        run.document["runs"].append(result)
        run.wrong = run.wrong or any(row["wrong"] for row in result["results"])
