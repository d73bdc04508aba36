"""llama.cpp as the body of a model: quantized products, and our head on its hidden states.

The package `xllamacpp` contains the library, which exports llama.cpp's C interface; it is called
through ctypes. Parameters are structures passed by value that grow from version to version: only
their first fields are used, after a check that they are at the expected offsets.
Of a Llama, llama.cpp gets a copy without the head, and embeddings instead of ids:
llama.cpp multiplies hidden states by the head even if only hidden states are asked for.
llama.cpp rounds activations to 8 bits and keys and values to 16, so hidden states differ from those
of the float32 body by a few percent; head, log-probabilities and samplers are exact for them.
"""

from __future__ import annotations

import ctypes
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from itertools import compress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmhead.errors import ModelError
from lmhead.models.gguf_file import MAGIC, GgufFile

_FIRST_CAPACITY = 1024  # positions of a context at first; doubled when it is full
_MAX_BATCH = 512  # tokens of one call
_KNOWN_DEFAULTS = [512, 2048, 512, 1]  # n_ctx, n_batch, n_ubatch and n_seq_max by default
_POINTER = ctypes.c_void_p
EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"
_TOKENS = 32  # size of the copy's vocabulary, which is not used
_ALIGNMENT = 32
_MAX_BYTES = 1 << 30  # of a body: in larger models the head is a small part of the work


class _Params(ctypes.Structure):
    """llama_model_params or llama_context_params, with more bytes than either has."""

    _fields_ = [("numbers", ctypes.c_uint32 * 4), ("rest", ctypes.c_uint8 * 1008)]


class _Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [("count", ctypes.c_int32), ("tokens", _POINTER), ("others", _POINTER * 5)]


class _Library:
    """The functions of llama.cpp that are used here."""

    def __init__(self, file: Path) -> None:
        self._all = ctypes.CDLL(str(file))
        number, text = ctypes.c_int32, ctypes.c_char_p
        self._log = ctypes.CFUNCTYPE(None, ctypes.c_int, text, _POINTER)(lambda *_: None)
        self._function("llama_log_set", None, type(self._log), _POINTER)(self._log, None)
        self._function("llama_backend_init", None)()
        self.model_params = self._function("llama_model_default_params", _Params)
        self.context_params = self._function("llama_context_default_params", _Params)
        self.load = self._function("llama_model_load_from_file", _POINTER, text, _Params)
        self.free_model = self._function("llama_model_free", None, _POINTER)
        self.size = self._function("llama_model_n_embd", number, _POINTER)
        self.context = self._function("llama_init_from_model", _POINTER, _POINTER, _Params)
        self.free_context = self._function("llama_free", None, _POINTER)
        self.set_threads = self._function("llama_set_n_threads", None, _POINTER, number, number)
        self.set_embeddings = self._function("llama_set_embeddings", None, _POINTER, ctypes.c_bool)
        self.batch = self._function("llama_batch_get_one", _Batch, _POINTER, number)
        self.decode = self._function("llama_decode", number, _POINTER, _Batch)
        self.embeddings = self._function("llama_get_embeddings", _POINTER, _POINTER)
        self.memory = self._function("llama_get_memory", _POINTER, _POINTER)
        self.forget = self._function(
            "llama_memory_seq_rm", ctypes.c_bool, _POINTER, number, number, number
        )
        self._check()

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._all, name, None)
        if function is None:
            raise ModelError(f"{_package()} has no function {name}: install another version")
        function.restype, function.argtypes = result, arguments
        return function

    def _check(self) -> None:
        """Raise if the first fields of the library's structures are not the expected ones."""
        ids = (ctypes.c_int32 * 3)(1, 2, 3)
        batch = self.batch(ctypes.addressof(ids), 3)
        defaults = list(self.context_params().numbers)
        fields = (batch.count, batch.tokens, *batch.others)
        if defaults != _KNOWN_DEFAULTS or fields != (3, ctypes.addressof(ids), *[None] * 5):
            raise ModelError(
                f"{_package()} has an unknown interface: install another version, "
                "or leave out engine='llama.cpp'"
            )


def _package() -> str:
    return f"xllamacpp {metadata.version('xllamacpp')}"


def is_available() -> bool:
    """Return whether the package xllamacpp is installed."""
    return find_spec("xllamacpp") is not None


@cache
def _library() -> _Library:
    spec = find_spec("xllamacpp")
    folders = (spec.submodule_search_locations if spec else None) or []
    files = [file for folder in folders for file in sorted(Path(folder).glob("xllamacpp*.so"))]
    if not files:
        raise ModelError("engine='llama.cpp' needs the package xllamacpp: pip install xllamacpp")
    return _Library(files[0])


