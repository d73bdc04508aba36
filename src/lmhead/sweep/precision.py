"""The dtype of products.

float32 and float64 tensors are multiplied as they are. Half precisions are converted tile by tile
and multiplied in float32: on a CPU without instructions for them that is several times faster than
torch's own half-precision product, and sums lose nothing. Where the CPU does have bfloat16
instructions, torch uses them inside the float32 product: the inputs are bfloat16 numbers,
so nothing is lost there either, and sums still run in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of products and sums: float32 for half precisions."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def unit_roundoff(stored: torch.dtype) -> float:
    """Return the relative error of one operation of a product of tensors stored in this type."""
    if stored == torch.float64:
        return math.ldexp(1.0, -53)
    if stored != torch.bfloat16 and torch.get_float32_matmul_precision() != "highest":
        return 2.0**-9  # the user allows products in bfloat16 or TF32
    return math.ldexp(1.0, -24)


def has_bfloat16_products() -> bool:
    """Return whether this CPU multiplies bfloat16 natively."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@contextmanager
def native_products(stored: torch.dtype, device: torch.device) -> Iterator[None]:
    """Disable autocast, and allow the CPU's bfloat16 instructions in float32 products.

    The latter for converted bfloat16 tensors only.
    """
    with torch.autocast(device.type, enabled=False):
        if stored != torch.bfloat16 or device.type != "cpu" or not has_bfloat16_products():
            yield
            return
        with _bfloat16_inside():
            yield


@contextmanager
def _bfloat16_inside() -> Iterator[None]:
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
