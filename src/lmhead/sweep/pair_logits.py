"""Logits of single (row, token) pairs, with gradients: used for a few kept tokens per row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmhead.sweep.questions import DEFAULT_MAX_BYTES
from lmhead.sweep.source import Source
from lmhead.sweep.wide_gradients import to_dtype_of


def pair_logits(source: Source, rows: Tensor, ids: Tensor, max_bytes: int | None) -> Tensor:
    """Return the logits of pairs, (M,) in float64: one row of the weight is read for each."""
    z: Tensor = _PairLogits.apply(source.without_tensors(), rows, ids, max_bytes, *source.tensors())  # type: ignore[no-untyped-call]
    return z


def kept_logsumexp(z: Tensor, rows: Tensor, n_rows: int) -> Tensor:
    """Return log Σ exp over the pairs of each row, (N,); -inf for a row without pairs."""
    largest = z.detach().new_full((n_rows,), -torch.inf)
    largest = largest.scatter_reduce(0, rows, z.detach(), "amax")
    origin = torch.where(largest.isfinite(), largest, 0.0)
    total = torch.zeros_like(largest).index_add(0, rows, (z - origin[rows]).exp())
    return origin + total.log()


class _PairLogits(torch.autograd.Function):
    """Σ_d hidden[row, d] · weight[id, d] of each pair, mapped; backward in blocks of pairs."""

    @staticmethod
    def forward(
        ctx: Any,
        form: Source,
        rows: Tensor,
        ids: Tensor,
        max_bytes: int | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.form, ctx.max_bytes = form, DEFAULT_MAX_BYTES if max_bytes is None else max_bytes
        z = form.with_tensors(tensors).pairs(rows, ids, max_bytes=ctx.max_bytes)
        ctx.save_for_backward(z, rows, ids, *tensors)
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        z, rows, ids, *tensors = ctx.saved_tensors
        source = ctx.form.with_tensors(tensors)
        to_linear = (grad * _slope(source, z, rows)).to(source.dtype)
        flags = ctx.needs_input_grad[4:]
        gradients = [
            torch.zeros(t.shape, dtype=source.dtype, device=t.device) if f else None
            for t, f in zip(tensors, flags, strict=True)
        ]
        n = len(source.hiddens)
        block = max(1, ctx.max_bytes // (4 * source.dtype.itemsize * source.hidden_size))
        for start in range(0, len(rows), block):
            block_of_pairs = slice(start, start + block)
            row, token, g = (
                rows[block_of_pairs],
                ids[block_of_pairs],
                to_linear[block_of_pairs, None],
            )
            for i, (hidden, weight) in enumerate(zip(source.hiddens, source.weights, strict=True)):
                to_hidden, to_weight = gradients[i], gradients[n + i]
                if to_hidden is not None:
                    to_hidden.index_add_(0, row, weight[token].to(source.dtype).mul_(g))
                if to_weight is not None:
                    to_weight.index_add_(0, token, hidden[row].to(source.dtype).mul_(g))
            to_bias = gradients[2 * n]
            if to_bias is not None:
                to_bias.index_add_(0, token, g[:, 0])
        typed_gradients = (
            None if g is None or t is None else to_dtype_of(g, t)
            for g, t in zip(gradients, tensors, strict=True)
        )
        return (None, None, None, None, *typed_gradients)


def _slope(source: Source, z: Tensor, rows: Tensor) -> Tensor:
    """Return dz / d(linear layer) of each pair."""
    scale = torch.ones_like(z) if source.row_scale is None else source.row_scale[rows].double()
    pointwise = source.pointwise
    if not pointwise.bounded:
        return scale * pointwise.scale
    slope = z / scale
    return pointwise.slope(slope, out=slope).mul_(scale)
