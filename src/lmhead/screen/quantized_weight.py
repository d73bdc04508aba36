"""The quantized copy of a weight, and how far each of its rows is off.

A row w is stored as   μ + Pᵀ c + Rᵀ (s q), with an error:

    μ  a row of means, float64          P  a few leading directions (K, D), float64
    c  K entries of 16 bits, one scale  R  a rotation
    q  D entries of 8 bits, one scale   s  that scale, float32

Two numbers per row bound the error, both rounded up: `e` = ‖R r - s q‖ with r = w - μ - Pᵀ c,
the error of the eight bits; and `n`, an upper bound of everything that the small errors are
multiplied with (docs/certified.md).

With bits "4+4" the eight bits lie in two planes, the high nibbles of all rows and the low ones, and
`e_high` is the error of the high nibbles alone.

A few directions carry most of the energy of hidden states, and much of the error would be along
them. The proof holds for any directions; better ones leave fewer tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lmhead.sweep import kernels

PAD = 64
DEFECT = 2.0**-36
"""‖RᵀR - I‖ is at most this."""
_MAX_FACTOR = 128  # with this, a computed R x errs by less than 2^-40 ‖x‖


@dataclass(frozen=True)
class Rotation:
    """An orthogonal map that spreads every coordinate over all, so that none dominates a row.

    x is padded with zeros to a multiple of 64, its signs are flipped at random, and it is
    multiplied by a Kronecker product of small orthogonal matrices: Hadamard's for powers of two,
    Hartley's for the odd rest. All entries of the product have the size 1/√D, so a row with one
    huge entry becomes a row of entries of similar size, which eight bits represent well. The map
    need not be orthogonal to the last bit: `DEFECT` is part of the proof.

    R: (size,) to (padded,), up to the order of coordinates the same in both directions.

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


Bits = Literal[8, "4+4"]
BLOCK = 256
"""Tokens per block, as in native/screen.hpp."""
TINY = 2.0**-120
"""Smaller scales are taken as zero: a machine may flush such float32 numbers to zero."""
KAPPA = 2.0**14
"""n bounds ‖P (w - μ) - c‖ times this: the rounding to 16 bits."""
SHARE = 2.0**-12
"""n bounds ‖w‖ + ‖μ‖ times this: the rounding of float64 steps."""


class CopyArrays(NamedTuple):
    """NumPy arrays on the memory of a copy's tensors."""

    whole: Any
    high: Any
    low: Any
    lead: Any
    scales: Any
    lead_scales: Any
    first_e: Any
    e: Any
    n: Any
    block_e: Any
    block_n: Any
    mean: Any
    basis: Any
    signs: Any
    factors: Any


