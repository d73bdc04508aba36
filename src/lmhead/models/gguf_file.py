"""GGUF files, the format of llama.cpp: what is in one, and its tensors as numbers.

file     "GGUF", uint32 version, uint64 number of tensors, uint64 number of entries
entries  name, uint32 type, value; a text is uint64 length and bytes, an array is uint32 type,
         uint64 length and values
tensors  name, uint32 number of dimensions, uint64 sizes (the last one first), uint32 type,
         uint64 place in the data
data     from the next multiple of `general.alignment` (32) on

Only the header is read here, in one go; the data is mapped, and a tensor becomes float32 when it is
asked for. Its quantized types are known to the package `gguf`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from math import prod
from mmap import ACCESS_READ, mmap
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmhead.errors import ModelError

MAGIC = b"GGUF"
_TEXT, _ARRAY = 8, 9
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_MOST = 2**28  # more entries, letters or values than any model has: the file is damaged


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is: its shape, the first size first; its type; its first byte in the file."""

    shape: tuple[int, ...]
    kind: int
    begin: int


class GgufFile:
    """A GGUF file, its header read.

    Args:
        path: the file.

    Attributes:
        entries: what the file says of the model, by name.
        tensors: where each tensor is.

    Raises:
        ModelError: no GGUF file, one of an unknown version, or one that is cut off.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._place = 0
        try:
            with self.path.open("rb") as file:
                self._map: mmap | bytes = mmap(file.fileno(), 0, access=ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            self._map = b""
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from error
        if self._map[:4] != MAGIC:
            raise ModelError(f"{path} is no GGUF file: it does not begin with the letters GGUF")
        self._place = 4
        version = self._number("I")
        if version not in (2, 3):
            raise ModelError(f"{path} is GGUF of version {version}; lmhead reads 2 and 3")
        count, entries = self._number("Q"), self._number("Q")
        self.entries = {self._text(): self._value(self._number("I")) for _ in self._many(entries)}
        found = [self._tensor() for _ in self._many(count)]
        step = int(self.entries.get("general.alignment", 32))
        begin = -(-self._place // step) * step
        self.tensors = {
            name: TensorInfo(info.shape, info.kind, begin + info.begin) for name, info in found
        }

    def check(self) -> None:
        """Every tensor lies inside the file and has a type that can be read."""
        for name, info in self.tensors.items():
            end = info.begin + self._nbytes(name)
            if end > len(self._map):
                raise self._cut(f"{name} ends at byte {end:,}")

    def read(self, name: str) -> NDArray[np.float32]:
        """A tensor as float32."""
        info = self.tensors.get(name)
        if info is None:
            raise ModelError(f"{self.path} has no tensor {name}: its model is not complete")
        nbytes = self._nbytes(name)
        data = np.frombuffer(self._map, np.uint8, nbytes, info.begin)
        kind = self._gguf.GGMLQuantizationType(info.kind)
        rows = data.reshape(*info.shape[:-1], -1)
        if kind.name in ("F32", "F16", "F64"):
            rows = rows.view({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[kind.name])
            return rows.reshape(info.shape).astype(np.float32)
        made: NDArray[np.float32] = self._gguf.quants.dequantize(rows, kind)
        return made.reshape(info.shape)

    def _nbytes(self, name: str) -> int:
        info = self.tensors[name]
        try:
            block, size = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(info.kind)]
        except (KeyError, ValueError):
            raise ModelError(
                f"{self.path}: {name} has the type {info.kind}, which the package gguf does not "
                "know. Install a newer one, or take a file with another quantization"
            ) from None
        return prod(info.shape) // int(block) * int(size)

    @cached_property
    def _gguf(self) -> Any:
        if find_spec("gguf") is None:
            raise ModelError(
                f"{self.path} holds quantized numbers; to read them, install the package gguf: "
                "pip install gguf"
            )
        return import_module("gguf")

    # The header, piece by piece -------------------------------------------------------------------

    def _take(self, size: int) -> bytes:
        begin, self._place = self._place, self._place + size
        if self._place > len(self._map):
            raise self._cut(f"its header goes on to byte {self._place:,}")
        return self._map[begin : self._place]

    def _number(self, code: str) -> Any:
        kind = struct.Struct("<" + code)
        return kind.unpack(self._take(kind.size))[0]

    def _many(self, count: int) -> range:
        if count > _MOST:
            raise ModelError(f"{self.path} is damaged: it speaks of {count:,} things of one kind")
        return range(count)

    def _text(self) -> str:
        return self._take(len(self._many(self._number("Q")))).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _ARRAY:
            inner, count = self._number("I"), self._number("Q")
            if inner in _NUMBERS:
                many = struct.Struct(f"<{len(self._many(count))}{_NUMBERS[inner]}")
                return list(many.unpack(self._take(many.size)))
            return [self._value(inner) for _ in self._many(count)]
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        raise ModelError(f"{self.path} is damaged: an entry has the unknown type {kind}")

    def _tensor(self) -> tuple[str, TensorInfo]:
        name = self._text()
        sizes = [self._number("Q") for _ in self._many(self._number("I"))]
        kind, begin = self._number("I"), self._number("Q")
        return name, TensorInfo(tuple(reversed(sizes)), kind, begin)

    def _cut(self, what: str) -> ModelError:
        return ModelError(
            f"{self.path} is cut off: {what}, but there are only {len(self._map):,} bytes. Fetch "
            "it again"
        )
