"""Distillation from hidden states: a teacher file, its reader, and the student's loss.

A teacher's full logits take V numbers per token. Its final hidden states take D, and with the head,
stored once, they give the same logits over the whole vocabulary. The student's loss compares two
heads by `lmhead.divergence`, without building the logits of either.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "teacher.lmhead"
>>> teacher = LMHead(32, 500)
>>> info = save(torch.randn(64, 32), path, head=teacher)
>>> student, states = LMHead(8, 500), torch.randn(64, 8)
>>> with TeacherFile(path) as file:
...     for rows, logits in file.batches(16):
...         divergence(logits, student(states[rows])).mean().backward()

The file: 4096 bytes of header (magic, JSON, zeros), the head, then one record per row. The header
holds the BLAKE2b hash of everything else; a file that does not match it is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Self

from lmhead import checks
from lmhead.errors import ModelError
from lmhead.head import LMHead
from lmhead.lazy import LazyLogits
from lmhead.linear_divergence import divergence
from lmhead.linear_query import query

_MAGIC = b"lmhead distill 1\n"
_HEADER = 4096
_GROUP = 32  # entries of a hidden state that share a scale, with 8 bits
_BLOCK = 1 << 20  # bytes hashed at a time
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Info:
    """What a teacher file holds."""

    rows: int  # number of hidden states
    hidden_size: int  # D
    stored: str  # how they are stored: "float32", "bfloat16", "float16" or "int8"
    has_ids: bool  # whether a token id is stored with each
    vocab_size: int = 0  # V of the head; 0 if the file has none
    head_dtype: str = ""  # dtype of the head's weight
    bias: bool = False  # whether the head has a bias
    softcap: float | None = None  # of the head
    scale: float = 1.0  # of the head
    window: int = 0  # number of rows in each text window; 0 for one sequence
    # proven upper bound, over all rows, of KL(given ‖ stored) in nats that rounding the hidden
    # states causes; None without a head
    kl_bound: float | None = None
    bytes: int = 0  # size of the file
    logits_bytes: int = 0  # size of the same rows as float32 logits

    @property
    def ratio(self) -> float:
        """Size of float32 logits divided by the size of the file."""
        return self.logits_bytes / self.bytes

    @property
    def record(self) -> np.dtype[Any]:
        """The NumPy dtype of one row."""
        d = self.hidden_size
        kind = {"int8": "i1", "float32": "<f4"}.get(self.stored, "<u2")
        scale: list[Any] = [("scale", "<f4", (-(-d // _GROUP),))] if self.stored == "int8" else []
        return np.dtype([*scale, ("hidden", kind, (d,)), *[("id", "<i4")] * self.has_ids])

    @property
    def head_bytes(self) -> int:
        """Size of weight and bias."""
        if not self.vocab_size:
            return 0
        entries = self.vocab_size * (self.hidden_size + int(self.bias))
        return entries * _TYPES[self.head_dtype].itemsize


def save(
    hidden: Tensor | Iterable[Any],
    path: str | os.PathLike[str],
    *,
    head: LMHead | Tensor | None = None,
    ids: Tensor | None = None,
    bits: int | None = None,
    window: int = 0,
) -> Info:
    """Write a teacher's final hidden states, and its head once, to a file.

    Args:
        hidden: (..., D), after the final norm; or an iterable of such tensors, or of pairs (hidden,
            ids), to be written one after the other.
        path: the file; it appears when it is complete.
        head: the teacher's head, or its weight (V, D); None to give it to the reader instead.
        ids: token ids (...), stored beside the rows; only with one tensor.
        bits: 8 for groups of 32 integers with one scale, 16 for bfloat16, 32 for float32; None
            keeps the dtype of the hidden states, and so every bit.
        window: rows per text window; stored in `Info`.
    """
    if bits not in (None, 8, 16, 32):
        raise ValueError(f"bits must be 8, 16, 32 or None; got {bits}")
    checks.check_integer("window", window, low=0)
    if isinstance(hidden, Tensor):
        hidden = [hidden if ids is None else (hidden, ids)]
    elif ids is not None:
        raise ValueError("ids must be part of the pairs where hidden is an iterable")
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w+b") as file:
            info = _Writer(file, _as_head(head), bits, window).run(hidden)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return info


class _Writer:
    def __init__(self, file: BinaryIO, head: LMHead | None, bits: int | None, window: int) -> None:
        self.file, self.head, self.bits, self.window = file, head, bits, window
        self.hash = hashlib.blake2b(digest_size=32)
        self.info: Info | None = None
        self.rows, self.bound = 0, 0.0
        self.weight = None if head is None else head.weight.detach().float()

    @torch.no_grad()
    def run(self, parts: Iterable[Any]) -> Info:
        self.file.write(bytes(_HEADER))
        for part in parts:
            hidden, ids = part if isinstance(part, tuple) else (part, None)
            self._add(hidden, ids)
        if self.info is None:
            raise ValueError("hidden must have at least one tensor; got none")
        size = self.file.tell()
        facts = asdict(self.info) | {
            "rows": self.rows,
            "kl_bound": None if self.head is None else self.bound,
            "bytes": size,
            "logits_bytes": 4 * self.rows * self.info.vocab_size,
        }
        info = Info(**facts)
        self.file.seek(0)
        text = json.dumps({"info": asdict(info), "blake2b": _seal(info, self.hash.hexdigest())})
        self.file.write((_MAGIC + text.encode()).ljust(_HEADER, b"\0"))
        return info

    def _add(self, hidden: Tensor, ids: Tensor | None) -> None:
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point() or hidden.dim() < 1:
            raise TypeError("hidden must be a floating tensor (..., D)")
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        if not bool(flat.isfinite().all()):
            raise ValueError("hidden must be finite; it holds NaN or inf")
        info = self.info = self.info or self._start(flat, has_ids=ids is not None)
        if flat.shape[1] != info.hidden_size or (ids is not None) != info.has_ids:
            raise ValueError(
                f"hidden must have the width of the first part, {info.hidden_size}, and all "
                f"parts ids or none; got {tuple(hidden.shape)}"
            )
        records = np.zeros(len(flat), info.record)
        stored = _encode(flat, info.stored, records)
        if ids is not None:
            checks.check_id_type("ids", ids)
            if ids.numel() != len(flat):
                raise ValueError(f"ids must have shape {tuple(hidden.shape[:-1])}")
            records["id"] = ids.reshape(-1).to(torch.int32).numpy()
        errors = flat.float() - stored.float()
        if self.head is not None and self.weight is not None and bool(errors.any()):
            self.bound = max(self.bound, _kl_bound(self.head, self.weight, errors))
        self._write(records.tobytes())
        self.rows += len(flat)

    def _start(self, flat: Tensor, *, has_ids: bool) -> Info:
        kinds = {None: str(flat.dtype).removeprefix("torch."), 8: "int8", 16: "bfloat16"}
        stored = kinds.get(self.bits, "float32")
        stored = "float32" if stored == "float64" else stored
        facts: dict[str, Any] = {"window": self.window}
        if self.head is not None:
            weight, bias = self.head.weight.detach(), self.head.bias
            if weight.shape[1] != flat.shape[1]:
                raise ValueError(
                    f"head must have hidden size {flat.shape[1]}; got {weight.shape[1]}"
                )
            dtype = str(weight.dtype).removeprefix("torch.")
            facts |= {
                "vocab_size": weight.shape[0],
                "head_dtype": dtype,
                "bias": bias is not None,
                "softcap": self.head.softcap,
                "scale": self.head.scale,
            }
            if dtype not in _TYPES:
                raise TypeError(f"head must be one of {', '.join(_TYPES)}; got {dtype}")
            for tensor in (weight, *(() if bias is None else (bias.detach(),))):
                self._write(_bytes(tensor))
        return Info(0, flat.shape[1], stored, has_ids, **facts)

    def _write(self, data: bytes) -> None:
        self.hash.update(data)
        self.file.write(data)


class TeacherFile:
    """A reader of a teacher file: rows by number, in any order, without loading them all.

    Args:
        path: the file.
        head: the teacher's head or weight, for a file that has none.
        verify: whether to compare the content with its hash, which reads the file once.

    Raises:
        ModelError: the file is not a teacher file, is incomplete, or does not match its hash.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        head: LMHead | Tensor | None = None,
        verify: bool = True,
    ) -> None:
        self.path = Path(path)
        self.info, digest = _read_header(self.path)
        if verify and _digest(self.path, self.info) != digest:
            raise ModelError(f"{self.path} is corrupt: its content does not match its hash")
        start = _HEADER + self.info.head_bytes
        self._records: NDArray[Any] | None = np.memmap(
            self.path, self.info.record, mode="r", offset=start, shape=(self.info.rows,)
        )
        if self.info.vocab_size and head is not None:
            raise ValueError(f"head must not be given: {self.path} has one")
        own_head = self._stored_head() if self.info.vocab_size else _as_head(head)
        if own_head is not None and own_head.in_features != self.info.hidden_size:
            raise ValueError(
                f"head must have hidden size {self.info.hidden_size}; got {own_head.in_features}"
            )
        self._head = own_head

    def __enter__(self) -> Self:
        """Return the file."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Release the file."""
        self._records = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.info.rows

    @property
    def head(self) -> LMHead:
        """The teacher's head, frozen."""
        if self._head is None:
            raise ValueError(f"head must be given to read logits: {self.path} has none")
        return self._head

    def hidden(self, rows: slice) -> Tensor:
        """Return hidden states (n, D) as stored; 8 bits as float32."""
        return _decode(self._at(rows), self.info.stored)

    def ids(self, rows: slice) -> Tensor:
        """Return the token ids of rows, (n,)."""
        if not self.info.has_ids:
            raise ValueError(f"{self.path} has no token ids")
        return torch.from_numpy(self._at(rows)["id"].astype(np.int64))

    def logits(self, rows: slice) -> LazyLogits:
        """Return the teacher's lazy logits of rows, (n, V)."""
        logits: LazyLogits = self.head(self.hidden(rows).to(self.head.weight.dtype))
        return logits

    def batches(self, size: int) -> Iterator[tuple[slice, LazyLogits]]:
        """Yield all rows in order: which rows, and their logits."""
        checks.check_integer("size", size, low=1)
        for start in range(0, len(self), size):
            rows = slice(start, min(start + size, len(self)))
            yield rows, self.logits(rows)

    def _at(self, rows: slice) -> NDArray[Any]:
        if self._records is None:
            raise ValueError(f"{self.path} is closed")
        return np.array(self._records[rows])

    def _stored_head(self) -> LMHead:
        info = self.info
        dtype = _TYPES[info.head_dtype]
        with self.path.open("rb") as file:
            file.seek(_HEADER)
            data = bytearray(file.read(info.head_bytes))
        flat = torch.frombuffer(data, dtype=dtype)
        size = info.vocab_size * info.hidden_size
        weight, bias = flat[:size].view(info.vocab_size, info.hidden_size), flat[size:]
        if dtype != torch.float32 and _TYPES.get(info.stored) != dtype:  # to hold the rows
            weight, bias = weight.float(), bias.float()
        options: Any = {"softcap": info.softcap, "scale": info.scale, "dtype": weight.dtype}
        # On the meta device: the parameters are replaced, and never filled.
        head = LMHead(info.hidden_size, info.vocab_size, bias=info.bias, device="meta", **options)
        head.weight = torch.nn.Parameter(weight, requires_grad=False)
        if info.bias:
            head.bias = torch.nn.Parameter(bias, requires_grad=False)
        return head


