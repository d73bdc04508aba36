"""The copy as a file: safetensors, with the version of the format and a hash of the weight."""

from __future__ import annotations

import hashlib
import os
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lmhead.screen.copy import Bits, Copy

FORMAT = "lmhead-screen"
VERSION = "1"


def save(path: str | os.PathLike[str], copy: Copy, weight: Tensor) -> None:
    """Write a copy and what it belongs to."""
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "bits": str(copy.bits),
        "weight_sha256": weight_hash(weight),
    }
    tensors = {name: t.contiguous() for name, t in copy.tensors().items()}
    save_file(tensors, os.fspath(path), metadata=metadata)


def load(path: str | os.PathLike[str], weight: Tensor) -> Copy:
    """Read a copy of this weight; a ValueError if it is anything else."""
    name = os.fspath(path)
    try:
        opened: Any = safe_open(name, framework="pt")
    except SafetensorError as problem:
        raise ValueError(f"{name} is not a safetensors file: {problem}") from problem
    with opened as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{name} holds no copy of a weight; its format is not {FORMAT}")
        if metadata.get("version") != VERSION:
            raise ValueError(
                f"{name} must have format version {VERSION}; got {metadata.get('version')}"
            )
        if metadata.get("weight_sha256") != weight_hash(weight):
            raise ValueError(f"{name} belongs to another weight than that of this head")
        bits = cast(Bits, 8 if metadata["bits"] == "8" else metadata["bits"])
        tensors = {key: file.get_tensor(key) for key in sorted(file.keys())}
    try:
        return Copy.from_tensors(bits, tensors)
    except (KeyError, ValueError) as problem:
        raise ValueError(f"{name} is damaged: {problem}") from problem


def weight_hash(weight: Tensor) -> str:
    """Return the SHA-256 of type, shape and bytes."""
    digest = hashlib.sha256(f"{weight.dtype} {tuple(weight.shape)}".encode())
    for lo in range(0, len(weight), 4096):
        block = weight[lo : lo + 4096].detach().cpu().contiguous()
        digest.update(block.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
