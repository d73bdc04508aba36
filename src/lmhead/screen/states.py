"""Hidden states as whole numbers, for products with the copy, and how far those are off.

    h = Pᵀ g + h⊥        g = lead_scale · lead, 16 bits along the leading directions
    R h⊥ = scale · main + δ       16 bits each; ‖δ‖ is known

Scales are such that every partial sum of a product with the copy fits into 32 bits: by
Cauchy-Schwarz it is at most ‖q‖ ‖main‖, and the largest ‖q‖ is known. So whole-number products are
exact, in any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lmhead.screen.copy import KAPPA, SHARE, Copy
from lmhead.screen.rotation import DEFECT

_UP = 1 + 2.0**-30
_INT32 = 2.0**31 - 1


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
    def of(cls, copy: Copy, hidden: Tensor, size: Tensor | None = None) -> States:
        """From hidden states (B, D), all of which `usable` lets through; `size` are their norms."""
        h = hidden.double()
        size = sizes(hidden) if size is None else size
        coefficients = h @ copy.basis.T
        lead, lead_scales = _round(coefficients, copy.lead_norm)
        g = lead * lead_scales[:, None]
        rest = h - g @ copy.basis
        y = copy.rotation(rest)
        main, scales = _round(y, copy.norm)
        delta = sizes(y - main * scales[:, None])
        # Rounding of float64 in sums of D terms, relative to (‖w‖ + ‖μ‖) ‖h‖.
        tau = 4 * (copy.width + len(copy.basis) + 64) * 2.0**-53
        small = (2.0**-36 + DEFECT + tau / SHARE) * size
        along = sizes(rest @ copy.basis.T)
        return cls(
            main=main.to(torch.int16),
            lead=lead.to(torch.int16),
            scales=scales,
            lead_scales=lead_scales,
            base=h @ copy.mean,
            e=(sizes(y) + 2.0**-36 * size) * _UP,
            n=(sizes(g) / KAPPA + along + delta + small) * _UP,
        )

    def row(self, index: int) -> States:
        """One of them."""
        return States(*(getattr(self, f.name)[index : index + 1] for f in fields(self)))


def sizes(x: Tensor) -> Tensor:
    """‖x‖ of each row (B, D): (B,) in float64."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
    return norms


def usable(copy: Copy, size: Tensor) -> Tensor:
    """Which hidden states are finite, and small enough that no step overflows: (B,)."""
    return size * max(copy.n_max, 1.0) < 1e30


def _round(x: Tensor, norm: float) -> tuple[Tensor, Tensor]:
    """16-bit numbers (as float64) whose products with codes of this norm fit into 32 bits, and one
    scale per row.
    """
    if x.shape[1] == 0:
        return x, x.new_zeros(len(x))
    room = _INT32 / norm - math.sqrt(x.shape[1])
    scales = torch.maximum(x.abs().amax(1) / 32767, sizes(x) / room * _UP)
    step = scales[:, None]
    codes = torch.where(step > 0, x / step, 0.0).round_().clamp_(-32767, 32767)
    return codes, scales
