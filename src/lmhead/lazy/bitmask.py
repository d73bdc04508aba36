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
    if not isinstance(bitmask, Tensor) or bitmask.dtype != torch.int32:
        kind = bitmask.dtype if isinstance(bitmask, Tensor) else type(bitmask).__name__
        raise TypeError(f"bitmask must be a torch.int32 tensor; got {kind}")
    n_int32 = -(-logits.shape[-1] // 32)
    if bitmask.dim() == 0 or bitmask.shape[-1] > n_int32 or logits._vdim != logits.dim() - 1:
        raise ValueError(
            f"bitmask must have shape (rows, {n_int32}) for logits {tuple(logits.shape)}; "
            f"got {tuple(bitmask.shape)}"
        )
    lead = bitmask.shape[:-1]
    if lead.numel() not in (1, logits.lead.numel()):
        raise ValueError(f"bitmask must have one row, or {logits.lead.numel()}; got {lead.numel()}")
    flat = bitmask.reshape(-1, bitmask.shape[-1])
    # What no row allows is masked in the head itself, which then need not read it.
    anywhere = allowed_tokens(flat, logits.shape[-1]).any(0)
    common: LazyLogits = logits.masked_fill(~anywhere, -math.inf)  # type: ignore[assignment]
    if len(flat) == 1:
        return common
    mask = Operand.of(flat, torch.Size((logits.lead.numel(),)))
    node = common.part
    masked = call(_masked, (node, mask), {}, node.n_rows, node.width)
    return derived(logits, masked, logits.shape, logits.dtype)


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
