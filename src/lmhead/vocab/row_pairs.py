"""Products of single pairs (hidden state, row of a weight), and sums of rows by their pairs.

    products   z_p = x[a_p] · y[b_p]                      (P,), float64
    sums       s[b] = Σ_{p: b_p = b} c_p x[a_p]           (M, D)

The gradient of the products with respect to y is a sum of rows of x; that of the sums with respect
to c are products. So both can be differentiated any number of times, and neither builds (P, D).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmhead.sweep import accumulation_dtype, kernels

_BYTES = 2**24  # bound on the rows that are gathered at a time


def pair_products(x: Tensor, y: Tensor, a: Tensor, b: Tensor, *, sparse: bool = False) -> Tensor:
    """Return dot products of rows in float64, bit for bit independent of the other pairs: (P,).

    Equivalent to: (x[a].double() * y[b].double()).sum(-1)

    x is (N, D), y (M, D) of the same type; a and b are (P,). `sparse` gives y a sparse gradient,
    with only the rows that occur.

    >>> x, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    >>> pair_products(x, y, torch.tensor([0, 0]), torch.tensor([0, 1]))
    tensor([3., 8.], dtype=torch.float64)
    """
    if torch._C._are_functorch_transforms_active():
        return (x[a].double() * y[b].double()).sum(-1)
    products: Tensor = _Products.apply(x, y, a, b, sparse)  # type: ignore[no-untyped-call]
    return products


def row_sums(c: Tensor, x: Tensor, a: Tensor, b: Tensor, size: int) -> Tensor:
    """Return sums of rows of x (N, D) with factors c (P,) float64, in the type of x: (size, D).

    Equivalent to: x.new_zeros(size, D).index_add(0, b, c[:, None] * x[a])
    """
    if torch._C._are_functorch_transforms_active():
        return x.new_zeros(size, x.shape[1]).index_add(0, b, c[:, None].to(x) * x[a])
    sums: Tensor = _Sums.apply(c, x, a, b, size)  # type: ignore[no-untyped-call]
    return sums


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, a: Tensor, b: Tensor, sparse: bool) -> Tensor:
        ctx.save_for_backward(x, y, a, b)
        ctx.sparse = sparse
        return kernels.pair_products(x, y, a, b, _BYTES)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y, a, b = ctx.saved_tensors
        grad_x = row_sums(grad, y, b, a, len(x)) if ctx.needs_input_grad[0] else None
        grad_y = None
        if ctx.needs_input_grad[1]:
            if ctx.sparse and not torch.is_grad_enabled():
                grad_y = _sparse_sums(grad, x, a, b, len(y))
            else:
                grad_y = row_sums(grad, x, a, b, len(y))
        return grad_x, grad_y, None, None, None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, c: Tensor, x: Tensor, a: Tensor, b: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(c, x, a, b)
        return _sums(c, x, a, b, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        c, x, a, b = ctx.saved_tensors
        grad_c = pair_products(x, grad, a, b) if ctx.needs_input_grad[0] else None
        grad_x = row_sums(c, grad, b, a, len(x)) if ctx.needs_input_grad[1] else None
        return grad_c, grad_x, None, None, None


def _sums(c: Tensor, x: Tensor, a: Tensor, b: Tensor, size: int) -> Tensor:
    wide = accumulation_dtype(x.dtype)
    out = _zeros(size, x.shape[1], wide, x.device)
    core = kernels.for_pairs(x, x)
    if core is not None and kernels.readable(c, a, b):
        arrays = (t.contiguous() for t in (c, x.detach(), a, b))
        core.tree_sums(*arrays, out, kernels.threads())
        return out.to(x.dtype)
    block = max(1, _BYTES // (8 * max(1, x.shape[1])))
    for i in range(0, len(c), block):
        block_of_pairs = slice(i, i + block)
        rows = x[a[block_of_pairs]].to(wide) * c[block_of_pairs, None].to(wide)
        out.index_add_(0, b[block_of_pairs], rows)
    return out.to(x.dtype)


def _zeros(size: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros like `torch.zeros`.

    On a CPU NumPy gets zero pages from the system, where torch writes zeros: for a large weight
    of which few rows get a gradient, writing them would take most of the time.
    """
    if device.type != "cpu":
        return torch.zeros(size, width, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((size, width), "f8" if dtype == torch.float64 else "f4"))


def _sparse_sums(c: Tensor, x: Tensor, a: Tensor, b: Tensor, size: int) -> Tensor:
    """Return `row_sums` as a sparse tensor with only the rows that occur."""
    ids, index = torch.unique(b, return_inverse=True)
    values = _sums(c, x, a, index, len(ids))
    shape = (size, x.shape[1])
    return torch.sparse_coo_tensor(
        ids[None], values, shape, is_coalesced=True, check_invariants=False
    )
