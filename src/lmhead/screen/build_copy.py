"""Make the quantized copy of a weight: in the compiled core, or as torch operations.

`quantized_weight` has the definition, docs/certified.md the proof. Both ways give the same copy up
to the last bits of float64 steps, which the bounds cover.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lmhead.screen import huge_pages
from lmhead.screen.quantized_weight import (
    BLOCK,
    KAPPA,
    SHARE,
    TINY,
    Bits,
    QuantizedWeight,
    Rotation,
    pack,
)
from lmhead.sweep import kernels

OnRows = Callable[[int, int], None]
"""Called with the number of rows done and of all rows."""

LEADING = 32
"""Directions kept at 16 bits."""
_UP = 1 + 2.0**-36
_STEPS = 6  # of subspace iteration
_LOST = 2.0**-38  # what float64 loses on the way to u, relative to ‖w‖ + ‖μ‖
_NOT_FINITE = "weight must be finite; it holds a NaN or an infinity"
_CORE_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def mean_row(weight: Tensor) -> Tensor:
    """Return the mean of rows (V, D), (D,) in float64: softmax is invariant to it."""
    total = torch.zeros(weight.shape[1], dtype=torch.float64)
    core = kernels.core_with("column_sums")
    if core is not None and weight.dtype in _CORE_TYPES and kernels.readable(weight):
        core.column_sums(weight.contiguous(), total, kernels.threads())
        return total / len(weight)
    for lo in range(0, len(weight), 4096):
        total += weight[lo : lo + 4096].double().sum(0)
    return total / len(weight)


def leading_directions(rows: Tensor, k: int, *, most: int = 4096) -> Tensor:
    """Return K orthonormal directions that carry most of the energy of the rows: (K, D).

    Subspace iteration on a sample. The proof holds for any directions; better ones prune more.
    """
    size = rows.shape[-1]
    if k == 0:
        return torch.zeros(0, size, dtype=torch.float64)
    rows = rows.reshape(-1, size)
    rows = rows[:: max(1, len(rows) // most)].float()
    rows = rows / rows.abs().max().clamp(min=2.0**-120)
    random = torch.Generator().manual_seed(0)
    span = torch.randn(size, min(size, k + 16), generator=random)
    for _ in range(_STEPS):
        span = torch.linalg.qr(rows.T @ (rows @ span) + 1e-6 * span)[0]
    span = torch.linalg.qr(span.double())[0]
    along = rows @ span.float()
    _, vectors = torch.linalg.eigh((along.T @ along).double())  # by ascending eigenvalue
    directions: Tensor = (span @ vectors.flip(1)[:, :k]).T
    return directions.contiguous()


@torch.no_grad()
def build(
    weight: Tensor,
    *,
    bits: Bits = 8,
    calibration: Tensor | None = None,
    leading: int | None = None,
    progress: OnRows | None = None,
) -> QuantizedWeight:
    """Quantize a weight (V, D), block by block.

    Args:
        weight: (V, D), finite.
        bits: 8, or "4+4" for two planes of nibbles.
        calibration: hidden states (..., D); the directions that carry most of their energy are kept
            at 16 bits. Without them, those of the rows of the weight.
        leading: how many directions, a multiple of 16; None for 32, fewer for small D.
        progress: called with the rows done and all rows.
    """
    vocab, size = weight.shape
    rotation = Rotation.of(size)
    if leading is None:
        leading = min(LEADING, size // 4 // 16 * 16)
    mean = mean_row(weight)
    basis = leading_directions(weight if calibration is None else calibration, leading)
    rows = max(BLOCK, (1 << 22) // rotation.padded)
    width = rotation.padded if bits == 8 else rotation.padded // 2
    codes = huge_pages.empty(1 if bits == 8 else 2, vocab, width, dtype=torch.int8)
    lead = torch.empty(vocab, leading, dtype=torch.int16)
    numbers = torch.empty(5, vocab)
    norms = [16 * math.sqrt(rotation.padded), 1.0]
    core = kernels.core_with("quantize_rows")
    in_core = core is not None and weight.dtype in _CORE_TYPES and leading % 8 == 0
    for lo in range(0, vocab, rows):
        some = slice(lo, min(lo + rows, vocab))
        quantize = _quantize_in_core if in_core else _quantize
        block = quantize(weight[some], mean, basis, rotation)
        lead[some], numbers[:, some] = block.lead, block.numbers
        if bits == 8:
            codes[0, some] = block.codes
        else:
            # q = 16 (high - 8) + low
            codes.view(torch.uint8)[0, some] = pack((block.codes >> 4) + 8)
            codes.view(torch.uint8)[1, some] = pack(block.codes & 15)
        norms = [max(norms[0], block.norm), max(norms[1], block.lead_norm)]
        if progress is not None:
            progress(some.stop, vocab)
    planes = codes.view(torch.uint8)
    scales, lead_scales, e, e_high, n = numbers
    return QuantizedWeight(
        bits=bits,
        mean=mean,
        basis=basis,
        rotation=rotation,
        whole=codes[0] if bits == 8 else None,
        high=None if bits == 8 else planes[0],
        low=None if bits == 8 else planes[1],
        lead=lead,
        scales=scales,
        lead_scales=lead_scales,
        e=e,
        e_high=None if bits == 8 else e_high,
        n=n,
        norm=norms[0],
        lead_norm=norms[1],
    )


class _Block(NamedTuple):
    """Some rows of the copy."""

    codes: Tensor  # (rows, D')
    lead: Tensor  # (rows, K)
    numbers: Tensor  # (5, rows): scales, lead_scales, e, e_high, n
    norm: float
    lead_norm: float


def _quantize_in_core(w: Tensor, mean: Tensor, basis: Tensor, rotation: Rotation) -> _Block:
    """Quantize some rows of the weight, (rows, D), in the compiled core."""
    codes = torch.empty(len(w), rotation.padded, dtype=torch.int8)
    lead = torch.empty(len(w), len(basis), dtype=torch.int16)
    numbers = torch.empty(5, len(w))
    norm, lead_norm = kernels.compiled().quantize_rows(
        *(w.contiguous(), mean, basis, rotation.signs, rotation.joined),
        [len(f) for f in rotation.factors],
        float(mean.norm()),
        (KAPPA, SHARE, _LOST, _UP, TINY),
        *(codes, lead, numbers, kernels.threads()),
    )
    if math.isnan(norm):
        raise ValueError(_NOT_FINITE)
    return _Block(codes, lead, numbers, norm, lead_norm)


def _quantize(w: Tensor, mean: Tensor, basis: Tensor, rotation: Rotation) -> _Block:
    """Quantize some rows of the weight, (rows, D), by torch operations."""
    w = w.double()
    if not bool(w.isfinite().all()):
        raise ValueError(_NOT_FINITE)
    centred = w - mean
    coefficients = centred @ basis.T
    lead, lead_scales = _round(coefficients, 32767)
    c = lead * lead_scales.double()[:, None]
    r = centred - c @ basis
    u = rotation(r)
    codes, scales = _round(u, 127)
    step = scales.double()[:, None]
    size = w.norm(dim=1) + mean.norm()
    lost = _LOST * size
    e = (u - codes * step).norm(dim=1) * _UP + lost
    middle = (codes / 16).floor() * 16 + 7.5
    e_high = (u - middle * step).norm(dim=1) * _UP + lost
    n = torch.stack(
        [
            (codes * step).norm(dim=1),
            c.norm(dim=1),
            r.norm(dim=1),
            (coefficients - c).norm(dim=1) * KAPPA,
            SHARE * size,
        ]
    ).amax(0)
    n = n * _UP + lost
    return _Block(
        codes=codes.to(torch.int8),
        lead=lead.to(torch.int16),
        numbers=torch.stack([scales, lead_scales, *map(round_up, (e, e_high, n))]),
        norm=float(codes.norm(dim=1).max()) * _UP,
        lead_norm=float(lead.norm(dim=1).max()) * _UP if lead.shape[1] else 1.0,
    )


def _round(x: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return integers up to `largest` (as float64), and one float32 scale per row."""
    if x.shape[1] == 0:
        return x, torch.zeros(len(x))
    scales = (x.abs().amax(1) / largest).float()
    scales = torch.where((scales >= TINY) & scales.isfinite(), scales, 0.0)
    step = scales.double()[:, None]
    codes = torch.where(step > 0, x / step, 0.0).round_().clamp_(-largest, largest)
    return codes, scales


def round_up(x: Tensor) -> Tensor:
    """Round float64 to the next float32 above, at least `TINY`."""
    up = torch.nextafter(x.float(), torch.tensor(math.inf))
    return up.clamp_(min=TINY)
