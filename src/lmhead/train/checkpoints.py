"""Checkpoints of a run: save, restore, delete old ones, export the model.

    run/checkpoints/step-00000250/
        config.json            the model's architecture and the training settings
        model.safetensors      its weights; a tied weight once
        tokenizer.json         its tokenizer
        training.json          step, best validation so far, running sums, SHA-256 of all files
        training.safetensors   AdamW's moments and torch's random state

The first three are the model (see `lmhead.models.checkpoint`), and an exported model has only them.
A folder gets its name when all its files are on disk, so a checkpoint is complete or absent. One
that is damaged later is renamed to damaged-step-..., and the one before it is used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from lmhead.models import checkpoint
from lmhead.models.checkpoint import CONFIG, MODEL, STATE, TOKENIZER
from lmhead.train import run_files
from lmhead.train.run_files import TrainError
from lmhead.train.task import Task

_TENSORS = "training.safetensors"
_FILES = (CONFIG, MODEL, TOKENIZER, STATE, _TENSORS)
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class DamagedCheckpointError(TrainError):
    """A file of a checkpoint is missing, incomplete or changed."""


@dataclass
class TrainingState:
    """The progress of a run."""

    step: int = 0  # steps completed
    seconds: float = 0.0  # time spent on them
    tokens: int = 0  # targets trained on
    # best_step, best_loss: step and loss of the best validation; None before the first
    best_step: int | None = None
    best_loss: float | None = None
    # sums of loss, steps, targets and seconds since the last log line
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])


class Tensors(NamedTuple):
    """The tensors of a checkpoint, by name."""

    model: dict[str, Tensor]
    training: dict[str, Tensor]


def collect(task: Task, optimizer: AdamW, *, keep: bool = True) -> Tensors:
    """Return the full tensors of a checkpoint, those split over ranks gathered one by one.

    With `keep` False this rank only takes part in the collectives.
    """
    parts: list[dict[str, Tensor]] = []
    for tensors in (checkpoint.weights_of(task.model), _training_tensors(task, optimizer)):
        gathered = {}
        for name, tensor in tensors.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if keep:
                gathered[name] = full
        parts.append(gathered)
    return Tensors(*parts)


def save(
    run: Path, task: Task, tensors: Tensors, state: TrainingState, settings: Mapping[str, Any]
) -> Path:
    """Write the checkpoint of a step; return its folder."""
    folder = checkpoint.checkpoint_of(run, state.step)
    if folder.exists():  # the run was resumed from it
        return folder
    with run_files.new_folder(folder) as new:
        about = {
            "format": checkpoint.FORMAT,
            "version": checkpoint.VERSION,
            **task.describe(),
            "step": state.step,
            "training": dict(settings),
        }
        run_files.put_json(new / CONFIG, about)
        run_files.put_text(new / TOKENIZER, task.tokenizer_json)
        run_files.put_tensors(new / MODEL, tensors.model)
        run_files.put_tensors(new / _TENSORS, tensors.training)
        digests = {name: run_files.file_sha256(new / name) for name in _FILES if name != STATE}
        digests["state"] = _state_sha256(state)
        run_files.put_json(new / STATE, dataclasses.asdict(state) | {"sha256": digests})
    return folder


def restore_latest(
    run: Path, task: Task, optimizer: AdamW, say: Callable[[str], object]
) -> TrainingState:
    """Restore the last checkpoint that is not damaged; return its state, a new one without any."""
    damaged: dict[Path, DamagedCheckpointError] = {}
    for step in reversed(checkpoint.steps_of(run)):
        folder = checkpoint.checkpoint_of(run, step)
        try:
            state = restore(folder, task, optimizer)
        except DamagedCheckpointError as error:
            damaged[folder] = error
            continue
        for path, problem in damaged.items():
            number = sum(1 for _ in path.parent.glob(f"damaged-{path.name}*"))
            new_name = f"damaged-{path.name}" + (f"-{number}" if number else "")
            with run_files.os_errors_as_train_errors(f"rename {path}"):
                os.rename(path, path.with_name(new_name))
            say(f"{problem}. Renamed it to {new_name}; continuing from step {step}")
        return state
    if damaged:
        raise TrainError(". ".join(map(str, damaged.values())) + ". Start a new run")
    return TrainingState()


def restore(folder: Path, task: Task, optimizer: AdamW) -> TrainingState:
    """Load model, optimizer and random state from a checkpoint; return its training state."""
    try:
        fields = json.loads((folder / STATE).read_text(encoding="utf-8"))
        digests = fields.pop("sha256", {})
        state = TrainingState(**fields)
        if checkpoint.checkpoint_of(folder.parent.parent, state.step) != folder:
            raise ValueError(f"{STATE} is of step {state.step}")
        for name, digest in digests.items():
            actual = (
                _state_sha256(state) if name == "state" else run_files.file_sha256(folder / name)
            )
            if actual != digest:
                raise ValueError(f"{STATE if name == 'state' else name} has changed")
        checkpoint.set_weights(task.model, load_file(folder / MODEL))
        tensors = load_file(folder / _TENSORS)
        for name, tensor in _trained(task):
            optimizer.state[tensor] = {part: tensors[f"{part}/{name}"] for part in _MOMENTS}
        torch.set_rng_state(tensors["random/torch"])
    except FileNotFoundError as error:
        missing = Path(str(error.filename or "a file")).name
        raise DamagedCheckpointError(f"checkpoint {folder} is damaged: no {missing}") from error
    except OSError as error:
        raise TrainError(f"cannot read the checkpoint {folder}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise DamagedCheckpointError(f"checkpoint {folder} is damaged: {error}") from error
    return state


def nonfinite_tensor(tensors: Tensors) -> str | None:
    """Return the name of a weight or moment that holds inf or NaN; None if all are finite."""
    for name, tensor in (tensors.model | tensors.training).items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            return name
    return None


def delete_old(run: Path, keep: int, best: int | None) -> None:
    """Delete all checkpoints except the last `keep`, the best, and any with files of others."""
    for step in checkpoint.steps_of(run)[:-keep]:
        folder = checkpoint.checkpoint_of(run, step)
        if step != best and not run_files.not_ours(folder, _FILES, CONFIG):
            run_files.remove(folder)


def export(where: str | PathLike[str], out: str | PathLike[str], *, dtype: str = "float32") -> Path:
    """Write the model of a run to a new folder, which `open_model` opens.

    Of the training settings, only the names of the corpus files are kept, not their folders.

    Args:
        where: a run, whose best checkpoint is exported, or a checkpoint.
        out: the folder; it must not exist.
        dtype: "float32", "float16" or "bfloat16", of the file; an opened model computes in float32.

    Example::

        export("run", "model", dtype="float16")
        open_model("model")
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}; got {dtype!r}")
    target = Path(out)
    if target.exists():
        raise TrainError(f"{target} exists already: choose another folder")
    folder = checkpoint.find_checkpoint(Path(where))
    checkpoint.load_checkpoint(folder)  # raises if it cannot be opened
    about = dict(checkpoint.read_about(folder).values)
    training: dict[str, Any] = about.get("training", {})
    training["corpus"] = [Path(path).name for path in training.get("corpus", [])]
    tensors = {
        name: tensor.to(_DTYPES[dtype]) if tensor.is_floating_point() else tensor
        for name, tensor in load_file(folder / MODEL).items()
    }
    with (
        run_files.os_errors_as_train_errors(f"write the model to {target}"),
        run_files.new_folder(target) as new,
    ):
        run_files.put_json(new / CONFIG, about)
        run_files.put_tensors(new / MODEL, tensors)
        shutil.copyfile(folder / TOKENIZER, new / TOKENIZER)
    return target


_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def _trained(task: Task) -> list[tuple[str, nn.Parameter]]:
    return [pair for pair in task.model.named_parameters() if pair[1].requires_grad]


def _training_tensors(task: Task, optimizer: AdamW) -> dict[str, Tensor]:
    tensors = {"random/torch": torch.get_rng_state()}
    for name, tensor in _trained(task):
        for moment in _MOMENTS:
            value = optimizer.state[tensor].get(moment)
            if value is None:  # no gradient yet
                value = torch.zeros(()) if moment == "step" else torch.zeros_like(tensor)
            tensors[f"{moment}/{name}"] = value
    return tensors


def _state_sha256(state: TrainingState) -> str:
    return hashlib.sha256(json.dumps(dataclasses.asdict(state)).encode()).hexdigest()
