"""Start a run in a new folder, or go on with one.

    run/config.toml     its settings
    run/data/           token files, see tokens.py
    run/checkpoints/    see checkpoints.py
    run/log.jsonl       one line per report, see log.py
    run/loss.png        the loss curve

`config.toml` is written when the data is whole: from then on a run can go on, whatever a kill has
left undone.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from lmhead.models.checkpoint import steps_of
from lmhead.train.config import MAY_CHANGE, TrainConfig, make_config, option_name
from lmhead.train.files import (
    TrainError,
    explained,
    locked,
    remove,
    sweep_parts,
    usable,
    write_text,
)
from lmhead.train.loop import Result, Trainer
from lmhead.train.progress import Progress
from lmhead.train.task import Task

SETTINGS = "config.toml"

# Name -> where its class is. Called as Class(config, run, say); loaded when it is asked for.
TASKS = {
    "text": "lmhead.train.text:TextTask",
    "translate": "lmhead.train.translation:TranslationTask",
}


def train(config: TrainConfig, out: str | Path, *, progress: Progress | None = None) -> Result:
    """Train a model from text files in a new folder.

    Args:
        config: the settings; `corpus` names the files.
        out: the folder of the run, made if need be.
        progress: what is told; None for standard error.

    Raises:
        ValueError: settings or files that cannot be right.
        TrainError: there is a run already, or another one is writing, or nothing can be written.

    Example::

        result = train(make_config({"corpus": ["book.txt"]}, preset="cpu-small"), "run")
        model = load_checkpoint(result.checkpoint)
    """
    run = Path(out)
    usable(run)
    corpus = tuple(str(Path(path).resolve()) for path in config.corpus)
    config = config.replace(corpus=corpus)
    with locked(run):
        if (run / SETTINGS).exists() or steps_of(run):
            raise TrainError(
                f"there is a run in {run} already: go on with it by --resume {run}, or choose "
                "another folder"
            )
        remove(run / "data")  # of a start that failed, perhaps with other settings
        return _go(config, run, progress)


def resume(
    out: str | Path, changes: dict[str, Any] | None = None, *, progress: Progress | None = None
) -> Result:
    """Go on with a run from its last checkpoint, as if it had never stopped.

    Args:
        out: the folder of the run.
        changes: settings to change; only those that say how long to go on and what to report.
        progress: what is told; None for standard error.

    Raises:
        ValueError: no run is there, or a setting that a run keeps to its end.
        TrainError: another run is writing, a damaged checkpoint, or nothing can be written.
    """
    run = Path(out)
    if not (run / SETTINGS).is_file():
        raise ValueError(f"there is no run in {run}: {SETTINGS} is missing")
    for name in changes or {}:
        if name not in MAY_CHANGE:
            allowed = ", ".join(map(option_name, MAY_CHANGE))
            raise ValueError(
                f"{option_name(name)} stays as it is when a run goes on; only these may change: "
                f"{allowed}"
            )
    usable(run)
    with locked(run):
        config = make_config(file=run / SETTINGS).replace(**(changes or {}))
        return _go(config, run, progress)


def _go(config: TrainConfig, run: Path, progress: Progress | None) -> Result:
    progress = Progress(config.steps) if progress is None else progress
    sweep_parts(run)
    sweep_parts(run / "checkpoints")
    if config.threads:
        torch.set_num_threads(config.threads)
    task = make_task(config, run, progress.say)
    with explained(f"write the settings to {run}"):
        write_text(run / SETTINGS, config.to_toml())
    return Trainer(task, config, run, progress).run()


def make_task(config: TrainConfig, run: Path, say: Callable[[str], object]) -> Task:
    """The task that the settings name, with its data in the folder of the run."""
    module, name = TASKS[config.task].split(":")
    task: Task = getattr(import_module(module), name)(config, run, say)
    return task
