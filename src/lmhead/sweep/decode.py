"""Dense rows for decoding: the same numbers whatever other rows are present."""

from __future__ import annotations

import torch
from torch import Tensor

from lmhead.sweep import native
from lmhead.sweep.kernels import finish_
from lmhead.sweep.plan import DEFAULT_MAX_BYTES
from lmhead.sweep.source import Source


@torch.no_grad()
def row_logits(source: Source) -> Tensor:
    """Return all logits (N, V) in the dtype of the products, each row independent of the others.

    The compiled core reads the weight once for all rows; otherwise it is read once per row.
    """
    products = [
        native.row_logits(h, w) if source.dtype == torch.float32 else None
        for h, w in zip(source.hiddens, source.weights, strict=True)
    ]
    if any(p is None for p in products):
        with source.products():
            made = [_row(source, row) for row in range(source.rows)]
        return torch.stack(made) if made else torch.empty(0, source.vocab, dtype=source.dtype)
    z: Tensor = sum(p for p in products if p is not None)  # type: ignore[assignment]
    if source.bias is not None:
        z += source.bias
    return source.pointwise.apply_(z).to(source.dtype)


def _row(source: Source, row: int) -> Tensor:
    hiddens = source.take(slice(row, row + 1))
    transposed = tuple(h.T.contiguous() for h in hiddens)
    z = transposed[0].new_empty(source.vocab, 1)
    # Half precisions are converted a tile at a time.
    tile = max(1, DEFAULT_MAX_BYTES // (8 * source.hidden_size)) if source.converts else 0
    for lo in range(0, source.vocab, tile or source.vocab):
        hi = min(source.vocab, lo + (tile or source.vocab))
        out = source.linear_tile(transposed, lo, hi, z[lo:hi])
        finish_(out, source.bias_tile(lo, hi), source.pointwise)
    return z[:, 0]
