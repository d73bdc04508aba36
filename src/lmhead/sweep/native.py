"""The compiled core, where there is one.

`LMHEAD_NATIVE=off` does without it, `LMHEAD_NATIVE=require` refuses to. Without it the torch
operations of `kernels` serve: the same answers, slower.
"""

from __future__ import annotations

import os
from types import ModuleType

import torch
from torch import Tensor

from lmhead.sweep.pointwise import Pointwise


def _load() -> ModuleType | None:
    wish = os.environ.get("LMHEAD_NATIVE", "")
    if wish == "off":
        return None
    try:
        from lmhead import _native
    except ImportError:
        if wish == "require":
            raise
        return None
    return _native


core: ModuleType | None = _load()
# The kernels work on vectors of tokens; with fewer tokens than lanes torch is as fast.
MIN_TOKENS = 8


def for_tile(z: Tensor) -> ModuleType | None:
    """The core, if it can work on this tile."""
    fits = z.dtype == torch.float32 and z.device.type == "cpu" and z.shape[1] >= MIN_TOKENS
    return core if fits else None


def for_pairs(hidden: Tensor, weight: Tensor) -> ModuleType | None:
    """The core, if it can make single dot products of these."""
    fits = (
        hidden.device.type == "cpu"
        and hidden.dtype == weight.dtype
        and hidden.dtype in (torch.float32, torch.bfloat16)
        and hidden.is_contiguous()
        and weight.is_contiguous()
    )
    return core if fits else None


def threads() -> int:
    """As many as torch uses."""
    return torch.get_num_threads()


def map_tuple(p: Pointwise) -> tuple[float, float, bool, float, float]:
    """An elementwise map, as the core takes it."""
    return p.scale, p.shift, p.bounded, p.outer, p.outer_shift


def bits(t: Tensor) -> Tensor:
    """A tensor as the core takes it: bfloat16 as its bits, float32 as it is."""
    t = t.detach()
    return t.view(torch.uint16) if t.dtype == torch.bfloat16 else t
