"""logits[index], and logits[index] = value.

[:, -1]   [..., :-1, :]   [mask]   [rows]     lazy: rows are selected
[..., :32000]                                 lazy: a range of the vocabulary
[..., ids]   [..., 7]                         a tensor, of those tokens only
[rows, ids]   [:, positions, ids]             a tensor, of those entries only
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmhead.lazy.assignment import assign
from lmhead.lazy.column import Column
from lmhead.lazy.logits import LazyLogits, View, derived, put_rows, token_range
from lmhead.lazy.program import Node, Operand
from lmhead.lazy.recording import NotRecorded, call, record
from lmhead.lazy.reductions import columns, gather
from lmhead.lazy.views import lead_view


def getitem(logits: LazyLogits, index: Any) -> Any:
    """Return logits[index]."""
    index = _as_tensors(index)
    if logits._vdim != logits.dim() - 1:
        raise NotRecorded
    if isinstance(index, tuple) and len(index) > 1 and index[-1] is None:
        if not any(i is Ellipsis for i in index) and _consumed(index) < logits.dim():
            index = (*index, Ellipsis)  # the new dimension comes before those not named
        else:
            return getitem(logits, index[:-1]).unsqueeze(-1)
    full = _expanded(index, logits.dim())
    rows, token = full[:-1], full[-1]
    if isinstance(token, slice):
        chosen = logits
        if any(not _is_everything(i) for i in rows):
            advanced = any(isinstance(i, Tensor | list) for i in rows)
            chosen = lead_view(logits, lambda t: t[(*rows, slice(None))], copies=advanced)
        if not _is_everything(token):
            return _tokens(chosen, token)
        if chosen is logits and not torch.is_grad_enabled():
            return lead_view(logits, lambda t: t[(*rows, slice(None))])  # a constant
        return chosen
    if all(i is None or isinstance(i, slice | int) for i in rows):
        chosen = logits
        if any(not _is_everything(i) for i in rows):
            chosen = lead_view(logits, lambda t: t[(*rows, slice(None))])
        ids = _ids(token, logits)
        found = columns(chosen, _from_the_end(ids, logits.shape[-1]).reshape(-1))
        found = found.reshape((*chosen.shape[:-1], *ids.shape))
        return Column.of(found, logits, full) if isinstance(token, int) else found
    return _entries(logits, full)


def _as_tensors(index: Any) -> Any:
    """Return an index with its sequences and NumPy values as tensors and numbers."""
    if isinstance(index, list) and any(_is_structured(i) for i in index):
        index = tuple(index)  # as torch does
    if isinstance(index, tuple):
        return tuple(map(_as_tensors, index))
    if isinstance(index, np.generic):
        index = index.item()
    if isinstance(index, bool):
        raise NotRecorded
    if isinstance(index, list | range | np.ndarray):
        index = torch.as_tensor(index if len(index) else np.empty(0, np.int64))
    if isinstance(index, Tensor) and index.dtype == torch.uint8:
        return index.bool()  # a mask
    return index


def _is_structured(i: Any) -> bool:
    return i is None or i is Ellipsis or isinstance(i, Tensor | list | tuple | slice | np.ndarray)


def _consumed(index: tuple[Any, ...]) -> int:
    """Return how many dimensions an index names; a mask names all of its own."""
    masks = (i.dim() for i in index if isinstance(i, Tensor) and i.dtype == torch.bool)
    others = (i for i in index if not (isinstance(i, Tensor) and i.dtype == torch.bool))
    return sum(masks) + sum(i is not None for i in others)


def _entries(logits: LazyLogits, index: tuple[Any, ...]) -> Tensor:
    """Return logits[index] for an index of entries, whatever their rows and tokens."""
    n, vocab = logits.lead.numel(), logits.shape[-1]
    if isinstance(index[-1], Tensor | list) and _is_id(index[-1]):
        _from_the_end(torch.as_tensor(index[-1]), vocab)  # raises in terms of the vocabulary
    rows = torch.arange(n).view(*logits.lead, 1).expand(*logits.lead, vocab)[index]
    tokens = torch.arange(vocab).expand(*logits.lead, vocab)[index].reshape(-1)
    # One gather of (chosen rows, most entries of a row).
    used, row, counts = torch.unique(rows, return_inverse=True, return_counts=True)
    row = row.reshape(-1)
    order = row.argsort(stable=True)
    place = torch.empty_like(row)
    place[order] = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row[order]]
    ids = torch.zeros(len(used), int(counts.max()) if len(row) else 0, dtype=torch.int64)
    ids[row, place] = tokens
    chosen = lead_view(logits, lambda t: t.reshape(n, t.shape[-1])[used], copies=True)
    return gather(chosen, -1, ids)[row, place].reshape(rows.shape)  # type: ignore[no-any-return]


def _tokens(logits: LazyLogits, tokens: slice) -> LazyLogits:
    """Return a view of a range of the vocabulary."""
    node = token_range(logits.part, tokens)
    view = View(lambda t: t[..., tokens], tokens=tokens)
    shape = (*logits.shape[:-1], node.width)
    strides = (*logits.stride()[:-1], logits.stride(-1) * (tokens.step or 1))
    return derived(logits, node, shape, logits.dtype, view=view, strides=strides)


def setitem(logits: LazyLogits, index: Any, value: Any) -> None:
    """Set logits[index] = value."""
    index = _as_tensors(index)
    if isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == logits.shape:
        if isinstance(value, Tensor) and value.numel() != 1:
            raise NotRecorded
        value = value.reshape(()) if isinstance(value, Tensor) else value
        filled = record(torch.masked_fill, (logits, index, value), {})
        assign(logits, _as(filled.part, logits))
        return
    if logits._vdim != logits.dim() - 1 or isinstance(index, LazyLogits):
        raise NotRecorded
    full = _expanded(index, logits.dim())
    rows, token = full[:-1], full[-1]
    if _pairs(rows, token) and rows and any(isinstance(i, Tensor | list) for i in rows):
        _set_pairs(logits, rows, token, value)
        return
    if not isinstance(token, slice) and any(isinstance(i, Tensor | list) for i in rows):
        raise NotRecorded
    numbers = torch.arange(logits.lead.numel()).view(*logits.lead, 1)[(*rows, slice(None))][..., 0]
    index_of_rows = numbers.reshape(-1)
    node = logits.part
    new = _written(logits, node.take(index_of_rows), numbers.shape, token, value)
    if any(not _is_everything(i) for i in rows):
        new = put_rows(node, index_of_rows, new, twice=True)
    assign(logits, new)


def _written(logits: LazyLogits, node: Node, lead: torch.Size, token: Any, value: Any) -> Node:
    """Return rows (*lead, V) with some tokens set."""
    if isinstance(value, LazyLogits):
        if not (isinstance(token, slice) and value.lead == lead and value._vdim == value.dim() - 1):
            raise NotRecorded
        if value.shape[-1] != len(range(node.width)[token]):
            raise NotRecorded
        part: Any = value.part
    elif isinstance(value, Tensor) and value.dim():
        # One token has no dimension of its own among the values.
        one = not isinstance(token, slice) and _ids(token, logits).dim() == 0
        value = value.to(logits.dtype)
        given = _broadcast(value, len(lead))[..., None] if one else _broadcast(value, len(lead) + 1)
        _check_width(given, token, logits)
        part = Operand.of(given, lead)
    else:
        part = Operand.of(value, lead) if isinstance(value, Tensor) else value
    if isinstance(token, slice):
        return call(_set_range, (node, part, token), {}, node.n_rows, node.width)
    ids = _ids(token, logits)
    ids = _from_the_end(ids, node.width)
    if ids.dim() > 1:
        raise NotRecorded
    return call(_set_tokens, (node, part, ids.reshape(-1)), {}, node.n_rows, node.width)


def _check_width(value: Tensor, token: Any, logits: LazyLogits) -> None:
    """Validate that a value has one entry for each chosen token, or one for all."""
    vocab = logits.shape[-1]
    n = len(range(vocab)[token]) if isinstance(token, slice) else _ids(token, logits).numel()
    if value.shape[-1] not in (1, n):
        raise RuntimeError(
            f"a value of shape {tuple(value.shape)} cannot be assigned to {n} tokens of each row"
        )


def _broadcast(value: Tensor, dims: int) -> Tensor:
    if value.dim() > dims:
        value = value.reshape(value.shape[value.dim() - dims :])
    return value.reshape((1,) * (dims - value.dim()) + tuple(value.shape))


def _set_range(tile: Tensor, value: Any, tokens: slice) -> Tensor:
    made = tile.clone()
    made[:, tokens] = value
    return made


def _set_tokens(tile: Tensor, value: Any, ids: Tensor) -> Tensor:
    made = tile.clone()
    made[:, ids] = value
    return made


def _set_pairs(logits: LazyLogits, rows: tuple[Any, ...], token: Any, value: Any) -> None:
    """Set one token of each chosen row: logits[rows, ids] = values."""
    places = torch.broadcast_tensors(*map(torch.as_tensor, (*rows, token)))  # type: ignore[no-untyped-call]
    lead = logits.lead
    numbers = torch.arange(lead.numel()).view(lead)[places[:-1]].reshape(-1)
    ids = _from_the_end(places[-1], logits.shape[-1]).reshape(-1)
    values = torch.as_tensor(value, dtype=logits.dtype, device=logits.device)
    values = values.expand(places[-1].shape).reshape(-1)
    assign(logits, put_pairs(logits.part, numbers, ids, values))


def put_pairs(node: Node, rows: Tensor, ids: Tensor, values: Tensor) -> Node:
    """Return the program with the entries (rows[i], ids[i]) set to values[i]."""
    order = rows.argsort(stable=True)
    rows, ids, values = rows[order], ids[order], values[order]
    counts = torch.bincount(rows, minlength=node.n_rows)
    width = int(counts.max()) if len(rows) else 0
    if width == 0:
        return node
    starts = counts.cumsum(0) - counts
    place = torch.arange(width)[None].expand(node.n_rows, -1)
    entry = (starts[:, None] + place).clamp(max=len(rows) - 1)
    lead = torch.Size((node.n_rows,))
    written = place < counts[:, None]
    given = [Operand.of(t.contiguous(), lead) for t in (ids[entry], values[entry], written)]
    return call(_put_entries, (node, *given), {}, node.n_rows, node.width)


def _put_entries(tile: Tensor, ids: Tensor, values: Tensor, written: Tensor) -> Tensor:
    places = written.nonzero(as_tuple=True)
    return tile.index_put((places[0], ids[places]), values[places].to(tile.dtype))


def _as(node: Node, like: LazyLogits) -> Node:
    """Return a program cast to the dtype of logits that it is assigned to."""
    return call(Tensor.to, (node, like.dtype), {}, node.n_rows, node.width)


def _ids(token: Any, logits: LazyLogits) -> Tensor:
    """Return an index of tokens as ids."""
    if isinstance(token, list) and not token:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    ids = torch.as_tensor(token, device=logits.device)
    return ids.nonzero()[:, 0] if ids.dtype == torch.bool else ids


def _from_the_end(ids: Tensor, vocab: int) -> Tensor:
    """Return ids with negative ones counted from the end."""
    wrong = (ids < -vocab) | (ids >= vocab)
    if bool(wrong.any()):
        raise IndexError(f"index {int(ids[wrong][0])} is out of bounds for a vocabulary of {vocab}")
    return torch.where(ids < 0, ids + vocab, ids)


def _expanded(index: Any, ndim: int) -> tuple[Any, ...]:
    """Return one entry for every dimension, without an ellipsis."""
    index = index if isinstance(index, tuple) else (index,)
    index = tuple(
        int(i) if isinstance(i, Tensor) and i.dim() == 0 and _is_id(i) else i for i in index
    )
    used = sum(_consumes(i) for i in index)
    if used > ndim:
        raise IndexError(f"too many indices for tensor of dimension {ndim}")
    missing = (slice(None),) * (ndim - used)
    places = [n for n, i in enumerate(index) if i is Ellipsis]
    if not places:
        made = (*index, *missing)
    else:
        made = (*index[: places[0]], *missing, *index[places[0] + 1 :])
    last = made[-1]
    if last is None or isinstance(last, bool):
        raise NotRecorded
    if isinstance(last, Tensor) and last.dtype == torch.bool and last.dim() > 1:
        raise NotRecorded
    return made


def _consumes(i: Any) -> int:
    if i is None or i is Ellipsis:
        return 0
    return i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else 1


def _is_everything(i: Any) -> bool:
    return isinstance(i, slice) and i in (slice(None), slice(0, None), slice(None, None, 1))


def _is_id(i: Any) -> bool:
    if isinstance(i, Tensor):
        return i.dtype != torch.bool and not i.is_floating_point()
    return isinstance(i, int | list) and not isinstance(i, bool)


def _pairs(rows: tuple[Any, ...], token: Any) -> bool:
    """Whether an index names one token for each chosen row."""
    return all(_is_id(i) for i in (*rows, token))
