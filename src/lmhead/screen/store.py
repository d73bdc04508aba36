"""The copy as a file: safetensors, with hashes of its own content and of the weight."""

from __future__ import annotations

import hashlib
import os
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lmhead.screen.quantized_weight import Bits, QuantizedWeight

FORMAT = "lmhead-screen"
VERSION = "2"


def save(path: str | os.PathLike[str], copy: QuantizedWeight, weight: Tensor) -> None:
    """Write a copy and what it belongs to."""
    tensors = {name: t.contiguous() for name, t in copy.tensors().items()}
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "bits": str(copy.bits),
        "weight_sha256": tensor_hash(weight),
        "content_sha256": _content_hash(str(copy.bits), tensors),
    }
    save_file(tensors, os.fspath(path), metadata=metadata)


def load(path: str | os.PathLike[str], weight: Tensor) -> QuantizedWeight:
    """Read a copy of this weight; raise ValueError if the file is anything else."""
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
                f"{name} must have format version {VERSION}; got {metadata.get('version')} "
                "(save the copy again)"
            )
        if metadata.get("weight_sha256") != tensor_hash(weight):
            raise ValueError(f"{name} was made from a different weight than this head's")
        tensors = {key: file.get_tensor(key) for key in sorted(file.keys())}
    # One flipped bit of a scale would give wrong tokens with a certificate.
    if metadata.get("content_sha256") != _content_hash(metadata.get("bits", ""), tensors):
        raise ValueError(f"{name} is damaged: its content does not match its hash")
    bits = cast(Bits, 8 if metadata["bits"] == "8" else metadata["bits"])
    try:
        return QuantizedWeight.from_tensors(bits, tensors)
    except (KeyError, ValueError) as problem:
        raise ValueError(f"{name} is damaged: {problem}") from problem


def tensor_hash(tensor: Tensor) -> str:
    """Return the SHA-256 of type, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for block in torch.split(tensor.detach(), 4096):
        digest.update(block.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _content_hash(bits: str, tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of all tensors with their names."""
    parts = [f"{name} {tensor_hash(tensors[name])}" for name in sorted(tensors)]
    return hashlib.sha256("\n".join([bits, *parts]).encode()).hexdigest()
