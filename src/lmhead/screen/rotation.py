"""An orthogonal map that spreads every coordinate over all, so that none dominates a row.

x is padded with zeros to a multiple of 64, its signs are flipped at random, and it is multiplied by
a Kronecker product of small orthogonal matrices: Hadamard's for powers of two, Hartley's for the
odd rest. All entries of the product are of the size 1/√D, so a row with one huge column becomes a
row of even ones, which eight bits hold well.

The map need not be orthogonal to the last bit. `DEFECT` bounds ‖RᵀR - I‖, and is part of the proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PAD = 64
DEFECT = 2.0**-40
"""‖RᵀR - I‖ is at most this; so is the error of a computed R x, relative to ‖x‖."""
_MAX_FACTOR = 128


@dataclass(frozen=True)
class Rotation:
    """R: (size,) to (padded,), up to the order of coordinates the same in both directions.

    Attributes:
        signs: (padded,) of ±1, int8.
        factors: square float64 matrices whose sizes multiply to `padded`.
    """

    signs: Tensor
    factors: tuple[Tensor, ...]

    @classmethod
    def of(cls, size: int, *, seed: int = 0) -> Rotation:
        """A rotation of vectors of this size.

        >>> [len(f) for f in Rotation.of(576).factors], Rotation.of(1).padded
        ([64, 9], 64)
        """
        padded = -(-size // PAD) * PAD
        random = torch.Generator().manual_seed(seed)
        signs = torch.randint(2, (padded,), generator=random, dtype=torch.int8) * 2 - 1
        return cls(signs, tuple(_orthogonal(n) for n in _factor_sizes(padded)))

    def __post_init__(self) -> None:
        assert math.prod(len(f) for f in self.factors) == self.padded
        # ‖A ⊗ B‖ = ‖A‖ ‖B‖, so the defects of the factors add up (to first order).
        defect = sum(
            float((f.T @ f - torch.eye(len(f), dtype=f.dtype)).abs().sum(0).max())
            for f in self.factors
        )
        assert 2 * defect < DEFECT, f"the factors are off by {defect}"

    @property
    def padded(self) -> int:
        """The number of coordinates after the map."""
        return len(self.signs)

    def __call__(self, x: Tensor) -> Tensor:
        """R x for every row of x, (N, size) in float64, gives (N, padded)."""
        rows = x.shape[0]
        x = torch.nn.functional.pad(x, (0, self.padded - x.shape[1])) * self.signs
        for factor in self.factors:
            x = x.view(rows, self.padded // len(factor), len(factor)) @ factor.T
            x = x.transpose(1, 2).reshape(rows, self.padded)
        return x


def _factor_sizes(n: int) -> list[int]:
    """Sizes, powers of two first, none above 128 unless it is prime."""
    odd = n
    power = 1
    while odd % 2 == 0:
        odd, power = odd // 2, power * 2
    sizes = []
    while power > 1:
        part = min(power, 64 if power != 128 else 128)
        sizes.append(part)
        power //= part
    while odd > 1:
        part = max((d for d in range(1, _MAX_FACTOR + 1) if odd % d == 0), default=1)
        part = part if part > 1 else _smallest_divisor(odd)
        sizes.append(part)
        odd //= part
    return sizes


def _smallest_divisor(n: int) -> int:
    return next((d for d in range(3, math.isqrt(n) + 1, 2) if n % d == 0), n)


def _orthogonal(n: int) -> Tensor:
    """Hadamard's matrix for a power of two, else Hartley's, cos + sin of 2π jk / n; over √n."""
    if n & (n - 1) == 0:
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < n:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    else:
        k = torch.arange(n)
        angle = (k[:, None] * k % n).double() * (2 * math.pi / n)
        matrix = angle.cos() + angle.sin()
    return matrix / math.sqrt(n)
