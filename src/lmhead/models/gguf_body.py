"""The body of a Llama's GGUF file as a file of its own: no vocabulary, no head.

In:  a `GgufFile`.
Out: a file for llama.cpp, which takes embeddings instead of token ids.

llama.cpp multiplies hidden states by the head even if only hidden states are asked for. In this
file the head has 32 rows, so that costs nothing.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from lmhead.models.gguf_file import MAGIC, GgufFile

EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"
_TOKENS = 32  # size of the copy's vocabulary, which is not used
_ALIGNMENT = 32
_MAX_BYTES = 1 << 30  # of a body: in larger models the head is a small part of the work


def is_worthwhile(file: GgufFile) -> bool:
    """Return whether the body is small enough for a copy without the head to pay off."""
    size = sum(t.nbytes for name, t in file.tensors.items() if name not in (EMBEDDING, _HEAD))
    return size <= _MAX_BYTES


def write_body(file: GgufFile, path: Path) -> None:
    """Write the norms and blocks of a Llama, with a vocabulary of a few meaningless tokens."""
    fields = [
        _name("general.architecture") + struct.pack("<I", 8) + _name("llama"),
        _name("tokenizer.ggml.model") + struct.pack("<I", 8) + _name("none"),
        _name("llama.vocab_size") + struct.pack("<II", 4, _TOKENS),
    ]
    fields += [
        file.field_bytes(name)
        for name in file.metadata.values
        if name.startswith("llama.") and name != "llama.vocab_size"
    ]
    zeros = np.zeros((_TOKENS, file.tensors[EMBEDDING].shape[1]), np.float32)
    kept = [name for name in file.tensors if name not in (EMBEDDING, _HEAD)]
    data = [zeros.reshape(-1).view(np.uint8), *map(file.bytes_of, kept)]
    shapes = [zeros.shape, *(file.tensors[name].shape for name in kept)]
    kinds = [0, *(int(file.tensors[name].kind) for name in kept)]
    begin, tensors = 0, []
    for name, shape, kind, part in zip([EMBEDDING, *kept], shapes, kinds, data, strict=True):
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        tensors.append(_name(name) + sizes + struct.pack("<IQ", kind, begin))
        begin += len(part) + _padding(len(part))
    header = MAGIC + struct.pack("<IQQ", 3, len(tensors), len(fields))
    with path.open("wb") as out:
        out.write(b"".join([header, *fields, *tensors]))
        out.write(bytes(_padding(out.tell())))
        for part in data:
            part.tofile(out)
            out.write(bytes(_padding(len(part))))


def _name(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode("ascii")


def _padding(size: int) -> int:
    return -size % _ALIGNMENT
