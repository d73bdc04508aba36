"""Indexing lazy logits: leading dimensions stay lazy, chosen words compute only their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lmhead.logits.lazy import LazyLogits


def select(logits: LazyLogits, index: Any) -> Any:
    """logits[index], as torch would have it.

    [:, -1]   [..., :-1, :]   [mask]   [rows]     lazy: the hidden states are selected
    [..., :32000]                                 lazy: rows of the weight are selected
    [..., ids]   [..., 7]                         a tensor, of those words only
    [rows, ids]                                   a tensor, one word per row
    """
    index = _expand(index if isinstance(index, tuple) else (index,), logits.ndim)
    rows, word = index[:-1], index[-1]
    if isinstance(word, slice):
        chosen = logits
        if any(not _is_everything(i) for i in rows):
            chosen = logits.map_rows(lambda h: h[(*rows, slice(None))])
        return chosen if _is_everything(word) else chosen.take_words(word)
    if all(i is None or isinstance(i, slice | int) for i in rows):
        chosen = logits.map_rows(lambda h: h[(*rows, slice(None))])
        ids = torch.as_tensor(word, device=logits.device)
        if ids.dtype == torch.bool:
            ids = ids.nonzero()[:, 0]
        columns = chosen.columns(_from_the_end(ids, logits.shape[-1]).reshape(-1))
        return columns.reshape((*chosen.shape[:-1], *ids.shape))
    tensors = [i for i in rows if not isinstance(i, slice)]
    if all(_is_id(i) for i in (*tensors, word)) and len(tensors) == len(rows):
        # One word for each chosen row: logits[torch.arange(n), targets].
        places = torch.broadcast_tensors(  # type: ignore[no-untyped-call]
            *(torch.as_tensor(i, device=logits.device) for i in (*tensors, word))
        )
        chosen = logits.map_rows(lambda h: h[places[:-1]])
        ids = _from_the_end(places[-1], logits.shape[-1])
        return chosen.gather(-1, ids[..., None])[..., 0]
    return logits.materialize()[index]


def _from_the_end(ids: Tensor, vocab: int) -> Tensor:
    """Negative ids count from the end, as in any index."""
    wrong = (ids < -vocab) | (ids >= vocab)
    if bool(wrong.any()):
        raise IndexError(f"index {int(ids[wrong][0])} is out of bounds for {vocab} words")
    return torch.where(ids < 0, ids + vocab, ids)


def _expand(index: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """One entry for every dimension, without an ellipsis."""
    used = sum(_consumes(i) for i in index)
    if used > ndim:
        raise IndexError(f"too many indices: {used} for logits of {ndim} dimensions")
    missing = (slice(None),) * (ndim - used)
    places = [n for n, i in enumerate(index) if i is Ellipsis]
    if not places:
        return (*index, *missing)
    return (*index[: places[0]], *missing, *index[places[0] + 1 :])


def _consumes(i: Any) -> int:
    if i is None or i is Ellipsis:
        return 0
    return i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else 1


def _is_everything(i: Any) -> bool:
    return isinstance(i, slice) and i in (slice(None), slice(0, None), slice(None, None, 1))


def _is_id(i: Any) -> bool:
    if isinstance(i, Tensor):
        return i.dtype != torch.bool and not i.is_floating_point()
    return isinstance(i, int | list)
