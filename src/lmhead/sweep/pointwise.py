"""The elementwise map between the linear layer and the logits: scale, shift, soft-capping.

    x = hidden @ weight.T + bias          the linear layer
    z = map(x)                            the logits

The map is affine, or affine - tanh - affine. That covers what models do (a scale, a temperature,
soft-capping) and composes: `(logits / 30).tanh() * 30 / temperature` is one map.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pointwise:
    """z = scale · x + shift, or z = outer · tanh(scale · x + shift) + outer_shift if `bounded`.

    A masked token (x = -inf) remains masked under tanh.

    >>> Pointwise.of(softcap=30.0, scale=0.5)(torch.tensor([0.0, 1000.0, -math.inf]))
    tensor([ 0., 30., -inf])
    """

    scale: float = 1.0
    shift: float = 0.0
    bounded: bool = False
    outer: float = 1.0
    outer_shift: float = 0.0

    @classmethod
    def of(cls, *, softcap: float | None = None, scale: float = 1.0) -> Pointwise:
        """Return the map of a head: z = softcap · tanh(scale · x / softcap), or scale · x."""
        if softcap is None:
            return cls(scale=scale)
        return cls(scale=scale / softcap, bounded=True, outer=softcap)

    @property
    def is_identity(self) -> bool:
        """Whether z = x."""
        return self == Pointwise()

    @property
    def lipschitz(self) -> float:
        """The largest |dz/dx|."""
        return abs(self.scale * self.outer)

    def times(self, factor: float) -> Pointwise:
        """Return the map followed by a multiplication."""
        if self.bounded and factor == 0.0:
            return Pointwise(scale=0.0)
        if self.bounded:
            return replace(self, outer=self.outer * factor, outer_shift=self.outer_shift * factor)
        return replace(self, scale=self.scale * factor, shift=self.shift * factor)

    def plus(self, term: float) -> Pointwise:
        """Return the map followed by an addition."""
        if self.bounded:
            return replace(self, outer_shift=self.outer_shift + term)
        return replace(self, shift=self.shift + term)

    def tanh(self) -> Pointwise | None:
        """Return the map followed by tanh, or None: a map can hold one tanh only."""
        return None if self.bounded else replace(self, bounded=True)

    def __call__(self, x: Tensor) -> Tensor:
        """Return z for x, as a new tensor, differentiable."""
        if self.is_identity:
            return x
        z = x * self.scale + self.shift
        if self.bounded:
            z = (self.outer * z.tanh() + self.outer_shift).masked_fill(x == -math.inf, -math.inf)
        return z

    def apply_(self, x: Tensor) -> Tensor:
        """Compute z from x in place. With soft-capping it needs one mask of x's shape."""
        if self.is_identity:
            return x
        masked = x == -math.inf if self.bounded else None
        if self.scale != 1.0:
            x.mul_(self.scale)
        if self.shift != 0.0:
            x.add_(self.shift)
        if masked is not None:
            x.tanh_().mul_(self.outer)
            if self.outer_shift != 0.0:
                x.add_(self.outer_shift)
            x.masked_fill_(masked, -math.inf)
        return x

    def slope(self, z: Tensor, out: Tensor) -> Tensor:
        """Compute dz/dx of a bounded map from z into `out`; 0 for masked tokens."""
        torch.sub(z, self.outer_shift, out=out)
        # 1 - tanh², with tanh = (z - outer_shift) / outer; -inf gives 0.
        out.div_(self.outer).square_().neg_().add_(1.0).clamp_(min=0.0)
        return out.mul_(self.scale * self.outer)
