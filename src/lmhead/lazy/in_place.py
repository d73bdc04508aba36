"""Functions that write to lazy logits: they change the program, as they would change a tensor.

Also `scatter`, `scatter_add` and `index_fill`, whose results are new logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from lmhead.checks import check_dim
from lmhead.lazy import indexing, recording, routing, views
from lmhead.lazy.assignment import assign, become_view
from lmhead.lazy.dense_logits import become_dense
from lmhead.lazy.logits import LazyLogits, derived
from lmhead.lazy.program import Dense, Node, Operand
from lmhead.lazy.recording import NotRecorded, call
from lmhead.lazy.row_nodes import Replaced

_OPERATORS = {
    "__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div",
    "__idiv__": "div", "__ipow__": "pow", "__ifloordiv__": "floor_divide", "__imod__": "remainder",
    "__iand__": "bitwise_and", "__ior__": "bitwise_or", "__ixor__": "bitwise_xor",
}  # fmt: skip


def is_in_place(name: str) -> bool:
    """Return whether a function with this name changes its first argument."""
    return name in _OPERATORS or (name.endswith("_") and not name.endswith("__"))


def run(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Change the logits as the function would change a tensor."""
    logits, *rest = args
    _check_recordable(logits)
    functional = getattr(torch, _OPERATORS.get(name, name[:-1]), None)
    if functional is None or functional not in recording.POINTWISE:
        raise NotRecorded
    made = recording.record(functional, (logits, *rest), dict(kwargs))
    if made.shape != logits.shape:
        raise RuntimeError(
            f"output with shape {list(logits.shape)} doesn't match the broadcast shape "
            f"{list(made.shape)}"
        )
    return assign(logits, _typed(made, logits))


def _check_recordable(logits: LazyLogits) -> None:
    """Raise if an in-place operation on these logits cannot be recorded."""
    if logits._chain and logits.requires_grad and not routing.can_bypass(logits):
        raise RuntimeError(
            "in-place operations on a view of lazy logits with hooks or retain_grad() fail; "
            "clone() it first, or attach them after the change"
        )


def _typed(made: LazyLogits, like: LazyLogits) -> Node:
    if made.dtype == like.dtype:
        return made.part
    if not torch.can_cast(made.dtype, like.dtype):
        raise RuntimeError(
            f"result type {made.dtype} can't be cast to the desired output type {like.dtype}"
        )
    return views.cast(made, like.dtype).part


def fill(logits: LazyLogits, value: Any) -> Any:
    """Set all entries to one value."""
    _check_recordable(logits)
    node = logits.part
    given = Operand.of(value, torch.Size()) if isinstance(value, Tensor) else value
    return assign(logits, Replaced(node, given, logits.dtype, node.n_rows, node.width))


def copy(logits: Any, source: Any, non_blocking: bool = False) -> Any:  # noqa: ARG001
    """Set all entries to those of a tensor or of other lazy logits."""
    if not isinstance(logits, LazyLogits):
        return logits.copy_(become_dense(source, "copy_()"))
    _check_recordable(logits)
    if isinstance(source, LazyLogits):
        made = views.expand(source, *logits.shape) if source.shape != logits.shape else source
        if made._vdim != logits._vdim:
            raise NotRecorded
        return _replace(logits, views._cast(made.part, logits.dtype))
    frame = recording.Frame([logits, source])
    given = frame.canonical(source).expand(*frame.lead, frame.vocab).to(logits.dtype, copy=True)
    return _replace(logits, Dense.of(given))


def _replace(logits: LazyLogits, new: Node) -> LazyLogits:
    """Put other values in all entries; what was there before gets a gradient of 0."""
    before = logits.part
    if routing.differentiable([before]) and torch.is_grad_enabled():
        new = Replaced(before, new, logits.dtype, before.n_rows, before.width)
    return assign(logits, new)


def scatter(
    logits: Any, dim: int, index: Tensor, src: Any = None, *, value: Any = None, reduce: Any = None
) -> Any:
    """Return logits with entries at given ids replaced, as torch.scatter does."""
    node, shape = _scattered("scatter", logits, dim, index, value if src is None else src, reduce)
    return derived(logits, node, shape, logits.dtype, vdim=logits._vdim)


def scatter_add(logits: Any, dim: int, index: Tensor, src: Tensor) -> Any:
    """Return logits with values added at given ids, as torch.scatter_add does."""
    node, shape = _scattered("scatter_add", logits, dim, index, src, None)
    return derived(logits, node, shape, logits.dtype, vdim=logits._vdim)


