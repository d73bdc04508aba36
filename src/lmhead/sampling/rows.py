"""What sampling asks of whole rows of logits, (B, V): in the compiled core, or as torch operations.

Only these functions look at every word. They find the few that matter, so that nothing else need be
of the size of the vocabulary, and nothing of that size is sorted.

β = 1 / temperature; the mass of a word is exp(β (z - max z)), in float64.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from lmhead.sampling.noise import gumbel
from lmhead.sweep import native


class Sums(NamedTuple):
    """What a row adds up to, (B,) each, in float64; masked words (-inf) count nowhere.

    `max`, `shift` and `square` are of z; `mass` and `weighted` of β z.
    """

    max: Tensor
    mass: Tensor  # Σ exp(β (z - max))
    weighted: Tensor  # Σ exp(β (z - max)) β (z - max)
    n: Tensor
    shift: Tensor  # Σ (z - max)
    square: Tensor  # Σ (z - max)²

    @property
    def mean(self) -> Tensor:
        """Of the words that are not masked."""
        return self.max + self.shift / self.n

    @property
    def deviation(self) -> Tensor:
        """The standard deviation of the words that are not masked."""
        mean = self.shift / self.n
        return (self.square / self.n - mean * mean).clamp(min=0).sqrt()

    @property
    def entropy(self) -> Tensor:
        """Of softmax(β z), in nats."""
        return self.mass.log() - self.weighted / self.mass


def sums(z: Tensor, beta: Tensor) -> Sums:
    """Add up rows: z (B, V), beta (B,)."""
    core = _core(z)
    if core is not None:
        out = torch.empty(z.shape[0], 6, dtype=torch.float64)
        core.row_sums(z, beta, out, native.threads())
        return Sums(*out.unbind(1))
    z = z.double()
    top = z.amax(1)
    masked = z == -math.inf
    far = torch.where(masked, 0.0, z - top[:, None])
    scaled = far * beta[:, None]
    e = scaled.exp().masked_fill(masked, 0.0)
    count = (~masked).sum(1).double()
    return Sums(top, e.sum(1), (e * scaled).sum(1), count, far.sum(1), (far * far).sum(1))


def reach(
    z: Tensor,
    beta: Tensor,
    top: Tensor,
    centre: Tensor,
    width: Tensor,
    limit: Tensor,
    *,
    count: bool = False,
) -> Tensor:
    """How far from `centre` one must go so that the words within have `limit` of mass together.

    A radius in units of z, (B,), a little too large rather than too small; inf where all words
    together have less. `count` counts words instead. `width` is the step of the search in units of
    β z.
    """
    core = _core(z)
    if core is not None:
        radius = torch.empty_like(beta)
        given = (t.contiguous() for t in (beta, top, centre, width, limit))
        core.row_reach(z, *given, count, radius, native.threads())
        return radius
    z = z.double()
    distance = (z - centre[:, None]).abs().masked_fill(z == -math.inf, math.inf)
    nearest, order = distance.sort(1)
    mass = ((z - top[:, None]) * beta[:, None]).exp().gather(1, order)
    total = (nearest < math.inf).double().cumsum(1) if count else mass.cumsum(1)
    place = (total < limit[:, None]).sum(1, keepdim=True)
    found = nearest.gather(1, place.clamp(max=z.shape[1] - 1))
    return torch.where(place < z.shape[1], found * (1 + 1e-9), math.inf)[:, 0]


def band(z: Tensor, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """The words with lo <= z <= hi: ids (B, K) and logits (B, K) in float64.

    In the order of ids; rows with fewer than K are filled up with word 0 at -inf.
    """
    core = _core(z)
    if core is not None:
        # Rounded outwards: none may be lost.
        lo32 = torch.nextafter(lo.float(), torch.tensor(-math.inf))
        hi32 = torch.nextafter(hi.float(), torch.tensor(math.inf))
        counts = torch.empty(z.shape[0], dtype=torch.int64)
        core.row_band_count(z, lo32, hi32, counts, native.threads())
        ids = torch.zeros(z.shape[0], widest(counts), dtype=torch.int64)
        values = torch.full(ids.shape, -math.inf)
        core.row_band_fill(z, lo32, hi32, ids, values, native.threads())
        return ids, values.double()
    inside = (z.double() >= lo[:, None]) & (z.double() <= hi[:, None]) & (z > -math.inf)
    counts = inside.sum(1)
    ids = torch.zeros(z.shape[0], widest(counts), dtype=torch.int64, device=z.device)
    values = torch.full(ids.shape, -math.inf, dtype=torch.float64, device=z.device)
    row, word = inside.nonzero(as_tuple=True)
    place = torch.arange(len(row), device=z.device) - (counts.cumsum(0) - counts)[row]
    ids[row, place] = word
    values[row, place] = z[row, word].double()
    return ids, values


def race(z: Tensor, beta: Tensor, keys: Tensor) -> Tensor:
    """The word with the largest β z + noise: a draw from softmax(β z). (B,)."""
    core = _core(z)
    if core is not None:
        winners = torch.empty(z.shape[0], dtype=torch.int64)
        core.row_race(z, beta, keys, winners, native.threads())
        return winners
    winners = torch.empty(z.shape[0], dtype=torch.int64, device=z.device)
    ids = torch.arange(z.shape[1], device=z.device)[None]
    for i in range(z.shape[0]):  # a row at a time: the noise is as long as the vocabulary
        score = z[i].double() * beta[i] + gumbel(keys[i : i + 1], ids)[0]
        winners[i] = score.argmax()
    return winners


def widest(counts: Tensor) -> int:
    """At least 1, so that a row has a largest entry even if it is -inf."""
    return max(1, int(counts.max())) if len(counts) else 1


def _core(z: Tensor) -> ModuleType | None:
    fits = z.dtype == torch.float32 and z.device.type == "cpu" and z.is_contiguous()
    return native.core if fits and z.shape[1] > 0 else None
