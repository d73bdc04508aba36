"""The distribution on its way through the stages: all words at first, few after the first cut.

Whole   the logits of every word, (B, V), and a temperature that has not been applied yet
Few     the words that are left, best first, (B, K), rows filled up with -inf

A stage takes one of them and returns one of them. `Few` is small, in float64, and sorted: the
definitions of the stages can be written down as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from lmhead.sampling import rows
from lmhead.sampling.rows import Sums


class Norm(NamedTuple):
    """What a cut wants to know of the distribution it is made on, (B,) each, in float64."""

    lse: Tensor  # log Σ exp z
    entropy: Tensor  # in nats
    top: Tensor  # the largest logit
    deviation: Tensor  # of the logits
    n: Tensor  # how many words


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

    @cached_property
    def norm(self) -> Norm:
        """Of the words that are left."""
        s = rows.sums(self.z, torch.ones(len(self.z), dtype=torch.float64, device=self.z.device))
        return Norm(s.max + s.mass.log(), s.entropy, s.max, s.deviation, s.n)

    @property
    def counts(self) -> Tensor:
        """How many words are left, (B,)."""
        return (self.z > -math.inf).sum(1)

    def keep(self, mask: Tensor) -> Few:
        """The words of a mask (B, K), in the same order."""
        mask = mask & (self.z > -math.inf)
        width = rows.widest(mask.sum(1))
        # Words that stay come first, in their order: a stable sort of the mask.
        order = (~mask).to(torch.int8).argsort(dim=1, stable=True)[:, :width]
        z = self.z.masked_fill(~mask, -math.inf).gather(1, order)
        return Few(self.ids.gather(1, order), z)

    def scaled(self, beta: Tensor) -> Few:
        """At another temperature: beta (B,) is its inverse."""
        return replace(self, z=self.z * beta[:, None])

    def widen(self, vocab: int) -> Whole:
        """All words again, those that were cut at -inf."""
        z = torch.full((len(self.z), vocab), -math.inf, dtype=torch.float64, device=self.z.device)
        real = self.z > -math.inf
        row = torch.arange(len(z), device=z.device)[:, None].expand_as(real)
        z[row[real], self.ids[real]] = self.z[real]
        return Whole(z, torch.ones(len(z), dtype=torch.float64, device=z.device))


@dataclass(frozen=True)
class Whole:
    """All words.

    Attributes:
        z: (B, V), float32 or float64.
        beta: (B,), float64; the logits are beta · z.
    """

    z: Tensor
    beta: Tensor

    @cached_property
    def sums(self) -> Sums:
        """What the rows add up to."""
        return rows.sums(self.z, self.beta)

    @cached_property
    def norm(self) -> Norm:
        """Of beta · z."""
        s = self.sums
        top = self.beta * s.max
        return Norm(top + s.mass.log(), s.entropy, top, self.beta * s.deviation, s.n)

    def scaled(self, beta: Tensor) -> Whole:
        """At another temperature: beta (B,) is its inverse."""
        return replace(self, beta=self.beta * beta)

    def applied(self) -> Tensor:
        """The logits with the temperature applied, (B, V): a copy, to be edited."""
        if bool((self.beta == 1).all()):
            return self.z.clone()
        return (self.z.double() * self.beta[:, None]).to(self.z.dtype)

    def within(self, lo: Tensor, hi: Tensor) -> Few:
        """The words with lo <= z <= hi, in units of z: (B,) each."""
        ids, z = rows.band(self.z, lo, hi)
        return Few.sort(ids, z * self.beta[:, None])

    def above(self, lo: Tensor) -> Few:
        """The words with z >= lo."""
        return self.within(lo, torch.full_like(lo, math.inf))

    def largest(self, k: Tensor) -> Tensor:
        """A bound that at least k words reach, and few others: (B,) to (B,), -inf where V <= k."""
        s = self.sums
        spread = (s.max - s.mean) * self.beta
        width = torch.where(spread > 0, spread / 1024, 1.0)
        radius = rows.reach(self.z, self.beta, s.max, s.max, width, k.double(), count=True)
        return s.max - radius

    def heaviest(self, centre: Tensor, share: Tensor) -> Tensor:
        """The radius around `centre` (units of z) that holds a share of the mass: (B,)."""
        s = self.sums
        # The words beyond the limit by rounding alone must be in.
        limit = s.mass * (share + 1e-9)
        width = torch.full_like(centre, 1 / 64)
        return rows.reach(self.z, self.beta, s.max, centre, width, limit)


Distribution = Whole | Few
