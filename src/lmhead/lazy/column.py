"""`Column`: one token of every row, logits[..., id], which shares memory with the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from lmhead.lazy.logits import LazyLogits


class Column(Tensor):
    """The values of one token, computed; in-place changes are made to the logits as well.

    After another change to the logits it raises: its values would be old.
    """

    _logits: LazyLogits
    _index: Any
    _seen: int

    @staticmethod
    def of(values: Tensor, logits: LazyLogits, index: Any) -> Column:
        """Return values (...) of logits[index] as a view of the logits."""
        made: Column = values.as_subclass(Column)
        made._logits, made._index = logits, index
        made._seen = logits._shared.version
        return made

    def _plain(self) -> Tensor:
        if self._seen != self._logits._shared.version:
            raise RuntimeError(
                "a column of lazy logits was read after the logits were modified in place; "
                "select it again"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

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
        first = args[0] if args else None
        writes = name == "__setitem__" or name in _OPERATORS
        writes = writes or (name.endswith("_") and not name.endswith("__"))

        def plain(x: Any) -> Any:
            return x._plain() if isinstance(x, cls) else x

        if not (isinstance(first, cls) and writes and name != "requires_grad_"):
            return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        values = first._plain().clone()
        func(values, *tree_map(plain, args[1:]), **tree_map(plain, kwargs or {}))
        first._logits[first._index] = values
        first._seen = first._logits._shared.version
        with torch._C.DisableTorchFunctionSubclass():
            first.data = values.detach()
        return first


_OPERATORS = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")
