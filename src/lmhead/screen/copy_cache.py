"""Quantized copies in the cache folder: made once per weight, then read from a file.

In:  a weight.
Out: its copy, memory-mapped from `screen/KEY.safetensors` in the cache folder, or made and kept.

The key is a hash of the weight's bytes, so that another weight never gets this copy; the file has a
hash of its own content, and a damaged one is made again. A folder that cannot be written to is no
error: the copy is made each time. `lmhead cache` lists and removes the files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lmhead.screen.build_copy import OnRows, build
from lmhead.screen.quantized_weight import Bits, QuantizedWeight
from lmhead.sweep import kernels
from lmhead.user_cache import cache_folder

FOLDER = "screen"
MIN_CACHED_BYTES = 8 << 20
"""Bytes of a weight from which on its copy is kept: a smaller one is made in a few milliseconds."""
_VERSION = 1  # of the content; another number makes all copies again


def cached_copy(
    weight: Tensor, *, bits: Bits = 8, progress: OnRows | None = None
) -> QuantizedWeight:
    """Return the copy of a weight (V, D), from the cache folder if it is there."""
    if weight.nbytes < MIN_CACHED_BYTES:
        return build(weight, bits=bits, progress=progress)
    path = cache_folder() / FOLDER / f"{_key(weight, bits)}.safetensors"
    found = _read(path, weight, bits)
    if found is None:
        found = build(weight, bits=bits, progress=progress)
        _write(path, found)
    return found


def _key(weight: Tensor, bits: Bits) -> str:
    content = f"{_VERSION} {bits} {weight.dtype} {tuple(weight.shape)} {_bytes_hash(weight)}"
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _bytes_hash(t: Tensor) -> str:
    """Return a hash of a tensor's bytes: the core's, at the speed of memory, else SHA-256."""
    flat = t.detach().contiguous().reshape(-1).view(torch.uint8)
    if (core := kernels.core_with("hash_bytes")) is not None:
        return f"core {core.hash_bytes(flat, kernels.threads())}"
    return f"sha256 {hashlib.sha256(flat.numpy().data).hexdigest()}"


def content_hash(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of named tensors, to detect damaged files."""
    lines = [f"{n} {t.dtype} {tuple(t.shape)} {_bytes_hash(t)}" for n, t in sorted(tensors.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _read(path: Path, weight: Tensor, bits: Bits) -> QuantizedWeight | None:
    """Return the copy of a file; None if there is none, or if it is damaged."""
    try:
        opened: Any = safe_open(os.fspath(path), framework="pt")
        with opened as file:
            content = (file.metadata() or {}).get("content")
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        if content != content_hash(tensors):
            return None
        copy = QuantizedWeight.from_tensors(bits, tensors)
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    return copy if (copy.vocab, copy.size) == tuple(weight.shape) else None


def _write(path: Path, copy: QuantizedWeight) -> None:
    tensors = {name: t.contiguous() for name, t in copy.tensors().items()}
    part = path.with_suffix(f".{os.getpid()}.part")
    with suppress(OSError, SafetensorError):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, part, metadata={"content": content_hash(tensors)})
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
