"""`Column`: one token of every row, logits[..., id], which shares memory with the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lmhead.lazy import routing
from lmhead.lazy.memory import share_memory
from lmhead.lazy.program import version

if TYPE_CHECKING:
    from lmhead.lazy.logits import LazyLogits


class Column(Tensor):
    """The values of one token, computed; in-place changes are made to the logits as well.

    A view of a column is one too: a change through it is a change of the column. After another
    change to the logits both raise: their values would be old. Its memory is not that of the
    logits: a NumPy array of it is read-only, and there is no pointer to it.
    """

    _logits: LazyLogits
    _index: Any
    _seen: tuple[int, int]  # version and writes of the logits when the values were computed
    _whole: Column | None  # the column that this one is a view of

    @staticmethod
    def of(values: Tensor, logits: LazyLogits, index: Any) -> Column:
        """Return values (...) of logits[index] as a view of the logits."""
        made: Column = values.as_subclass(Column)
        made._logits, made._index, made._whole = logits, index, None
        made._seen = _state(logits)
        return made

    def _view(self, values: Tensor) -> Column:
        """Return values that share memory with this column as a view of it."""
        made: Column = values.as_subclass(Column)
        made._whole = self if self._whole is None else self._whole
        return made

    def _now(self) -> Column:
        """Return this column with values that are those of the logits now."""
        whole = self if self._whole is None else self._whole
        now = _state(whole._logits)
        if whole._seen == now and not whole._logits._shared.exposed:
            return self
        if whole is self and whole._seen[1] == now[1]:
            # The logits were built since then, and perhaps written to through their memory.
            again = self._logits[self._index]
            return (
                again if isinstance(again, Column) else Column.of(again, self._logits, self._index)
            )
        raise RuntimeError(
            "a column of lazy logits was read after the logits were modified in place; "
            "select it again"
        )

    def plain(self) -> Tensor:
        """Return the values as a tensor that shares memory with them."""
        now = self._now()
        with torch._C.DisableTorchFunctionSubclass():
            return now.as_subclass(Tensor)

    def _written(self, values: Tensor) -> None:
        """Give the logits the values of this column, after it or a view of it was changed."""
        if self._whole is not None:
            self._whole._written(self._whole.plain())
            return
        self._logits[self._index] = values.clone()
        self._seen = _state(self._logits)
        if routing.is_watched(self._logits):  # select it again: gradients must pass through them
            self._seen = (-1, self._seen[1])

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function on the values; write in-place changes to the logits."""
        name = getattr(func, "__name__", "")
        if name in _OF_THE_OBJECT or func in _ATTRIBUTES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in _RESHAPED:
            raise RuntimeError(f"{name}() of logits[..., id] is not supported; use {name[:-1]}()")
        if name in _POINTERS:
            raise RuntimeError(
                f"{name} of logits[..., id] is not available, since a write to its memory would "
                "not reach the lazy logits; copy it (.clone()), or index logits.materialize()"
            )
        columns: dict[int, tuple[Column, Column, Tensor, int | None]] = {}

        def plain(x: Any) -> Any:
            if not isinstance(x, cls):
                return x
            if id(x) not in columns:
                column = x._now()
                values = column.plain()
                columns[id(x)] = (x, column, values, version(values))
            return columns[id(x)][2]

        made = func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        if name == "contiguous" and made.numel() > 1:
            return made.clone()  # in the logits the values are not next to each other
        if isinstance(made, np.ndarray):
            # A write to the array would not reach the logits: let NumPy refuse it.
            if any(
                np.may_share_memory(made, v.detach().numpy()) for _, _, v, _ in columns.values()
            ):
                made.flags.writeable = False
            return made
        for given, column, values, before in columns.values():
            if version(values) != before or (before is None and _writes(func, args, given)):
                column._written(values)
                if column is not given:
                    given._seen = column._seen
                    with torch._C.DisableTorchFunctionSubclass():
                        given.copy_(values)

        def ours(x: Any) -> Any:
            if type(x) is not Tensor:
                return x
            for given, column, values, _ in columns.values():
                if x is values:
                    return given
                if x.numel() and share_memory(x, values):
                    return column._view(x)
            return x

        if isinstance(made, Tensor):
            return ours(made)
        return tuple(map(ours, made)) if type(made) is tuple else made


def _state(logits: LazyLogits) -> tuple[int, int]:
    return logits._shared.version, logits._shared.writes


def _writes(func: Callable[..., Any], args: tuple[Any, ...], column: Column) -> bool:
    """Whether a function changes its first argument: for tensors whose changes are not counted."""
    name = getattr(func, "__name__", "")
    return (
        bool(args)
        and args[0] is column
        and (
            name == "__setitem__"
            or name in _OPERATORS
            or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")
        )
    )


_POINTERS = ("data_ptr", "__dlpack__", "untyped_storage", "storage", "_typed_storage")
_OPERATORS = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")

_RESHAPED = ("squeeze_", "unsqueeze_", "transpose_", "swapaxes_", "swapdims_", "t_")
# Hooks and gradients belong to the column itself, through which results are computed.
_OF_THE_OBJECT = ("register_hook", "retain_grad")
_ATTRIBUTES = {torch.autograd.grad, torch.autograd.backward} | {
    getattr(getattr(Tensor, name), access)
    for name in ("grad", "grad_fn", "is_leaf", "requires_grad", "retains_grad", "_backward_hooks")
    for access in ("__get__", "__set__", "__delete__")
}