def loss(
    teacher: TeacherFile, rows: slice, student: LazyLogits | tuple[Tensor, Tensor], **options: Any
) -> Tensor:
    """Return the divergence of a student from stored rows of its teacher, (n,).

    Equivalent to: divergence(teacher.logits(rows), student, **options).

    `student` is `LazyLogits` (n, V), or a pair of hidden (n, D) and weight (V, D).
    """
    return divergence(teacher.logits(rows), student, **options)


def _as_head(head: LMHead | Tensor | None) -> LMHead | None:
    if head is None or isinstance(head, LMHead):
        return head
    if not isinstance(head, Tensor) or head.dim() != 2:
        raise TypeError(f"head must be an LMHead or a weight (V, D); got {type(head).__name__}")
    frozen = LMHead(head.shape[1], head.shape[0], device="meta", dtype=head.dtype)
    frozen.weight = torch.nn.Parameter(head.detach(), requires_grad=False)
    return frozen


def _kl_bound(head: LMHead, weight: Tensor, errors: Tensor) -> float:
    """Return an upper bound, over all rows, of KL(p ‖ p') where hidden states move by `errors`.

    Logit v moves by δ_v, and KL(p ‖ p') = log E_p[exp(δ)] - E_p[δ], which by Hoeffding's lemma is
    at most (max δ - min δ)² / 8. Without soft-capping δ_v = scale · w_v · error, whose extremes
    over the vocabulary `query` finds; soft-capping makes each |δ_v| smaller.
    """
    largest, smallest = (query(e, weight, top_k=1).top_k.values.double() for e in (errors, -errors))
    spread = largest + smallest if head.softcap is None else 2 * torch.maximum(largest, smallest)
    return float((head.scale * spread).square().max()) / 8