class _Context:
    """Keys and values of one sequence inside llama.cpp, and the ids they belong to."""

    def __init__(self, model: _LlamaCppModel) -> None:
        self._model, self._lib = model, model.library
        self._capacity = 0
        self._address: int | None = None
        self._ids: list[int] = []

    def __del__(self) -> None:
        if self._address:
            self._lib.free_context(self._address)

    def read(self, ids: list[int], new: int) -> Tensor:
        """Return the hidden states (new, D) of the last ids; reuse keys and values if valid."""
        if len(ids) > self._capacity:
            self._open(max(_FIRST_CAPACITY, 2 * self._capacity, len(ids)))
        reused = len(ids) - new
        if self._ids[:reused] != ids[:reused]:
            reused = 0
        self._lib.forget(self._lib.memory(self._address), 0, reused, -1)
        self._ids = ids[:reused]
        threads = torch.get_num_threads()
        self._lib.set_threads(self._address, threads, threads)
        parts = [self._decode(ids[i : i + _MAX_BATCH]) for i in range(reused, len(ids), _MAX_BATCH)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[-new:]

    def _open(self, capacity: int) -> None:
        if self._address:
            self._lib.free_context(self._address)
        params = self._lib.context_params()
        params.numbers[0] = capacity
        self._address = self._lib.context(self._model.address, params)
        if not self._address:
            raise ModelError(f"llama.cpp cannot make a context of {capacity} tokens")
        self._lib.set_embeddings(self._address, True)
        self._capacity, self._ids = capacity, []

    def _decode(self, ids: list[int]) -> Tensor:
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        batch = self._lib.batch(ctypes.addressof(tokens), len(ids))
        if self._model.takes_embeddings:
            embedded = self._model.embed(ids)
            batch.tokens, batch.others[0] = None, embedded.data_ptr()
        failed = self._lib.decode(self._address, batch)
        if failed:
            self._ids, self._capacity = [], 0
            raise RuntimeError(f"llama.cpp could not decode {len(ids)} tokens: code {failed}")
        self._ids = self._ids + ids
        numbers = ctypes.c_float * (len(ids) * self._model.size)
        buffer = numbers.from_address(self._lib.embeddings(self._address))
        return torch.frombuffer(buffer, dtype=torch.float32).view(len(ids), -1).clone()


class _LlamaCppModel:
    """A GGUF file opened by llama.cpp."""

    def __init__(self, path: Path, plain_llama: bool, embedding: Tensor | None) -> None:
        self.library, self._embedding = _library(), embedding
        self._file = GgufFile(path)
        separate = plain_llama and is_worthwhile(self._file)
        self.address = self._open_body() if separate else None
        self.takes_embeddings = self.address is not None
        if self.address is None:
            self.address = self._open(path)
        if not self.address:
            raise ModelError(f"llama.cpp cannot open {path}")
        self.size = int(self.library.size(self.address))

    def _open(self, path: Path) -> int | None:
        address: int | None = self.library.load(str(path).encode(), self.library.model_params())
        return address

    def _open_body(self) -> int | None:
        """Open a copy of the body; None if there is no disk space for it."""
        with suppress(OSError), TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            copy = Path(folder) / "body.gguf"
            write_body(self._file, copy)
            return self._open(copy)  # memory-mapped: the file can be deleted
        return None

    def embed(self, ids: list[int]) -> Tensor:
        """Return the embeddings of ids, (T, D), in float32."""
        if self._embedding is not None:
            rows = slice(ids[0], ids[0] + 1) if len(ids) == 1 else torch.tensor(ids)
            return self._embedding[rows].float().contiguous()
        return torch.from_numpy(self._file.read_rows(EMBEDDING, ids))

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self.library.free_model(self.address)


@dataclass(frozen=True)
class LlamaCppCache:
    """The ids so far of each row, without padding; their keys and values are in llama.cpp."""

    ids: tuple[tuple[int, ...], ...]  # per row
    length: int  # number of positions, padding included

    def select(self, rows: Tensor) -> LlamaCppCache:
        """Return the cache of the rows (B',), which may repeat or drop some."""
        return LlamaCppCache(tuple(self.ids[row] for row in rows.tolist()), self.length)


class LlamaCppBody:
    """The body of a GGUF file, computed by llama.cpp; one context per row of a batch.

    Args:
        path: the file.
        vocab_size: V.
        plain_llama: a Llama with the usual tensors, which can be opened without its head.
        embedding: (V, D), where it is in memory, as that of a tied head; else rows are read from
            the file.
    """

    def __init__(
        self, path: Path, vocab_size: int, *, plain_llama: bool, embedding: Tensor | None = None
    ) -> None:
        embedding = None if embedding is None else embedding.detach()
        self._model = _LlamaCppModel(path, plain_llama, embedding)
        self._vocab_size = vocab_size
        self._contexts: list[_Context] = []

    def __call__(
        self, ids: Tensor, cache: LlamaCppCache | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, LlamaCppCache]:
        """Process new ids; arguments and results as in `lmhead.sampling.model.Body`."""
        rows, new = ids.shape
        before = 0 if cache is None else cache.length
        new_ids: list[list[int]] = ids.tolist()
        if any(not 0 <= i < self._vocab_size for row_ids in new_ids for i in row_ids):
            raise ValueError(f"ids must be in [0, {self._vocab_size})")
        if mask is not None:
            masks = mask[:, before:].tolist()
            new_ids = [list(compress(*pair)) for pair in zip(new_ids, masks, strict=True)]
        while len(self._contexts) < rows:
            self._contexts.append(_Context(self._model))
        hidden = torch.zeros(rows, new, self._model.size)
        all_ids = []
        for row, row_ids in enumerate(new_ids):
            past = () if cache is None else cache.ids[row]
            all_ids.append((*past, *row_ids))
            if row_ids:
                states = self._contexts[row].read(list(all_ids[-1]), len(row_ids))
                hidden[row, new - len(row_ids) :] = states
        return hidden, LlamaCppCache(tuple(all_ids), before + new)


def has_own_head(file: GgufFile) -> bool:
    """Return whether the head has a weight of its own; without one it shares the embedding's."""
    return _HEAD in file.tensors


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
