"""The GGUF format of llama.cpp: metadata and tensors of a file.

file      "GGUF", uint32 version, uint64 number of tensors, uint64 number of metadata fields
metadata  name, uint32 type, value; a string is uint64 length and bytes, an array is uint32 type,
          uint64 length and values
tensors   name, uint32 number of dimensions, uint64 sizes (the last one first), uint32 type,
          uint64 offset in the data
data      from the next multiple of `general.alignment` (32) on

The header is read at once, every length is checked against the remaining bytes; the data is
memory-mapped, and a tensor becomes float32 when it is read. The package `gguf` converts quantized
types. (Its own `GGUFReader` takes 20 times as long for a vocabulary, and trusts the lengths.)
"""

from __future__ import annotations

import struct
from importlib import import_module
from importlib.util import find_spec
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmhead.errors import ModelError
from lmhead.models.model_files import Fields, StrPath, file_size, one_line

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_MAX_DIMENSIONS = 4
_PLAIN = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


class GgufTensor(NamedTuple):
    """A tensor in the file: its shape, the first size first; its type; its first byte and bytes."""

    shape: tuple[int, ...]
    kind: Any
    begin: int
    nbytes: int


class GgufFile:
    """A GGUF file whose header has been read and validated: `metadata`, and `tensors` by name."""

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        self._offset = 0
        self._map: mmap | bytes = b""
        if file_size(self.path):  # an empty file cannot be mapped
            try:
                with self.path.open("rb") as file:
                    self._map = mmap(file.fileno(), 0, access=ACCESS_READ)
            except OSError as error:
                raise ModelError(f"{path} cannot be read: {one_line(error)}") from error
        if self._map[:4] != MAGIC:
            raise ModelError(f"{path} is no GGUF file: it must begin with the letters GGUF")
        self._offset = 4
        version = self._number("I")
        if version not in (2, 3):
            raise ModelError(f"{path}: the GGUF version must be 2 or 3; got {version}")
        tensors, fields = self._number("Q"), self._number("Q")
        # A field has at least a name (8 bytes), a type (4) and a value (1); a tensor 32 bytes.
        self._check_count("metadata fields", fields, 13)
        values: dict[str, Any] = {}
        self._fields: dict[str, slice] = {}
        for _ in range(fields):
            begin, name = self._offset, self._string()
            if name in values:
                raise self._corrupt(f"the field {name!r} occurs twice")
            values[name] = self._value(self._number("I"))
            self._fields[name] = slice(begin, self._offset)
        self.metadata = Fields(self.path, values)
        self._check_count("tensors", tensors, 32)
        self.tensors = self._read_tensors(tensors)

    def field_bytes(self, name: str) -> bytes:
        """Return a field of the header as it is stored: name, type and value."""
        return bytes(self._map[self._fields[name]])

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor as it is stored."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.path} must have the tensor {name}; it is missing")
        return np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.begin)

    def read(self, name: str) -> NDArray[np.float32]:
        """Return a tensor as float32."""
        return self._numbers(name, self.bytes_of(name), self.tensors[name].shape)

    def read_rows(self, name: str, rows: list[int]) -> NDArray[np.float32]:
        """Return some rows of a matrix as float32."""
        data = self.bytes_of(name).reshape(self.tensors[name].shape[0], -1)[rows]
        return self._numbers(name, data.reshape(-1), (len(rows), self.tensors[name].shape[1]))

    def _numbers(
        self, name: str, data: NDArray[np.uint8], shape: tuple[int, ...]
    ) -> NDArray[np.float32]:
        """Convert the stored bytes of a tensor, or of some of its rows, to float32."""
        tensor = self.tensors[name]
        if tensor.kind.name in _PLAIN:
            numbers = data.view(_PLAIN[tensor.kind.name]).reshape(shape)
            with np.errstate(all="ignore"):  # float64 may overflow float32
                return numbers.astype(np.float32)
        rows = data.reshape(*shape[:-1], -1)
        try:
            with np.errstate(all="ignore"):  # damaged scales may be infinite
                converted: NDArray[np.float32] = self._gguf().quants.dequantize(rows, tensor.kind)
        except NotImplementedError:
            raise ModelError(
                f"{self.path}: {name} must have a type that the package gguf converts; got "
                f"{tensor.kind.name}. Take a file with another quantization"
            ) from None
        return converted.reshape(shape)

    def _read_tensors(self, count: int) -> dict[str, GgufTensor]:
        headers: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name, dimensions = self._string(), self._number("I")
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise self._corrupt(f"{name!r} must have 1 to 4 dimensions; got {dimensions}")
            sizes = [self._number("Q") for _ in range(dimensions)]
            if name in headers:
                raise self._corrupt(f"the tensor {name!r} occurs twice")
            headers[name] = tuple(reversed(sizes)), self._number("I"), self._number("Q")
        step = self.metadata.integer("general.alignment", 32, low=1, high=2**20)
        begin = -(-self._offset // step) * step
        return {
            name: self._tensor(name, shape, kind, begin + offset)
            for name, (shape, kind, offset) in headers.items()
        }

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
        """Return a tensor, after checking its type and that it lies inside the file."""
        gguf = self._gguf()
        try:
            type_ = gguf.GGMLQuantizationType(kind)
            block, size = map(int, gguf.GGML_QUANT_SIZES[type_])
        except (KeyError, ValueError):
            raise ModelError(
                f"{self.path}: {name} must have a type that the package gguf knows; got {kind}. "
                "Install a newer gguf, or take a file with another quantization"
            ) from None
        if type_.name[0] == "I" and type_.name[1:].isdigit():
            raise ModelError(
                f"{self.path}: {name} must be of a floating or quantized type; got {type_.name}"
            )
        if 0 in shape or shape[-1] % block:
            raise self._corrupt(
                f"{name!r} must have rows of a multiple of {block} for {type_.name}; got {shape}"
            )
        nbytes = prod(shape) // block * size
        if begin + nbytes > len(self._map):
            raise self._truncated(f"{name} ends at byte {begin + nbytes:,}")
        return GgufTensor(shape, type_, begin, nbytes)

    def _gguf(self) -> Any:
        if find_spec("gguf") is None:
            raise ModelError(
                f"{self.path} is read with the package gguf, which is not installed: "
                "pip install 'lmhead[models]'"
            )
        return import_module("gguf")

    # The header, part by part ---------------------------------------------------------------------

    def _take(self, size: int) -> bytes:
        begin, self._offset = self._offset, self._offset + size
        if self._offset > len(self._map):
            raise self._truncated(f"its header continues to byte {self._offset:,}")
        return self._map[begin : self._offset]

    def _number(self, code: str) -> Any:
        kind = struct.Struct("<" + code)
        return kind.unpack(self._take(kind.size))[0]

    def _string(self) -> str:
        return self._take(self._number("Q")).decode("utf-8", "replace")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._number("I"), self._number("Q")
            if inner in _NUMBERS:
                size = struct.calcsize("<" + _NUMBERS[inner])
                self._check_count("values", count, size)
                return list(struct.unpack(f"<{count}{_NUMBERS[inner]}", self._take(count * size)))
            if depth == 4:
                raise self._corrupt("arrays must be nested at most 4 deep")
            self._check_count("values", count, 8)
            return [self._value(inner, depth + 1) for _ in range(count)]
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        raise self._corrupt(f"a field has the unknown type {kind}")

    def _check_count(self, what: str, count: int, size: int) -> None:
        """Validate that `count` entries of at least `size` bytes fit into the rest of the file."""
        if self._offset + count * size > len(self._map):
            raise self._truncated(f"it claims {count:,} {what} at byte {self._offset:,}")

    def _corrupt(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is corrupt: {what}. Download it again")

    def _truncated(self, what: str) -> ModelError:
        return ModelError(
            f"{self.path} is truncated or corrupt: {what}, but has only {len(self._map):,} bytes. "
            "Download it again"
        )
