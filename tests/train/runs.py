"""Small runs for the tests: seconds, not minutes."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

from lmhead.models.checkpoint import checkpoint_of, steps_of
from lmhead.progress import Progress
from lmhead.train import TrainConfig
from lmhead.train.training_log import read_log

TEXT = "".join(f"The {a} {b} {c}.\n" for a in ("big", "old") for b in "xyz" for c in range(20))

SMALL: dict[str, Any] = {
    "tokenizer": "characters",
    "layers": 1,
    "heads": 2,
    "width": 16,
    "block": 8,
    "batch": 3,
    "accumulate": 2,
    "dropout": 0.1,
    "steps": 12,
    "warmup": 2,
    "learning_rate": 0.01,
    "log_every": 2,
    "eval_every": 4,
    "save_every": 3,
    "sample_tokens": 4,
    "curve": False,
    "threads": 1,
}


def quiet() -> Progress:
    return Progress(io.StringIO())


def corpus(folder: Path) -> str:
    path = folder / "corpus.txt"
    if not path.exists():  # several ranks may call this at once
        path.write_text(TEXT, encoding="utf-8")
    return str(path)


def small(folder: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(**{**SMALL, "corpus": [corpus(folder)], **changes})


def latest(run: Path) -> Path:
    """The last checkpoint of a run."""
    return checkpoint_of(run, steps_of(run)[-1])


def fingerprint(checkpoint: Path) -> dict[str, str]:
    """The bytes of a checkpoint that must not depend on how a run came there."""
    names = ("model.safetensors", "training.safetensors", "tokenizer.json")
    return {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in names}


def history(run: Path) -> list[dict[str, Any]]:
    """The log without times."""
    times = ("seconds", "tokens_per_second")
    return [
        {name: value for name, value in line.items() if name not in times}
        for line in read_log(run / "log.jsonl")
    ]
