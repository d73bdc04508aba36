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
from functools import cached_property

import torch
from torch import Tensor

PAD = 64
DEFECT = 2.0**-36
"""‖RᵀR - I‖ is at most this."""
_MAX_FACTOR = 128  # with this, a computed R x errs by less than 2^-40 ‖x‖


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
        """Return a rotation of vectors of this size.

        >>> [len(f) for f in Rotation.of(576).factors], Rotation.of(1).padded
        ([64, 9], 64)
        """
        padded = -(-size // PAD) * PAD
        while max(_factor_sizes(padded)) > _MAX_FACTOR:  # a large prime
            padded += PAD
        random = torch.Generator().manual_seed(seed)
        signs = torch.randint(2, (padded,), generator=random, dtype=torch.int8) * 2 - 1
        return cls(signs, tuple(_orthogonal(n) for n in _factor_sizes(padded)))

    def __post_init__(self) -> None:
        sizes = [len(f) for f in self.factors]
        if math.prod(sizes) != self.padded or max(sizes) > _MAX_FACTOR:
            raise ValueError(f"factors must multiply to {self.padded}; got {sizes}")
        # ‖A ⊗ B‖ = ‖A‖ ‖B‖, so the defects of the factors add up. Those computed here are off by
        # less than 2^-39 each.
        defect = sum(
            float((f.T @ f - torch.eye(len(f), dtype=f.dtype)).abs().sum(0).max())
            for f in self.factors
        )
        if not 4 * defect < DEFECT:
            raise ValueError(f"factors must be orthogonal; they are off by {defect:.2g}")

    @property
    def padded(self) -> int:
        """The number of coordinates after the map."""
        return len(self.signs)

    @cached_property
    def joined(self) -> Tensor:
        """The entries of all factors, one after the other."""
        return torch.cat([f.reshape(-1) for f in self.factors])

    def __call__(self, x: Tensor) -> Tensor:
        """Return R x for every row of x, (N, size) in float64: (N, padded)."""
        rows = x.shape[0]
        x = torch.nn.functional.pad(x, (0, self.padded - x.shape[1])) * self.signs
        for factor in self.factors:
            x = x.view(rows, self.padded // len(factor), len(factor)) @ factor.T
            x = x.transpose(1, 2).reshape(rows, self.padded)
        return x


def _factor_sizes(n: int) -> list[int]:
    """Return sizes that multiply to n: powers of two up to 64 (or one of 128), then odd ones."""
    sizes = []
    power = n & -n
    odd = n // power
    while power > 1:
        sizes.append(power if power <= 128 else 64)
        power //= sizes[-1]
    while odd > 1:
        fitting = (d for d in range(_MAX_FACTOR, 1, -1) if odd % d == 0)
        sizes.append(next(fitting, odd))
        odd //= sizes[-1]
    return sizes


def _orthogonal(n: int) -> Tensor:
    """Return Hadamard's matrix for a power of two, else Hartley's; over √n."""
    if n & (n - 1) == 0:
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < n:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    else:
        k = torch.arange(n)
        angle = (k[:, None] * k % n).double() * (2 * math.pi / n)
        matrix = angle.cos() + angle.sin()
    return matrix / math.sqrt(n)
