"""The distribution on its way through the stages: all words at first, few after the first cut.

Whole   the logits of every word, (B, V), and a temperature that has not been applied yet
Few     the words that are left, best first, (B, K), rows filled up with -inf

A stage takes one of them and returns one of them. `Few` is small, in float64, and sorted: the
definitions of the stages can be written down as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lmhead.sampling import rows


@dataclass(frozen=True)
class Few:
    """Words in descending order of their logits, lowest id first among equals.

    Attributes:
        ids: (B, K); meaningless where the logit is -inf.
        z: (B, K) in float64, temperature applied.
    """

    ids: Tensor
    z: Tensor

    @classmethod
    def sort(cls, ids: Tensor, z: Tensor) -> Few:
        """From words in the order of their ids."""
        z, order = z.sort(dim=1, descending=True, stable=True)
        return cls(ids.gather(1, order), z)

    @property
    def top(self) -> Tensor:
        """The largest logit, (B,)."""
        return self.z[:, 0]

    @cached_property
    def n(self) -> Tensor:
        """How many words are left, (B,), float64."""
        return (self.z > -math.inf).sum(1).double()

    @cached_property
    def lse(self) -> Tensor:
        """Log Σ exp z, (B,)."""
        return self.z.logsumexp(1)

    @property
    def entropy(self) -> Tensor:
        """In nats, (B,)."""
        log_p = self.z - self.lse[:, None]
        return -torch.where(log_p > -math.inf, log_p.exp() * log_p, 0.0).sum(1)

    @property
    def deviation(self) -> Tensor:
        """The standard deviation of the logits, (B,)."""
        far = torch.where(self.z > -math.inf, self.z - self.top[:, None], 0.0)
        return _deviation(self.n, far.sum(1), (far * far).sum(1))

    def keep(self, mask: Tensor) -> Few:
        """The words of a mask (B, K), in the same order."""
        mask = mask & (self.z > -math.inf)
        counts = mask.sum(1)
        width = rows.widest(counts)
        z = self.z.masked_fill(~mask, -math.inf)
        if _are_first(mask[:, :width], counts):
            return Few(self.ids[:, :width], z[:, :width])
        # Words that stay come first, in their order: a stable sort of the mask.
        order = (~mask).to(torch.int8).argsort(dim=1, stable=True)[:, :width]
        return Few(self.ids.gather(1, order), z.gather(1, order))

    def scaled(self, beta: Tensor) -> Few:
        """At another temperature: beta (B,) is its inverse."""
        return Few(self.ids, self.z * beta[:, None])

    def widen(self, vocab: int) -> Whole:
        """All words again, those that were cut at -inf."""
        z = torch.full((len(self.z), vocab), -math.inf, dtype=torch.float64, device=self.z.device)
        real = self.z > -math.inf
        row = torch.arange(len(z), device=z.device)[:, None].expand_as(real)
        z[row[real], self.ids[real]] = self.z[real]
        return Whole.of(z)


@dataclass(frozen=True)
class Top(Few):
    """The best words of a distribution that has others, with the log of the mass of all.

    Attributes:
        total: (B,), log Σ exp z over all words.
    """

    total: Tensor

    @property
    def lse(self) -> Tensor:
        """Of all words, those that are not here included."""
        return self.total


@dataclass(frozen=True)
class Whole:
    """All words. What is asked of them costs a pass over the vocabulary, once.

    Attributes:
        z: (B, V), float32 or float64.
        beta: (B,), float64; the logits are beta · z.
        extent: of z, the largest entry and the number of words that are not masked, (B,) each.
        own: whether these are the model's own logits, at temperature 1.
        raw: those, where this is the same at another temperature: their mass is asked for in the
            end, and comes with this one's.
    """

    z: Tensor
    beta: Tensor
    extent: tuple[Tensor, Tensor]
    own: bool = False
    raw: Whole | None = None

    @classmethod
    def of(cls, z: Tensor, *, own: bool = False) -> Whole:
        """Logits (B, V), at temperature 1."""
        beta = torch.ones(len(z), dtype=torch.float64, device=z.device)
        return cls(z, beta, rows.top(z), own)

    @property
    def largest(self) -> Tensor:
        """The largest z, (B,)."""
        return self.extent[0]

    @property
    def top(self) -> Tensor:
        """The largest logit, (B,)."""
        return self.beta * self.largest

    @property
    def n(self) -> Tensor:
        """How many words are not masked, (B,), float64."""
        return self.extent[1]

    @cached_property
    def mass(self) -> tuple[Tensor, Tensor]:
        """Σ exp(x) and Σ x exp(x), x being the distance of a logit to the largest."""
        raw = self.raw
        if raw is None or "mass" in vars(raw):
            mine = rows.mass(self.z, self.beta[None], self.largest)
            return mine[0, 0], mine[1, 0]
        both = rows.mass(self.z, torch.stack([self.beta, raw.beta]), self.largest)
        vars(raw)["mass"] = both[0, 1], both[1, 1]
        return both[0, 0], both[1, 0]

    @cached_property
    def lse(self) -> Tensor:
        """Log Σ exp(beta · z), (B,)."""
        return self.top + self.mass[0].log()

    @property
    def entropy(self) -> Tensor:
        """In nats, (B,)."""
        total, weighted = self.mass
        return total.log() - weighted / total

    @cached_property
    def deviation(self) -> Tensor:
        """The standard deviation of the logits, (B,)."""
        return self.beta * _deviation(self.n, *rows.moments(self.z, self.largest))

    def scaled(self, beta: Tensor) -> Whole:
        """At another temperature: beta (B,) is its inverse."""
        raw = self if self.own else self.raw
        return Whole(self.z, self.beta * beta, self.extent, raw=raw)

    def applied(self) -> Tensor:
        """The logits with the temperature applied, (B, V): a copy, to be edited."""
        if bool((self.beta == 1).all()):
            return self.z.clone()
        return (self.z.double() * self.beta[:, None]).to(self.z.dtype)

    def within(self, lo: Tensor, hi: Tensor) -> Few:
        """The words with lo <= z <= hi, in units of z: (B,) each."""
        return Few(*rows.band(self.z, self.beta, lo, hi))

    def above(self, lo: Tensor) -> Few:
        """The words with z >= lo."""
        return self.within(lo, torch.full_like(lo, math.inf))

    def kth(self, k: Tensor) -> Tensor:
        """The k-th largest z: (B,) to (B,), -inf where there are fewer words."""
        return rows.kth_largest(self.z, k)

    def nearest(self, centre: Tensor, share: Tensor, least: int) -> Few | None:
        """The words nearest to `centre` until they hold a share of the mass; None if not so soon.

        A word stays if those nearer have less than the share, or are fewer than `least`.
        """
        found = rows.nucleus(self.z, self.beta, self.largest, centre, self.mass[0] * share, least)
        return None if found is None else Few(*found)

    def around(self, centre: Tensor, share: Tensor) -> Few:
        """The words nearest to `centre` (in units of z) that hold a share of the mass, and a few
        more: (B,) each.

        In a distribution with a peak, words far from it do not count: a near band is tried first.
        """
        # Words that are beyond the limit by rounding alone must be in.
        limit = self.mass[0] * (share + _ROUNDING)
        near = _NEAR / self.beta
        few = self.within(centre - near, centre + near)
        if bool(((few.z - self.top[:, None]).exp().sum(1) >= limit).all()):
            return few
        radius = rows.reach(self.z, self.beta, self.largest, centre, limit)
        radius += _ROUNDING * (1 + centre.abs())
        return self.within(centre - radius, centre + radius)


# More than all rounding errors of a sum of probabilities.
_ROUNDING = 1e-9
# Of the band that is tried first, in units of the logits: e^-6 of the best word and more.
_NEAR = 6.0


def _are_first(mask: Tensor, counts: Tensor) -> bool:
    """Whether those of a mask (B, K), so many in each row, come before all others."""
    if len(mask) == 1:
        return bool(mask.all())
    return torch.equal(mask, torch.arange(mask.shape[1], device=mask.device) < counts[:, None])


def _deviation(n: Tensor, shift: Tensor, square: Tensor) -> Tensor:
    mean = shift / n
    return (square / n - mean * mean).clamp(min=0).sqrt()


Distribution = Whole | Few
