"""Hidden states as integers, for products with the copy, and their rounding errors.

    h = Pᵀ g + h⊥        g = lead_scale · lead, 16 bits along the leading directions
    R h⊥ = scale · main + δ       16 bits each (8 in a batch: multiples of 256); ‖δ‖ is known

Scales are such that every partial sum of a product with the copy fits into 32 bits: by
Cauchy-Schwarz it is at most ‖q‖ ‖main‖, and the largest ‖q‖ is known. So integer products are
exact, in any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lmhead.screen.quantized_weight import DEFECT, KAPPA, SHARE, QuantizedWeight
from lmhead.sweep import kernels

STATES_PER_PASS = 64  # hidden states multiplied in one pass over the copy
# In a batch `main` has its high bytes only: half the products, and an error of the size of the
# copy's. With one state memory is the limit, so the other half costs nothing.
_UNIT_OF_BATCH = 256
_UP = 1 + 2.0**-30
_INT32 = 2.0**31 - 1
_SMALL_E = 2.0**-36


@dataclass(frozen=True)
class States:
    """B hidden states. A logit's linear part is base + approx, off by at most e · e_v + n · n_v."""

    main: Tensor  # (B, D') int16
    lead: Tensor  # (B, K) int16
    scales: Tensor  # (B,) float64
    lead_scales: Tensor  # (B,) float64
    base: Tensor  # (B,) float64, μ · h
    e: Tensor  # (B,) float64
    n: Tensor  # (B,) float64

    @classmethod
    def of(cls, copy: QuantizedWeight, hidden: Tensor) -> States:
        """Convert hidden states (B, D), all of them `usable`."""
        unit = 1 if len(hidden) == 1 else _UNIT_OF_BATCH
        h = hidden.double().resolve_neg()
        # Rounding of float64 in sums of D terms, relative to (‖w‖ + ‖μ‖) ‖h‖.
        tau = 4 * (copy.width + len(copy.basis) + 64) * 2.0**-53
        small_n = 2.0**-36 + DEFECT + tau / SHARE
        room = _INT32 / copy.norm - unit * math.sqrt(copy.width)
        lead_room = _INT32 / copy.lead_norm - math.sqrt(len(copy.basis))
        if kernels.core is not None:
            rows = len(h)
            main = torch.empty(rows, copy.width, dtype=torch.int16)
            lead = torch.empty(rows, len(copy.basis), dtype=torch.int16)
            numbers = torch.empty(5, rows, dtype=torch.float64)
            given = copy.arrays
            kernels.core.screen_prepare(
                *(given.mean, given.basis, given.signs, given.factors),
                [len(f) for f in copy.rotation.factors],
                (unit, room, lead_room, 1 / KAPPA, _SMALL_E, small_n),
                *kernels.arrays(h, main, lead, numbers),
                kernels.threads() if rows > 1 else 1,
            )
            return cls(main, lead, *numbers.unbind())
        codes, lead_scales = _round(h @ copy.basis.T, lead_room, 1)
        g = codes * lead_scales[:, None]
        rest = h - g @ copy.basis
        y = copy.rotation(rest)
        whole, scales = _round(y, room, unit)
        delta, along = _norms(y - whole * scales[:, None]), _norms(rest @ copy.basis.T)
        return cls(
            main=whole.to(torch.int16),
            lead=codes.to(torch.int16),
            scales=scales,
            lead_scales=lead_scales,
            base=h @ copy.mean,
            e=(_norms(y) + _SMALL_E * _norms(h)) * _UP,
            n=(_norms(g) / KAPPA + along + delta + small_n * _norms(h)) * _UP,
        )

    def row(self, index: int) -> States:
        """Return one of the rows."""
        return States(*(getattr(self, f.name)[index : index + 1] for f in fields(self)))


def _norms(x: Tensor) -> Tensor:
    """Return ‖x‖ of each row (B, D): (B,) in float64."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
    return norms


def usable(copy: QuantizedWeight, hidden: Tensor) -> Tensor:
    """Return which hidden states (B, D) are finite and cannot overflow: (B,)."""
    return _norms(hidden) * max(copy.n_max, 1.0) < 1e30


def _round(x: Tensor, room: float, unit: int) -> tuple[Tensor, Tensor]:
    """Return 16-bit numbers (as float64), multiples of `unit`, and one scale per row."""
    if x.shape[1] == 0:
        return x, x.new_zeros(len(x))
    most = 32767 // unit
    scales = torch.maximum(x.abs().amax(1) / (most * unit), _norms(x) / room * _UP)
    step = scales[:, None] * unit
    codes = torch.where(step > 0, x / step, 0.0).round_().clamp_(-most, most)
    return codes * unit, scales