def _scattered(
    name: str, logits: Any, dim: int, index: Tensor, src: Any, reduce: Any
) -> tuple[Node, Any]:
    if isinstance(src, LazyLogits):
        raise NotRecorded
    if check_dim(dim, logits.dim()) != logits._vdim or index.dim() != logits.dim():
        raise NotRecorded
    ids = index.movedim(logits._vdim, -1)
    if ids.shape[:-1] != logits.lead:
        raise NotRecorded
    n, node = logits.lead.numel(), logits.part
    flat_ids = Operand.of(ids.reshape(n, ids.shape[-1]), torch.Size((n,)))
    given = src
    if isinstance(src, Tensor) and src.dim():
        moved = src.movedim(logits._vdim, -1)[tuple(slice(0, k) for k in ids.shape)]
        given = Operand.of(moved.reshape(n, moved.shape[-1]), torch.Size((n,)))
    elif isinstance(src, Tensor):
        given = float(src)
    function = partial(_scatter_rows, name, reduce)
    return call(function, (node, flat_ids, given), {}, node.n_rows, node.width), logits.shape


def _scatter_rows(name: str, reduce: Any, tile: Tensor, ids: Tensor, src: Any) -> Tensor:
    if len(ids) != len(tile):  # one row for all
        ids = ids.expand(len(tile), -1)
    if isinstance(src, Tensor):
        src = src.to(tile.dtype).expand(len(tile), -1)
    if reduce is None:
        made: Tensor = getattr(tile, name)(1, ids, src)
    else:
        made = tile.scatter(1, ids, src, reduce=reduce)
    return made


def index_fill(logits: LazyLogits, dim: int, index: Tensor, value: Any) -> Any:
    """Return logits with entries at given places set to a value."""
    made = views.copied(logits)
    full = (slice(None),) * check_dim(dim, logits.dim()) + (index,)
    indexing.setitem(made, full, value)
    return made


def by_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the in-place form of a function that returns new lazy logits."""

    def in_place(logits: Any, *args: Any, **kwargs: Any) -> Any:
        _check_recordable(logits)
        return assign(logits, function(logits, *args, **kwargs).part)

    return in_place


def masked_fill_in_place(logits: Any, mask: Any, value: Any) -> Any:
    """Set the entries that a mask chooses."""
    _check_recordable(logits)
    return assign(logits, recording.record(torch.masked_fill, (logits, mask, value), {}).part)


def shape_in_place(change: Callable[..., Any]) -> Callable[..., Any]:
    """Return the in-place form of a view, such as squeeze_: the object becomes that view."""

    def in_place(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        try:
            made = change(logits, *args, **kwargs)
        except NotRecorded:
            raise RuntimeError(
                "an in-place operation cannot remove the vocabulary dimension of lazy logits; use "
                "logits.materialize()"
            ) from None
        if made is logits or not isinstance(made, LazyLogits):
            return logits
        # The tensor itself, below all that is recorded, takes the new shape and strides.
        with no_dispatch(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            torch.as_strided_(logits, made.shape, made.stride())
        become_view(logits, made)
        return logits

    return in_place


REFUSED = ("resize_", "resize_as_", "set_", "as_strided_")


def refused(name: str) -> Callable[..., Any]:
    """Return the handler of a function that lazy logits cannot support."""

    def refuse(logits: Any, *_: Any, **__: Any) -> Any:  # noqa: ARG001
        raise RuntimeError(
            f"{name}() is not supported on lazy logits: they have no memory of their own. "
            f"Use logits.materialize().{name}()"
        )

    return refuse


def set_data(logits: Any, value: Any) -> None:
    """Set logits.data: other values, of which autograd does not know."""
    if not isinstance(logits, LazyLogits):
        logits.data = become_dense(value, "setting .data", outside=True)
        return
    if logits.shape != value.shape or logits.dtype != value.dtype:
        raise RuntimeError(
            f"the data of lazy logits must keep shape {tuple(logits.shape)} and dtype "
            f"{logits.dtype}; got {tuple(value.shape)} and {value.dtype}"
        )
    become_dense(logits, "setting .data", outside=True).copy_(value)


def setitem(logits: Any, index: Any, value: Any) -> None:
    """Set logits[index] = value."""
    _check_recordable(logits)
    indexing.setitem(logits, index, value)
