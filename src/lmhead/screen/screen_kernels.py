"""The steps over all tokens: in the compiled core where there is one, else as torch operations.

Integer products are the same either way, bit for bit: in the core because every partial sum fits
into 32 bits, here because float64 represents them exactly.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lmhead.screen import memory_reading
from lmhead.screen.quantized_weight import BLOCK, QuantizedWeight, block_largest, unpack
from lmhead.screen.states import States
from lmhead.sweep import kernels

SLACK = 2.0**-22
"""Rounding of an approximate logit to float32 and of its bound, relative to it."""
FLOOR = 2.0**-120
"""The same where float32 numbers get too small to be rounded relative to themselves."""
_ROOM = 1024  # ids per row that are expected at most


class Approximation(NamedTuple):
    """Approximate logits without the base."""

    approx: Tensor  # (B, V) float32; -inf for tokens that were not read
    block_top: Tensor  # (B, blocks), the largest of each block
    tokens_read: int


def products(
    copy: QuantizedWeight, states: States, bias: Tensor | None, allowed: Tensor | None = None
) -> Approximation:
    """Multiply the copy (of "4+4" the high nibbles) by B hidden states; bias (V,) in float64.

    `allowed` (B, ceil(V / 32)) int32 has a bit per token. A token that no row allows, or whose bias
    is -inf, is not read.
    """
    rows = len(states.main)
    approx = torch.empty(rows, copy.vocab)
    if kernels.core is not None:
        if rows == 1 and copy.pass_bytes > memory_reading.LARGE:
            memory_reading.choose()
        top = torch.empty(rows, -(-copy.vocab // BLOCK))
        given = copy.arrays
        read = kernels.core.screen_products(
            *(given.whole, given.high, given.lead, given.scales, given.lead_scales),
            bias,
            *kernels.arrays(states.main, states.lead, states.scales, states.lead_scales),
            allowed,
            *kernels.arrays(approx, top),
            kernels.threads(),
        )
        return Approximation(approx, top, read)
    main, lead = states.main.double().T, states.lead.double().T
    for lo in range(0, copy.vocab, 4096):
        some = slice(lo, lo + 4096)
        if copy.high is not None:
            whole = 16.0 * (unpack(copy.high[some]).double() @ main) - 120.5 * main.sum(0)
        elif copy.whole is not None:
            whole = copy.whole[some].double() @ main
        a = copy.scales[some, None].double() * states.scales * whole
        if len(copy.basis):
            steps = copy.lead_scales[some, None].double() * states.lead_scales
            a += steps * (copy.lead[some].double() @ lead)
        if bias is not None:
            a += bias[some, None]
        approx[:, some] = a.T
    read = copy.vocab
    if allowed is not None:
        bits = torch.arange(32, dtype=torch.int32)
        needed = (allowed[:, :, None] >> bits & 1).flatten(1)[:, : copy.vocab].any(0)
        approx.masked_fill_(~needed, -math.inf)
        read = int(needed.sum())
    return Approximation(approx, block_largest(approx), read)


def refine(
    copy: QuantizedWeight, states: States, approx: Tensor, rows: Tensor, ids: Tensor
) -> Tensor:
    """Return approx at (rows, ids) with all eight bits, and its error.

    Shapes: (M,) and (M,) give (2, M) in float64.
    """
    if kernels.core is not None:
        values = torch.empty(2, len(ids), dtype=torch.float64)
        kernels.core.screen_refine(
            copy.low,
            copy.scales,
            states.main,
            states.scales,
            approx,
            *(copy.e, copy.n, states.e, states.n),
            *(rows, ids, values),
            kernels.threads(),
        )
        return values
    first = approx[rows, ids].double()
    both = first.clone()
    for lo in range(0, len(rows), 4096):
        if copy.low is None:
            break
        some = slice(lo, lo + 4096)
        main = states.main[rows[some]].double()
        low = unpack(copy.low[ids[some]]).double() - 7.5
        steps = copy.scales[ids[some]].double() * states.scales[rows[some]]
        both[some] += steps * (low * main).sum(1)
    radius = states.e[rows] * copy.e[ids].double() + states.n[rows] * copy.n[ids].double()
    radius += (first.abs() + both.abs()).nan_to_num(posinf=0.0) * SLACK + FLOOR
    return torch.stack([both, radius])


def select(
    copy: QuantizedWeight, approx: Tensor, top: Tensor, e: Tensor, n: Tensor, limits: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the tokens whose upper bound, approx + e · e_v + n · n_v, reaches the limit.

    approx is (B, V) float32, top (B, blocks) the largest of each block; e, n and limits are (B,)
    float64. Returns how many of each row, (B,), and their ids, row after row, lowest first.
    """
    if kernels.core is None:
        return _select(copy, approx, e, n, limits)
    counts = torch.empty(len(top), dtype=torch.int64)
    given = (approx, top, copy.first_e, copy.n, copy.block_e, copy.block_n, e, n, limits, counts)
    room = _ROOM * len(top)
    while True:  # once, unless more tokens are kept than fit
        ids = torch.empty(room, dtype=torch.int64)
        total: int = kernels.core.screen_select(*given, ids, kernels.threads())
        if total <= room:
            return counts, ids[:total]
        room = total


def _select(
    copy: QuantizedWeight, approx: Tensor, e: Tensor, n: Tensor, limits: Tensor
) -> tuple[Tensor, Tensor]:
    counts, found = [], []
    for row, (row_e, row_n, limit) in enumerate(zip(e, n, limits, strict=True)):
        x = approx[row].double()
        radius = row_e * copy.first_e + row_n * copy.n + x.abs() * SLACK + FLOOR
        # A NaN is kept.
        kept = (~(x + torch.where(x == -math.inf, 0.0, radius) < limit)).nonzero()[:, 0]
        counts.append(len(kept))
        found.append(kept)
    return torch.tensor(counts), torch.cat(found)


def best(approx: Tensor, top: Tensor, k: int) -> Tensor:
    """Return some k tokens of each row with the largest approx, ids ascending: (B, k).

    approx is (B, V) float32, top (B, blocks) the largest of each block.
    """
    if kernels.core is None or k > top.shape[1]:
        return approx.topk(k, dim=1).indices.sort(dim=1).values
    ids = torch.empty(len(approx), k, dtype=torch.int64)
    kernels.core.screen_best(approx, top, ids, kernels.threads() if len(approx) > 1 else 1)
    return ids


def within(values: Tensor, base: Tensor, rows: Tensor, x: Tensor) -> bool:
    """Return whether each x is within the bounds of `refine`, the base of its row added.

    Shapes: values (2, M), base (B,), rows (M,), x (M,), in float64.
    """
    if kernels.core is not None:
        return bool(kernels.core.screen_within(values, base, rows, x))
    approx, radius = values
    base = base[rows]
    slack = 2.0**-48 * (x.abs() + base.abs())
    off = ~((x - base - approx).abs() <= radius + slack) & (x != approx)
    return not bool(off.any())
