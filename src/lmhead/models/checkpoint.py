"""Checkpoints of `lmhead train`: `config.json`, `model.safetensors` and `tokenizer.json`.

In:  such a folder, or the folder of a run, whose best checkpoint is taken.
Out: a `LanguageModel`, or a `ModelError` that says which file is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

CONFIG, MODEL, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module by name, a tied one once, under the name that comes first."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def set_weights(module: nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Copy tensors into a module, all that it has and no others."""
    own = weights_of(module)
    missing, extra = own.keys() - tensors.keys(), tensors.keys() - own.keys()
    if missing or extra:
        what = f"without {min(missing)}" if missing else f"with {min(extra)}, which has no place"
        raise ValueError(f"{source} must have the tensors of the model; it is {what}")
    for name, tensor in own.items():
        if tensors[name].shape != tensor.shape:
            raise ValueError(
                f"{name} in {source} must have shape {tuple(tensor.shape)}; "
                f"got {tuple(tensors[name].shape)}"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
