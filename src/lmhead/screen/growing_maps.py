"""The elementwise map between the linear layer and the logits, as the bounds need it.

Tokens are compared by z = map(x) in float64, and skipped by a bound on x. The map grows
with x, but float64 may make two different x into one z: far out tanh is 1, and then the lowest id
wins. So a token may be skipped only if its x is below the limit by more than such roundings.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmhead.sweep import Pointwise

_U = 2.0**-53


def grows(p: Pointwise) -> bool:
    """Return whether the map increases with x, by a slope that float64 can represent."""
    factors = [p.scale, p.outer] if p.bounded else [p.scale]
    shifts = [p.shift, p.outer_shift]
    return all(2.0**-100 < f < 2.0**100 for f in factors) and all(abs(s) < 1e30 for s in shifts)


def lowest_linear(p: Pointwise, z: Tensor) -> Tensor:
    """Return a limit t, (...): a token with a linear value below t has a logit below z.

    Args:
        p: the map; `grows(p)`.
        z: float64 logits, (...).
    """
    if p.is_identity:
        return z
    if not p.bounded:
        t = (z - p.shift) / p.scale
        # Two roundings here, two on either side of the comparison: wider gaps stay gaps.
        return t - 16 * _U * (t.abs() + abs(p.shift) / p.scale) - 2.0**-1000 / p.scale
    # tanh is taken to be right to 8 units in the last place; its argument is rounded twice.
    y = (z - p.outer_shift) / p.outer
    y = y - 64 * _U * (1 + abs(p.shift) + abs(p.outer_shift) / p.outer)
    argument = y.clamp(max=1 - 4 * _U).atanh()  # NaN below -1: nothing may be passed over
    t = (argument - p.shift) / p.scale
    t = t - 2.0**-40 * (t.abs() + (1 + abs(p.shift)) / p.scale)
    return torch.where(t.isnan(), -math.inf, t)


def logit_bounds(p: Pointwise, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Convert bounds on x, in float64, to bounds on z, in float64."""
    if p.is_identity:
        return lower, upper
    lower, upper = p(lower), p(upper)
    size = abs(p.outer) + abs(p.outer_shift) if p.bounded else abs(p.shift)
    slack = 64 * _U * (1 + abs(p.shift)) if p.bounded else 8 * _U
    return (
        lower - slack * (lower.abs().nan_to_num(posinf=0.0) + size) - 2.0**-900,
        upper + slack * (upper.abs().nan_to_num(posinf=0.0) + size) + 2.0**-900,
    )