def _encode(flat: Tensor, stored: str, records: NDArray[Any]) -> Tensor:
    """Fill the records; return the hidden states as they will be read."""
    if stored == "int8":
        n, d = flat.shape
        groups = -(-d // _GROUP)
        padded = torch.zeros(n, groups * _GROUP)
        padded[:, :d] = flat.float()
        grouped = padded.view(n, groups, _GROUP)
        scale = grouped.abs().amax(2) / 127
        steps = grouped / torch.where(scale > 0, scale, 1.0)[..., None]
        records["scale"] = scale.numpy()
        records["hidden"] = steps.round().clamp(-127, 127).view(n, -1)[:, :d].to(torch.int8).numpy()
    elif stored == "float32":
        records["hidden"] = flat.float().numpy()
    else:
        records["hidden"] = (
            flat.to(_TYPES[stored]).contiguous().view(torch.int16).numpy().view("<u2")
        )
    return _decode(records, stored)


def _decode(records: NDArray[Any], stored: str) -> Tensor:
    hidden = np.ascontiguousarray(records["hidden"])
    if stored == "int8":
        scale = torch.from_numpy(np.ascontiguousarray(records["scale"]))
        scales = scale.repeat_interleave(_GROUP, 1)[:, : hidden.shape[1]]
        return torch.from_numpy(hidden).float() * scales
    if stored == "float32":
        return torch.from_numpy(hidden)
    return torch.from_numpy(hidden.view(np.int16)).view(_TYPES[stored])


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _seal(info: Info, digest: str) -> str:
    """Return the hash of the content's hash and the facts of the header."""
    facts = json.dumps(asdict(info), sort_keys=True)
    return hashlib.blake2b(f"{digest} {facts}".encode(), digest_size=32).hexdigest()


def _read_header(path: Path) -> tuple[Info, str]:
    try:
        with path.open("rb") as file:
            start, size = file.read(_HEADER), path.stat().st_size
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if not start.startswith(_MAGIC):
        raise ModelError(f"{path} is not a teacher file")
    try:
        facts = json.loads(start[len(_MAGIC) :].rstrip(b"\0"))
        info, digest = Info(**facts["info"]), str(facts["blake2b"])
        expected = _HEADER + info.head_bytes + info.rows * info.record.itemsize
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path} is corrupt: its header cannot be read") from error
    if size != expected or info.bytes != size:
        raise ModelError(f"{path} is corrupt: it has {size} bytes in place of {expected}")
    return info, digest


def _digest(path: Path, info: Info) -> str:
    content = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        file.seek(_HEADER)
        while block := file.read(_BLOCK):
            content.update(block)
    return _seal(info, content.hexdigest())
