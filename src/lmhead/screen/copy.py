"""The quantized copy of a weight, and how far each of its rows is off.

A row w becomes   μ + Pᵀ c + Rᵀ (s q)   plus what is lost:

    μ  a row of means, float64          P  a few leading directions (K, D), float64
    c  K entries of 16 bits, one scale  R  a rotation
    q  D entries of 8 bits, one scale   s  that scale, float32

Two numbers per row bound what is lost, both rounded up: `e` = ‖R r - s q‖ with r = w - μ - Pᵀ c,
the error of the eight bits; and `n`, an upper bound of everything that the small errors are
multiplied with (docs/certified.md).

With bits "4+4" the eight bits lie in two planes, the high nibbles of all rows and the low ones, and
`e_high` is the error of the high nibbles alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lmhead.screen.directions import leading_directions, mean_row
from lmhead.screen.rotation import PAD, Rotation

Bits = Literal[8, "4+4"]
Progress = Callable[[int, int], None]
"""Called with the number of rows done and of all rows."""

BLOCK = 256
"""Tokens per block, as in native/screen.hpp."""
LEADING = 32
"""Directions kept at 16 bits."""
TINY = 2.0**-120
"""Smaller scales are taken as zero: a machine may flush such float32 numbers to zero."""
KAPPA = 2.0**14
"""n bounds ‖P (w - μ) - c‖ times this: the rounding to 16 bits."""
SHARE = 2.0**-12
"""n bounds ‖w‖ + ‖μ‖ times this: the rounding of float64 steps."""
_UP = 1 + 2.0**-36


@dataclass(frozen=True)
class Copy:
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

    def __post_init__(self) -> None:
        eye = torch.eye(len(self.basis), dtype=torch.float64)
        if not torch.allclose(self.basis @ self.basis.T, eye, rtol=0, atol=2.0**-30):
            raise ValueError("basis must hold orthonormal directions")
        if any(len(t) != self.vocab for t in self._by_word() if t is not None):
            raise ValueError("there must be one row per token")
        for name, values in (("block_e", self.first_e), ("block_n", self.n)):
            object.__setattr__(self, name, block_largest(values))
        object.__setattr__(self, "n_max", float(self.n.max()))

    def _by_word(self) -> tuple[Tensor | None, ...]:
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
    def from_tensors(cls, bits: Bits, t: dict[str, Tensor]) -> Copy:
        """Make a copy from the result of `tensors`."""
        factors = tuple(t[f"factor.{i}"] for i in range(sum(n.startswith("factor.") for n in t)))
        norm, lead_norm = t["norms"].tolist()
        planes: tuple[str, ...] = ("whole",) if bits == 8 else ("high", "low", "e_high")
        names = ("mean", "basis", "lead", "scales", "lead_scales", "e", "n", *planes)
        kept: dict[str, Tensor | None] = dict.fromkeys(("whole", "high", "low", "e_high"))
        kept |= {name: t[name] for name in names}
        rotation = Rotation(t["signs"], factors)
        return cls(bits=bits, rotation=rotation, norm=norm, lead_norm=lead_norm, **kept)  # type: ignore[arg-type]


@torch.no_grad()
def build(
    weight: Tensor,
    *,
    bits: Bits = 8,
    calibration: Tensor | None = None,
    leading: int | None = None,
    progress: Progress | None = None,
) -> Copy:
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
    codes = torch.empty(1 if bits == 8 else 2, vocab, width, dtype=torch.int8)
    lead = torch.empty(vocab, leading, dtype=torch.int16)
    scales, lead_scales, e, e_high, n = torch.zeros(5, vocab)
    norms = [16 * math.sqrt(rotation.padded), 1.0]
    for lo in range(0, vocab, rows):
        some = slice(lo, min(lo + rows, vocab))
        w = weight[some].double()
        if not bool(w.isfinite().all()):
            raise ValueError("weight must be finite; it holds a NaN or an infinity")
        block = _quantize(w, mean, basis, rotation)
        lead[some], scales[some], lead_scales[some] = block.lead, block.scales, block.lead_scales
        e[some], e_high[some], n[some] = block.e, block.e_high, block.n
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
    return Copy(
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


@dataclass
class _Block:
    codes: Tensor
    lead: Tensor
    scales: Tensor
    lead_scales: Tensor
    e: Tensor
    e_high: Tensor
    n: Tensor
    norm: float
    lead_norm: float


def _quantize(w: Tensor, mean: Tensor, basis: Tensor, rotation: Rotation) -> _Block:
    """Quantize some rows of the weight, (rows, D) in float64."""
    centred = w - mean
    coefficients = centred @ basis.T
    lead, lead_scales = _round(coefficients, 32767)
    c = lead * lead_scales.double()[:, None]
    r = centred - c @ basis
    u = rotation(r)
    codes, scales = _round(u, 127)
    step = scales.double()[:, None]
    size = w.norm(dim=1) + mean.norm()
    # What float64 loses on the way to u is at most 2^-38 of the size.
    lost = 2.0**-38 * size
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
        scales=scales,
        lead_scales=lead_scales,
        e=round_up(e),
        e_high=round_up(e_high),
        n=round_up(n),
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
