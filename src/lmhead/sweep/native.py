"""The compiled core, where there is one, and the checks of what it is given.

`LMHEAD_NATIVE=off` does without it, `LMHEAD_NATIVE=require` refuses to. Without it the torch
operations of `kernels` are used: the same answers, slower.

The core works on pointers. Every call of it goes through `core`, which refuses a tensor that is not
plain memory; callers ask `readable` first, and take the torch operations if it says no.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lmhead.checks import check_memory, is_plain
from lmhead.sweep.pointwise import Pointwise


def readable(*tensors: Tensor | None) -> bool:
    """Return whether a pointer reads what each tensor shows: see `checks.is_plain`. None is.

    Raises:
        ValueError: a tensor's storage is smaller than its shape: see `checks.check_memory`.
    """
    for t in tensors:
        if t is not None:
            if not (t.is_cpu and is_plain(t) and t.data_ptr() % t.element_size() == 0):
                return False
            check_memory("a tensor", t)
    return True


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a binding that refuses tensors which are not plain memory."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and not readable(value):
                raise TypeError(
                    f"the compiled core reads plain CPU tensors; got {type(value).__name__}, "
                    f"layout {value.layout}, device {value.device}"
                )
        return function(*args, **kwargs)

    return call


def _load() -> ModuleType | None:
    choice = os.environ.get("LMHEAD_NATIVE", "")
    if choice == "off":
        return None
    try:
        from lmhead import _native
    except ImportError:
        if choice == "require":
            raise
        return None
    checked = ModuleType("lmhead.sweep.native.core", _native.__doc__)
    for name in dir(_native):
        if not name.startswith("_"):
            value = getattr(_native, name)
            setattr(checked, name, _checked(value) if callable(value) else value)
    return checked


core: ModuleType | None = _load()
# The kernels work on vectors of rows; with fewer rows than lanes torch is as fast.
MIN_TOKENS = 8
_STORED = (torch.float32, torch.bfloat16, torch.float16)


def for_tile(z: Tensor, *others: Tensor | None) -> ModuleType | None:
    """Return the core if it can work on this tile, and read the other tensors."""
    fits = z.dtype == torch.float32 and z.shape[1] >= MIN_TOKENS and readable(z, *others)
    return core if fits else None


def for_pairs(hidden: Tensor, weight: Tensor) -> ModuleType | None:
    """Return the core if it can make single dot products of these."""
    fits = (
        hidden.dtype == weight.dtype
        and hidden.dtype in _STORED
        and readable(hidden, weight)
        and hidden.is_contiguous()
        and weight.is_contiguous()
    )
    return core if fits else None


def row_logits(
    hidden: Tensor, weight: Tensor, *, dtype: torch.dtype = torch.float64
) -> Tensor | None:
    """Return hidden @ weight.T of (B, D) and (V, D), summed in float64 in the order of `pairs`.

    The weight is read once, whatever B is; every entry is the same to the last bit for any batch,
    number of threads and instruction set. None if the core cannot do it.

    Args:
        hidden: float32, bfloat16 or float16.
        weight: likewise, not necessarily of the same type.
        dtype: of the result: float64, or float32 for rounded sums.
    """
    if core is None or hidden.dtype not in _STORED or weight.dtype not in _STORED:
        return None
    if not readable(hidden, weight) or not weight.is_contiguous():
        return None
    out = torch.empty(len(hidden), len(weight), dtype=dtype)
    core.row_logits(hidden.detach().float().contiguous(), weight.detach(), out, threads())
    return out


def threads() -> int:
    """Return the number of threads that torch uses."""
    return torch.get_num_threads()


def map_tuple(p: Pointwise) -> tuple[float, float, bool, float, float]:
    """Return an elementwise map in the form that the core takes."""
    return p.scale, p.shift, p.bounded, p.outer, p.outer_shift


def bits(t: Tensor) -> Tensor:
    """Return a tensor as the core takes it: without gradients."""
    return t.detach()


def views(*tensors: Tensor) -> tuple[Any, ...]:
    """Return NumPy arrays on the tensors' memory (a copy's, if not contiguous): the core takes
    these fastest.

    Raises:
        TypeError: a tensor is not plain memory: see `readable`.
    """
    if not readable(*tensors):
        raise TypeError("the compiled core reads plain CPU tensors")
    return tuple(t.contiguous().numpy() for t in tensors)
