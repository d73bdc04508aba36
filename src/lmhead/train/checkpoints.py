"""Checkpoints of a run: written whole, found again, thinned out.

    run/checkpoints/step-00000250/
        config.json            what the model is, and the settings it was trained with
        model.safetensors      its weights; a tied weight once
        tokenizer.json         its vocabulary
        training.json          step, best validation so far, running sums
        training.safetensors   AdamW's moments and torch's random state

The first three are the model, see `lmhead.models.checkpoint`. A folder with such a name is whole:
it was renamed to it when all its files were on the disk.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import AdamW

from lmhead.models.checkpoint import (
    CONFIG,
    FORMAT,
    MODEL,
    STATE,
    TOKENIZER,
    VERSION,
    checkpoint_of,
    set_weights,
    steps_of,
    weights_of,
)
from lmhead.train.files import TrainError, new_folder, put_json, put_tensors, put_text, remove
from lmhead.train.task import Task

_TENSORS = "training.safetensors"


@dataclass
class State:
    """Where a run is.

    Attributes:
        step: steps done.
        seconds: spent on them.
        tokens: targets seen.
        best_step, best_loss: of the best validation; None before the first.
        sums: of loss, steps, targets and seconds since the last line of the log.
    """

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    best_step: int | None = None
    best_loss: float | None = None
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])


def save(
    run: Path, task: Task, optimizer: AdamW, state: State, settings: Mapping[str, Any]
) -> Path:
    """Write the checkpoint of a step; nothing of it is seen before it is whole."""
    folder = checkpoint_of(run, state.step)
    if folder.exists():  # this run has gone on from it, and is still there
        return folder
    with new_folder(folder) as part:
        about = {
            "format": FORMAT,
            "version": VERSION,
            **task.describe(),
            "step": state.step,
            "training": dict(settings),
        }
        put_json(part / CONFIG, about)
        put_text(part / TOKENIZER, task.tokenizer_json)
        put_tensors(part / MODEL, weights_of(task.model))
        put_json(part / STATE, dataclasses.asdict(state))
        put_tensors(part / _TENSORS, _training_tensors(task, optimizer))
    return folder


def restore(folder: Path, task: Task, optimizer: AdamW) -> State:
    """Put model, optimizer and random numbers back to where they were."""
    try:
        state = State(**json.loads((folder / STATE).read_text(encoding="utf-8")))
        set_weights(task.model, load_file(folder / MODEL))
        tensors = load_file(folder / _TENSORS)
        for name, tensor in _trained(task):
            optimizer.state[tensor] = {part: tensors[f"{part}/{name}"] for part in _PARTS}
        torch.set_rng_state(tensors["random/torch"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise TrainError(
            f"the checkpoint {folder} is damaged: {error}. Delete that folder to go on from the "
            "one before it"
        ) from error
    return state


def latest(run: Path) -> Path | None:
    """The checkpoint to go on from; None before the first."""
    steps = steps_of(run)
    return checkpoint_of(run, steps[-1]) if steps else None


def thin_out(run: Path, keep: int, best: int | None) -> None:
    """Delete all checkpoints but the last `keep` and the best."""
    for step in steps_of(run)[:-keep]:
        if step != best:
            remove(checkpoint_of(run, step))


_PARTS = ("exp_avg", "exp_avg_sq", "step")


def _trained(task: Task) -> list[tuple[str, nn.Parameter]]:
    return [pair for pair in task.model.named_parameters() if pair[1].requires_grad]


def _training_tensors(task: Task, optimizer: AdamW) -> dict[str, Tensor]:
    tensors = {"random/torch": torch.get_rng_state()}
    for name, tensor in _trained(task):
        for part in _PARTS:
            value = optimizer.state[tensor].get(part)
            if value is None:  # it has had no gradient yet
                value = torch.zeros(()) if part == "step" else torch.zeros_like(tensor)
            tensors[f"{part}/{name}"] = value
    return tensors
