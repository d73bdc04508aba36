"""The largest tensor that one operation allocates while a snippet runs, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch_watch import Watch, tensors_of

from lmhead import LazyLogits
from zoo.catalogue import Sizes, Snippet, run


class Allocation(NamedTuple):
    nbytes: int = 0
    operation: str = ""
    shape: tuple[int, ...] = ()


def _plain(tree: Any) -> list[Tensor]:
    """Tensors with memory of their own; a lazy one must not be asked for its storage."""
    return [tensor for tensor in tensors_of(tree) if type(tensor) in (Tensor, Parameter)]


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()


class LargestResult(Watch):
    """Remember the largest result that is not a view of an argument."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.largest = Allocation()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _plain(result):
            key, nbytes = _storage(tensor)
            if nbytes > self.largest.nbytes and key not in {
                _storage(argument)[0] for argument in _plain((args, kwargs))
            }:
                self.largest = Allocation(nbytes, f"{func} {tensor.dtype}", tuple(tensor.shape))
        return result


def reduced(value: Any) -> Any:
    """Lazy logits reduced over the vocabulary: the smallest use of a lazy result."""
    if not isinstance(value, LazyLogits):
        return value
    return value.sum(-1)


def largest_allocation(entry: Snippet, sizes: Sizes, max_bytes: int) -> Allocation:
    watch = LargestResult()

    def watched(z: Any, x: Any) -> Any:
        # Made before the watch begins; the gradient of a full-size leaf would be full-size too.
        _ = x.full, x.probabilities, x.forbidden_rows
        x.full = x.leaves.pop("full").detach()
        watch.__enter__()  # type: ignore[no-untyped-call, unused-ignore]
        return entry.function(z, x)

    try:
        run(
            replace(entry, function=watched),
            sizes,
            torch.float32,
            lazy=True,
            max_bytes=max_bytes,
            finish=reduced,
        )
    finally:
        watch.__exit__(None, None, None)  # type: ignore[no-untyped-call, unused-ignore]
    return watch.largest
