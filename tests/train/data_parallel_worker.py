"""Data-parallel runs for `test_data_parallel.py`, which starts this program with torchrun.

    torchrun --nproc-per-node N data_parallel_worker.py FOLDER

All scenarios share one process group, so that torch is loaded once per rank.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lmhead.progress import Progress
from lmhead.train import TrainConfig, TrainError, resume, train
from lmhead.train.text_task import TextTask
from train.runs import quiet, small
from train.test_translation import small as translation


class StopsAt(Progress):
    """Sends SIGTERM to this process, rank 0, when a step is reported."""

    def __init__(self, step: int) -> None:
        super().__init__(io.StringIO())
        self.step = step

    def __call__(self, status: str) -> None:
        if status.startswith(f"step {self.step}/"):
            os.kill(os.getpid(), signal.SIGTERM)


def same_on_all_ranks(value: Any) -> None:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert values == [value] * len(values), values


def run(config: TrainConfig, out: Path) -> None:
    result = train(config, out, progress=quiet())
    same_on_all_ranks((result.step, result.tokens, str(result.checkpoint)))


def diverge(folder: Path, out: Path, **changes: Any) -> None:
    """NaN in the rows of the last rank only."""
    loss, last = TextTask.loss, dist.get_rank() == dist.get_world_size() - 1

    def poisoned(self: TextTask, batch: Any, num_items: int) -> Any:
        value = loss(self, batch, num_items)
        return value * math.nan if last and batch.number == 9 else value

    TextTask.loss = poisoned  # type: ignore[method-assign]
    try:
        train(small(folder, save_every=100, eval_every=0, **changes), out, progress=quiet())
    except TrainError as error:
        same_on_all_ranks(str(error))
        (folder / f"error-{out.name}").write_text(str(error))
    else:
        raise AssertionError("no error")
    finally:
        TextTask.loss = loss  # type: ignore[method-assign]


def sharded(folder: Path) -> None:
    """The runs of `--shard full` and `--shard vocab`."""
    for shard in ("full", "vocab"):
        run(small(folder, dropout=0.0, shard=shard), folder / f"text-{shard}")
        run(translation(folder, dropout=0.0, shard=shard), folder / f"translation-{shard}")
        diverge(folder, folder / f"diverged-{shard}", shard=shard)
    options: dict[str, Any] = {"tied": False, "bias": True, "label_smoothing": 0.1, "z_loss": 1e-3}
    run(small(folder, dropout=0.0, batch=1, shard="vocab", **options), folder / "one-row-vocab")
    words: dict[str, Any] = {"samples": 10, "tokenizer": "words", "vocab_size": 40}
    for head in ("sampled", "adaptive"):
        run(small(folder, dropout=0.0, head=head, shard="full", **words), folder / f"{head}-full")

    run(small(folder, dropout=0.2, shard="vocab"), folder / "dropout-vocab")
    train(small(folder, dropout=0.2, shard="vocab"), folder / "stopped-vocab", progress=StopsAt(6))
    resume(folder / "stopped-vocab", progress=quiet())

    train(small(folder, dropout=0.0, shard="vocab"), folder / "moved", progress=StopsAt(4))
    resume(folder / "moved", {"shard": "full"}, progress=StopsAt(8))
    resume(folder / "moved", {"shard": "data"}, progress=quiet())
    train(small(folder, dropout=0.0, shard="full"), folder / "to-one", progress=StopsAt(6))


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    exact = {"dropout": 0.0}
    run(small(folder, **exact), folder / "text")
    run(small(folder, **exact, batch=1), folder / "one-row")
    for head in ("sampled", "adaptive"):
        options = {"head": head, "samples": 10, "tokenizer": "words", "vocab_size": 40}
        run(small(folder, **exact, **options), folder / head)
    run(translation(folder, **exact), folder / "translation")

    run(small(folder, dropout=0.2), folder / "dropout")
    stopped = train(small(folder, dropout=0.2), folder / "stopped", progress=StopsAt(6))
    same_on_all_ranks((stopped.signal, stopped.step))
    assert (stopped.signal, stopped.step) == (signal.SIGTERM, 6), stopped
    resume(folder / "stopped", progress=quiet())

    train(small(folder, **exact), folder / "fewer", progress=StopsAt(6))
    resume(folder / "more", progress=quiet())  # begun by a single process
    diverge(folder, folder / "diverged")
    try:
        train(small(folder), folder / "text", progress=quiet())
    except TrainError as error:
        same_on_all_ranks(str(error))
    else:
        raise AssertionError("a second run in one folder")

    sharded(folder)

    task = TextTask(small(folder), folder / "text", lambda _: None)
    same_on_all_ranks(hashlib.sha256(task.tokenizer_json.encode()).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
