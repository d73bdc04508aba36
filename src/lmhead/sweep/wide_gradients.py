"""Gradients of half-precision tensors, summed in float32 until they are complete.

Autograd converts the gradient of a bfloat16 tensor to bfloat16 at every step, so several gradients
of one weight are rounded before they are added: if two large ones cancel, the sum is mostly
rounding error. Within `summed_in_float32`, the sweeps return a `WideGradient`, which autograd takes
for a bfloat16 tensor and which holds float32 numbers. `unwrap` returns these in the end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_HALF = (torch.bfloat16, torch.float16)


class _State(threading.local):
    on = False


_STATE = _State()


@contextmanager
def summed_in_float32() -> Iterator[None]:
    """Let the sweeps return wide gradients; `unwrap` must be applied to the results."""
    before, _STATE.on = _STATE.on, True
    try:
        yield
    finally:
        _STATE.on = before


def is_enabled() -> bool:
    """Return whether gradients are summed in float32 here; not in a double backward pass."""
    return _STATE.on and not torch.is_grad_enabled()


def to_dtype_of(grad: Tensor, like: Tensor) -> Tensor:
    """Return a gradient in the dtype of its tensor, wide if `is_enabled`."""
    if is_enabled() and like.dtype in _HALF and grad.dtype == torch.float32:
        return WideGradient(grad, like.dtype)
    return grad.to(like.dtype)


def unwrap(grad: Tensor) -> Tensor:
    """Return the numbers of a gradient: in float32 if it is wide."""
    return grad.wide if isinstance(grad, WideGradient) else grad


class WideGradient(Tensor):
    """float32 numbers that autograd takes for those of a half precision."""

    wide: Tensor

    @staticmethod
    def __new__(cls, wide: Tensor, dtype: torch.dtype) -> WideGradient:
        """Return a gradient that holds `wide` and reports `dtype`."""
        gradient: WideGradient = Tensor._make_wrapper_subclass(
            cls, wide.shape, strides=wide.stride(), dtype=dtype, device=wide.device
        )
        gradient.wide = wide
        return gradient

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"WideGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function on the float32 numbers; its result is wide too."""
        kwargs = dict(kwargs or {})
        shown = next(a.dtype for a in tree_leaves((args, kwargs)) if isinstance(a, cls))
        dtype = kwargs.get("dtype")
        if dtype == shown:
            kwargs["dtype"] = torch.float32
        with torch.no_grad():
            result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
        if func._schema.is_mutable:
            return args[0]
        if dtype is not None and dtype != shown:
            return result

        def wrap(x: Any) -> Any:
            is_wide = isinstance(x, Tensor) and x.dtype == torch.float32
            return cls(x, shown) if is_wide else x

        return tree_map(wrap, result)


class _Converted(torch.autograd.Function):
    """A tensor in another dtype, whose gradient is not rounded on its way back."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.like = t.new_empty(0)
        return t.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return to_dtype_of(grad, ctx.like), None


def converted(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return t.to(dtype); within `summed_in_float32` its gradient keeps float32."""
    plain = t.dtype == dtype or not (t.requires_grad and torch.is_grad_enabled())
    if plain or torch._C._are_functorch_transforms_active():
        return t.to(dtype)
    result: Tensor = _Converted.apply(t, dtype)  # type: ignore[no-untyped-call]
    return result
