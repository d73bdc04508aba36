"""Start a training run in a new folder, or resume one.

    run/config.toml     the settings
    run/.lmhead-run     identifies the folder as a run, and locks it
    run/data/           token files, see token_data.py and sentence_pairs.py
    run/checkpoints/    see checkpoints.py
    run/log.jsonl       see training_log.py
    run/loss.png        the loss curve

`config.toml` is written when the token files are complete: from then on the run can be resumed,
whenever it was killed.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from lmhead.models.checkpoint import steps_of
from lmhead.parallel.process_ranks import all_ranks
from lmhead.progress import Progress
from lmhead.train import run_files, sentence_pairs, token_data
from lmhead.train.run_files import TrainError
from lmhead.train.task import Task
from lmhead.train.text_task import TextTask
from lmhead.train.token_data import CorpusError
from lmhead.train.train_config import MAY_CHANGE, TrainConfig, make_config, option_name
from lmhead.train.training_loop import Result, Trainer
from lmhead.train.translation_task import TranslationTask

SETTINGS, STANDARD_INPUT = "config.toml", "standard_input.txt"

# The value of `--task` -> a class that is called as Class(config, run, say).
TASKS: dict[str, Callable[[TrainConfig, Path, Callable[[str], object]], Task]] = {
    "text": TextTask,
    "translate": TranslationTask,
}


def train(config: TrainConfig, out: str | Path, *, progress: Progress | None = None) -> Result:
    """Train a model in a new folder `out`; `progress` is None to report to standard error.

    Raises:
        ValueError: wrong settings, or a corpus that cannot be used.
        TrainError: the folder holds a run already, is locked, or cannot be written.

    Example::

        result = train(make_config({"corpus": ["book.txt"]}, preset="cpu-small"), "run")
        model = load_checkpoint(result.checkpoint)
    """
    run = Path(out)

    def prepare(stack: ExitStack) -> TrainConfig:
        if config.corpus.count("-") > 1:
            raise ValueError("corpus: - (standard input) can be given only once")
        _check_new(run)
        run_files.check_writable(run)
        stack.enter_context(run_files.locked(run))
        _check_new(run)  # again, now that no other process can write to it
        _remove_data(run / "data")
        corpus = [
            _save_standard_input(run) if path == "-" else Path(path) for path in config.corpus
        ]
        return config.replace(corpus=[str(path.resolve()) for path in corpus])

    return _run(prepare, run, progress)


def resume(
    out: str | Path, changes: dict[str, Any] | None = None, *, progress: Progress | None = None
) -> Result:
    """Resume a run from its last checkpoint; the result is that of an uninterrupted run.

    `changes` are settings of `MAY_CHANGE`; `progress` is None to report to standard error.

    Raises:
        ValueError: there is no run, or a setting may not change.
        TrainError: the folder is locked or cannot be written, or the checkpoint is damaged.
        LostRankError: another process of the run has ended.
    """
    run = Path(out)
    if not (run / SETTINGS).is_file():
        raise ValueError(f"there is no run in {run}: {SETTINGS} is missing")
    if not (run / run_files.RUN_MARK).exists() and not steps_of(run):
        raise ValueError(
            f"there is no run in {run}: it has neither {run_files.RUN_MARK} nor checkpoints"
        )
    for name in changes or {}:
        if name not in MAY_CHANGE:
            allowed = ", ".join(map(option_name, MAY_CHANGE))
            raise ValueError(
                f"{option_name(name)} cannot change when a run is resumed; only these can: "
                f"{allowed}"
            )

    def prepare(stack: ExitStack) -> TrainConfig:
        run_files.check_writable(run)
        stack.enter_context(run_files.locked(run))
        return make_config(file=run / SETTINGS).replace(**(changes or {}))

    return _run(prepare, run, progress)


def _check_new(run: Path) -> None:
    """Refuse a folder that holds a run, or files that lmhead did not write."""
    marked = (run / run_files.RUN_MARK).exists()
    if steps_of(run) or (marked and (run / SETTINGS).exists()):
        raise TrainError(
            f"there is a run in {run} already: continue it with --resume {run}, or choose another "
            "folder"
        )
    # A start that failed leaves these.
    ours = {run_files.RUN_MARK, STANDARD_INPUT, "data"} if marked else set()
    names = sorted(path.name for path in run.iterdir()) if run.is_dir() else []
    others = [name for name in names if name not in ours and not run_files.is_temporary(name)]
    if others:
        raise TrainError(
            f"{run} is not empty and is not a training run (it holds {_listed(others)}): choose a "
            "new or empty folder"
        )


def _remove_data(folder: Path) -> None:
    """Remove the token files of a start that failed, perhaps with other settings."""
    if not folder.exists():
        return
    for module in (token_data, sentence_pairs):
        others = [folder.name]
        if folder.is_dir():
            others = run_files.not_ours(folder, module.FILES, module.ABOUT)
        if not others:
            run_files.remove(folder)
            return
    raise TrainError(
        f"{folder} holds files that lmhead did not write ({_listed(others)}): move them elsewhere, "
        "or choose another folder for the run"
    )


def _save_standard_input(run: Path) -> Path:
    """Copy standard input to a file of the run, because a corpus is read several times."""
    path = run / STANDARD_INPUT
    temporary = run_files.temporary_name(path)
    with run_files.os_errors_as_train_errors(f"write {path}"), temporary.open("wb") as file:
        while block := _read_standard_input():
            file.write(block)
    os.replace(temporary, path)
    return path


def _read_standard_input() -> bytes:
    if sys.stdin is None:
        raise CorpusError("cannot read standard input: it is closed")
    try:
        return sys.stdin.buffer.read(1 << 20)
    except OSError as error:
        raise CorpusError(f"cannot read standard input: {error.strerror}") from None


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _run(
    prepare: Callable[[ExitStack], TrainConfig], run: Path, progress: Progress | None
) -> Result:
    """Lock the folder and read the settings on rank 0; train on all ranks."""
    with all_ranks() as ranks, ExitStack() as stack:
        if not ranks.first:
            progress = Progress(io.StringIO())
        elif progress is None:
            progress = Progress(plain=True)
        say = progress.print
        config = ranks.on_first(lambda: prepare(stack))
        ranks.on_first(lambda: run_files.remove_temporary(run, run / "checkpoints"))
        if config.threads:
            torch.set_num_threads(config.threads)
        task = ranks.first_then_others(lambda: TASKS[config.task](config, run, say))
        ranks.on_first(lambda: _write_settings(config, run))
        with ranks.communication():
            return Trainer(task, config, run, progress, ranks).run()


def _write_settings(config: TrainConfig, run: Path) -> None:
    path = run / SETTINGS
    if path.exists() and make_config(file=path) == config:  # keep the user's comments
        return
    with run_files.os_errors_as_train_errors(f"write the settings to {run}"):
        run_files.write_text(path, config.to_toml())
