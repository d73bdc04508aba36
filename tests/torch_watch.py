"""Watch torch: the tensors it allocates, and the number of matrix products it computes.

`no_tensor_of(tokens, vocab)` fails as soon as an operation, forward or backward, allocates a tensor
of tokens x vocab elements or more, in whatever shape. `no_operation()` fails on any operation at
all. `Products` counts multiplications and additions of matrix products.

An operation *allocates* when its result lives in memory that none of its arguments had: a view, an
expanded tensor or a result written in place costs nothing and passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class TooLargeError(AssertionError):
    """An operation allocated a tensor that must not exist."""


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors among arguments or results; faster than torch's pytree."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [tensor for item in tree for tensor in tensors_of(item)]


def _elements(tensor: Tensor) -> int:
    """Return the number of elements of the storage of `tensor`, which a view may share."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _sizes(tree: Any) -> dict[int, int]:
    """Return the elements of each storage among arguments."""
    return {t.untyped_storage()._cdata: _elements(t) for t in tensors_of(tree)}


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """A mode that torch does not wrap for Dynamo, which costs as much time as the operations."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Allocations(Watch):
    """Keeps the largest allocation, and raises on one of `limit` elements or more."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.limit = limit
        self.operations: list[Callable[..., Any]] = []
        self.changes_arguments: dict[Callable[..., Any], bool] = {}
        self.largest: int = 0
        self.failure: TooLargeError | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self.changes_arguments:
            self.changes_arguments[func] = func._schema.is_mutable
        # A tensor written by `out=` may grow: its size before. Of others, only if it matters.
        had = _sizes((args, kwargs)) if self.changes_arguments[func] else None
        result = func(*args, **kwargs)
        self.operations.append(func)
        for tensor in tensors_of(result):
            size = _elements(tensor)
            if size <= self.largest:
                continue
            if had is None:
                had = _sizes((args, kwargs))
            if size <= had.get(tensor.untyped_storage()._cdata, -1):
                continue
            self.largest = size
            if self.limit is not None and size >= self.limit:
                self.failure = TooLargeError(
                    f"{func} allocated {size} elements for shape {tuple(tensor.shape)}; "
                    f"it must stay under {self.limit}"
                )
                raise self.failure
        return result

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc, trace)  # type: ignore[no-untyped-call, unused-ignore]
        # A caller in between may have swallowed the exception.
        if self.failure is not None and exc is None:
            raise self.failure


@contextmanager
def no_tensor_of(tokens: int, vocab: int) -> Iterator[Allocations]:
    """Fail on an allocation of tokens x vocab elements: logits, their gradient, a mask of them."""
    with Allocations(tokens * vocab) as watch:
        yield watch


@contextmanager
def no_operation() -> Iterator[None]:
    """Fail when torch does anything at all."""
    with Allocations() as watch:
        yield
    if watch.operations:
        ran = ", ".join(map(str, watch.operations))
        raise AssertionError(f"nothing had to be computed, but torch ran {ran}")


# Products by name: indices of their two factors among the arguments.
_FACTORS = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    "addbmm": (1, 2),
    "mv": (0, 1),
    "addmv": (1, 2),
    "dot": (0, 1),
    "addr": (1, 2),
    "linear": (0, 1),
    "_int_mm": (0, 1),
}


class Products(Watch):
    """Counts `flops`, two per multiply-add, of every matrix product (also in place and `out=`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.flops: int = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if name in _FACTORS:
            first, second = (args[k] for k in _FACTORS[name])
            if name == "addr":  # an outer product
                self.flops += 2 * first.numel() * second.numel()
            else:
                columns = second.shape[-1] if second.ndim > 1 else 1
                if name == "linear":
                    columns = second.shape[0]
                self.flops += 2 * prod(first.shape) * columns
        return result


def count_products(step: Callable[[], object], tokens: int, hidden: int, vocab: int) -> float:
    """Return the cost of `step` in products of (tokens x hidden) with (hidden x vocab)."""
    with Products() as counter:
        step()
    return float(counter.flops / (2 * tokens * hidden * vocab))


def peak_elements(step: Callable[[], object]) -> int:
    """The largest number of elements that one operation of `step` allocates."""
    with Allocations() as watch, torch.random.fork_rng():
        step()
    return int(watch.largest)
