"""Token masks of 32 bits an entry, as grammar engines write them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmhead.lazy.logits import LazyLogits, derived
from lmhead.lazy.program import Operand
from lmhead.lazy.recording import call


def mask_tokens(logits: LazyLogits, bitmask: Tensor) -> LazyLogits:
    """Return logits with -inf where a bit is 0; see `LazyLogits.mask_tokens`."""
    if isinstance(bitmask, Tensor) and bitmask.dtype == torch.bool:
        made: LazyLogits = logits.masked_fill(~bitmask, -math.inf)  # type: ignore[assignment]
        return made
    if logits._vdim != logits.dim() - 1:
        raise ValueError("bitmask needs logits with the vocabulary in the last dimension")
    flat = padded_bitmask(bitmask, logits.shape)
    # What no row allows is masked in the head itself, which then need not read it.
    anywhere = allowed_tokens(flat, logits.shape[-1]).any(0)
    common: LazyLogits = logits.masked_fill(~anywhere, -math.inf)  # type: ignore[assignment]
    if len(flat) == 1:
        return common
    mask = Operand.of(flat, torch.Size((logits.lead.numel(),)))
    node = common.part
    masked = call(_masked, (node, mask), {}, node.n_rows, node.width)
    return derived(logits, masked, logits.shape, logits.dtype)


def padded_bitmask(bitmask: Tensor, shape: torch.Size) -> Tensor:
    """Validate a bitmask for logits of a shape (..., V); return it with all of its bits.

    Tokens beyond its end have the bit 0. (1, W) or one row per row of the logits.
    """
    if not isinstance(bitmask, Tensor) or bitmask.dtype != torch.int32:
        kind = bitmask.dtype if isinstance(bitmask, Tensor) else type(bitmask).__name__
        raise TypeError(f"bitmask must be a torch.int32 tensor; got {kind}")
    n_int32, rows = -(-shape[-1] // 32), shape[:-1].numel()
    if bitmask.dim() == 0 or bitmask.shape[-1] > n_int32:
        raise ValueError(
            f"bitmask must have shape (rows, {n_int32}) for logits {tuple(shape)}; "
            f"got {tuple(bitmask.shape)}"
        )
    flat = bitmask.reshape(-1, bitmask.shape[-1])
    if len(flat) not in (1, rows):
        raise ValueError(f"bitmask must have one row, or {rows}; got {len(flat)}")
    return torch.nn.functional.pad(flat, (0, n_int32 - flat.shape[1]))


def allowed_tokens(bitmask: Tensor, vocab: int) -> Tensor:
    """Return a bitmask (B, W) as booleans (B, V); tokens beyond its end are False."""
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    allowed = ((bitmask[:, :, None] >> bits) & 1).bool().reshape(len(bitmask), -1)
    if allowed.shape[1] < vocab:
        rest = allowed.new_zeros(len(allowed), vocab - allowed.shape[1])
        allowed = torch.cat([allowed, rest], 1)
    return allowed[:, :vocab]


def _masked(tile: Tensor, bitmask: Tensor) -> Tensor:
    return tile.masked_fill(~allowed_tokens(bitmask, tile.shape[1]), -math.inf)