@dataclass(frozen=True)
class QuantizedWeight:
    """The copy. V tokens, D entries, padded to D' by the rotation; K leading directions."""

    bits: Bits
    mean: Tensor  # (D,) float64
    basis: Tensor  # (K, D) float64
    rotation: Rotation
    whole: Tensor | None  # (V, D') int8
    high: Tensor | None  # (V, D'/2) uint8
    low: Tensor | None  # (V, D'/2) uint8
    lead: Tensor  # (V, K) int16
    scales: Tensor  # (V,) float32
    lead_scales: Tensor  # (V,) float32
    e: Tensor  # (V,) float32
    e_high: Tensor | None  # (V,) float32
    n: Tensor  # (V,) float32
    norm: float  # the largest ‖q‖, at least 16 √D'
    lead_norm: float  # the largest ‖c / scale‖, at least 1
    block_e: Tensor = field(init=False)  # (blocks,) of the first pass
    block_n: Tensor = field(init=False)
    n_max: float = field(init=False)
    mean_norm: float = field(init=False)  # ‖μ‖, or a little more

    def __post_init__(self) -> None:
        eye = torch.eye(len(self.basis), dtype=torch.float64)
        if not torch.allclose(self.basis @ self.basis.T, eye, rtol=0, atol=2.0**-30):
            raise ValueError("basis must hold orthonormal directions")
        if any(len(t) != self.vocab for t in self._per_token() if t is not None):
            raise ValueError("there must be one row per token")
        for name, values in (("block_e", self.first_e), ("block_n", self.n)):
            object.__setattr__(self, name, block_largest(values))
        object.__setattr__(self, "n_max", float(self.n.max()))
        object.__setattr__(self, "mean_norm", float(self.mean.norm()) * (1 + 2.0**-30))

    def _per_token(self) -> tuple[Tensor | None, ...]:
        codes = (self.whole, self.high, self.low, self.lead)
        return (*codes, self.lead_scales, self.e, self.e_high, self.n)

    @property
    def vocab(self) -> int:
        """V."""
        return len(self.scales)

    @property
    def size(self) -> int:
        """D."""
        return len(self.mean)

    @property
    def width(self) -> int:
        """D', the entries of a row after the rotation."""
        return self.rotation.padded

    @property
    def first_e(self) -> Tensor:
        """The error of the first pass: of all eight bits, or of the high nibbles."""
        return self.e if self.e_high is None else self.e_high

    @property
    def nbytes(self) -> int:
        """Memory of the copy."""
        return sum(t.nbytes for t in self.tensors().values())

    @property
    def pass_bytes(self) -> int:
        """What one pass over all tokens reads."""
        codes = next(c for c in (self.whole, self.high) if c is not None)
        return codes.nbytes + self.lead.nbytes + self.scales.nbytes + self.lead_scales.nbytes

    @cached_property
    def arrays(self) -> CopyArrays:
        """The tensors as the compiled core takes them, checked once."""
        given = (self.whole, self.high, self.low)
        codes = (None if t is None else kernels.views(t)[0] for t in given)
        rest = (self.lead, self.scales, self.lead_scales, self.first_e, self.e, self.n)
        prepare = (self.mean, self.basis, self.rotation.signs, self.rotation.joined)
        return CopyArrays(*codes, *kernels.views(*rest, self.block_e, self.block_n, *prepare))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "arrays"}

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of a file, by name."""
        named = {
            "mean": self.mean,
            "basis": self.basis,
            "signs": self.rotation.signs,
            **{f"factor.{i}": f for i, f in enumerate(self.rotation.factors)},
            "whole": self.whole,
            "high": self.high,
            "low": self.low,
            "lead": self.lead,
            "scales": self.scales,
            "lead_scales": self.lead_scales,
            "e": self.e,
            "e_high": self.e_high,
            "n": self.n,
            "norms": torch.tensor([self.norm, self.lead_norm], dtype=torch.float64),
        }
        return {name: t for name, t in named.items() if t is not None}

    @classmethod
    def from_tensors(cls, bits: Bits, t: dict[str, Tensor]) -> QuantizedWeight:
        """Make a copy from the result of `tensors`."""
        factors = tuple(t[f"factor.{i}"] for i in range(sum(n.startswith("factor.") for n in t)))
        norm, lead_norm = t["norms"].tolist()
        planes: tuple[str, ...] = ("whole",) if bits == 8 else ("high", "low", "e_high")
        names = ("mean", "basis", "lead", "scales", "lead_scales", "e", "n", *planes)
        kept: dict[str, Tensor | None] = dict.fromkeys(("whole", "high", "low", "e_high"))
        kept |= {name: t[name] for name in names}
        rotation = Rotation(t["signs"], factors)
        return cls(bits=bits, rotation=rotation, norm=norm, lead_norm=lead_norm, **kept)  # type: ignore[arg-type]


def block_largest(values: Tensor) -> Tensor:
    """Return the largest of each block of tokens: (V,) or (rows, V) gives (..., blocks)."""
    missing = -values.shape[-1] % BLOCK
    padded = torch.nn.functional.pad(values, (0, missing), value=-math.inf)
    return padded.view(*values.shape[:-1], -1, BLOCK).amax(-1)


def pack(entries: Tensor) -> Tensor:
    """Pack entries from 0 to 15, (V, D'), two to a byte as in native/screen.hpp: (V, D'/2)."""
    groups = entries.to(torch.uint8).view(len(entries), -1, 4, PAD // 4)
    pairs = groups[:, :, 0::2] | groups[:, :, 1::2] << 4  # (V, groups, 2, 16)
    return pairs.transpose(2, 3).reshape(len(entries), -1)


def unpack(packed: Tensor) -> Tensor:
    """Unpack two to a byte, (V, D'/2), to entries from 0 to 15 as uint8, (V, D')."""
    pairs = packed.view(len(packed), -1, PAD // 4, 2).transpose(2, 3)
    groups = torch.stack([pairs & 15, pairs >> 4], 3)  # (V, groups, 2, 2, 16)
    return groups.reshape(len(packed), -1)
