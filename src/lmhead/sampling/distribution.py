"""Distributions between stages: all tokens at first, candidates after the first cut.

FullDistribution  the logits of every token, (B, V), and a temperature to apply
TopCandidates     the tokens that are left, best first, (B, K), rows padded with -inf

A stage takes one of them and returns one of them. `TopCandidates` is small, in float64, and
sorted, so that the definitions of the stages can be used directly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lmhead.sampling import row_kernels


@dataclass(frozen=True)
class TopCandidates:
    """Tokens in descending order of their logits, lowest id first among equals.

    Attributes:
        ids: (B, K); meaningless where the logit is -inf.
        z: (B, K) in float64, temperature applied.
    """

    ids: Tensor
    z: Tensor

    @classmethod
    def sort(cls, ids: Tensor, z: Tensor) -> TopCandidates:
        """Sort tokens that are given in the order of their ids."""
        z, order = z.sort(dim=1, descending=True, stable=True)
        return cls(ids.gather(1, order), z)

    @property
    def top(self) -> Tensor:
        """The largest logit, (B,)."""
        return self.z[:, 0]

    @cached_property
    def n(self) -> Tensor:
        """How many tokens are left, (B,), float64."""
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

    def keep(self, mask: Tensor) -> TopCandidates:
        """Return the tokens of a mask (B, K), in the same order."""
        mask = mask & (self.z > -math.inf)
        counts = mask.sum(1)
        width = row_kernels.widest(counts)
        z = self.z.masked_fill(~mask, -math.inf)
        if _are_first(mask[:, :width], counts):
            return TopCandidates(self.ids[:, :width], z[:, :width])
        # Kept tokens come first, in their order: a stable sort of the mask.
        order = (~mask).to(torch.int8).argsort(dim=1, stable=True)[:, :width]
        return TopCandidates(self.ids.gather(1, order), z.gather(1, order))

    def scaled(self, beta: Tensor) -> TopCandidates:
        """Return this at another temperature; beta (B,) is its inverse."""
        return TopCandidates(self.ids, self.z * beta[:, None])

    def to_full(self, vocab: int) -> FullDistribution:
        """Return all tokens again, removed ones at -inf."""
        z = torch.full((len(self.z), vocab), -math.inf, dtype=torch.float64, device=self.z.device)
        real = self.z > -math.inf
        row = torch.arange(len(z), device=z.device)[:, None].expand_as(real)
        z[row[real], self.ids[real]] = self.z[real]
        return FullDistribution.of(z)


@dataclass(frozen=True)
class TopWithTotal(TopCandidates):
    """The best tokens of a distribution, with the log of the mass of all tokens.

    Attributes:
        total: (B,), log Σ exp z over all tokens.
    """

    total: Tensor

    @property
    def lse(self) -> Tensor:
        """Log Σ exp z over all tokens, (B,)."""
        return self.total


@dataclass(frozen=True)
class FullDistribution:
    """All tokens. Each property costs one pass over the vocabulary and is cached.

    Attributes:
        z: (B, V), float32 or float64.
        beta: (B,), float64; the logits are beta · z.
        extent: of z, the largest entry and the number of tokens that are not masked, (B,) each.
        own: whether these are the model's logits, at temperature 1.
        raw: the distribution at temperature 1, where this one is at another temperature; the
            masses of both are computed in one pass.
    """

    z: Tensor
    beta: Tensor
    extent: tuple[Tensor, Tensor]
    own: bool = False
    raw: FullDistribution | None = None

    @classmethod
    def of(cls, z: Tensor, *, own: bool = False) -> FullDistribution:
        """Return the distribution of logits (B, V), at temperature 1."""
        beta = torch.ones(len(z), dtype=torch.float64, device=z.device)
        return cls(z, beta, row_kernels.row_max(z), own)

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
        """How many tokens are not masked, (B,), float64."""
        return self.extent[1]

    @cached_property
    def mass(self) -> tuple[Tensor, Tensor]:
        """Σ exp(x) and Σ x exp(x), x being the distance of a logit to the largest."""
        raw = self.raw
        if raw is None or "mass" in vars(raw):
            mine = row_kernels.softmax_sums(self.z, self.beta[None], self.largest)
            return mine[0, 0], mine[1, 0]
        both = row_kernels.softmax_sums(self.z, torch.stack([self.beta, raw.beta]), self.largest)
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
        return self.beta * _deviation(self.n, *row_kernels.moments(self.z, self.largest))

    def scaled(self, beta: Tensor) -> FullDistribution:
        """Return this at another temperature; beta (B,) is its inverse."""
        raw = self if self.own else self.raw
        return FullDistribution(self.z, self.beta * beta, self.extent, raw=raw)

    def scaled_logits(self) -> Tensor:
        """Return a copy of the logits with the temperature applied, (B, V)."""
        if bool((self.beta == 1).all()):
            return self.z.clone()
        return (self.z.double() * self.beta[:, None]).to(self.z.dtype)

    def within(self, lo: Tensor, hi: Tensor) -> TopCandidates:
        """Return the tokens with lo <= z <= hi, in units of z: (B,) each."""
        return TopCandidates(*row_kernels.tokens_in_range(self.z, self.beta, lo, hi))

    def above(self, lo: Tensor) -> TopCandidates:
        """Return the tokens with z >= lo."""
        return self.within(lo, torch.full_like(lo, math.inf))

    def kth(self, k: Tensor) -> Tensor:
        """Return the k-th largest z: (B,) to (B,), -inf where there are fewer tokens."""
        return row_kernels.kth_largest(self.z, k)

    def nearest(self, centre: Tensor, share: Tensor, least: int) -> TopCandidates | None:
        """Return the tokens nearest to `centre` with a share of the mass; None if not found.

        A token is kept if those nearer have less than the share, or are fewer than `least`.
        """
        found = row_kernels.nucleus(
            self.z, self.beta, self.largest, centre, self.mass[0] * share, least
        )
        return None if found is None else TopCandidates(*found)

    def around(self, centre: Tensor, share: Tensor) -> TopCandidates:
        """Return the tokens nearest to `centre` that hold a share of the mass, and a few more.

        `centre` and `share` are (B,), the former in units of z.

        In a distribution with a peak, tokens far from it do not count: a near band is tried first.
        """
        # Include tokens that exceed the limit by rounding alone.
        limit = self.mass[0] * (share + _ROUNDING)
        near = _NEAR / self.beta
        candidates = self.within(centre - near, centre + near)
        if bool(((candidates.z - self.top[:, None]).exp().sum(1) >= limit).all()):
            return candidates
        radius = row_kernels.mass_radius(self.z, self.beta, self.largest, centre, limit)
        radius += _ROUNDING * (1 + centre.abs())
        return self.within(centre - radius, centre + radius)


# More than all rounding errors of a sum of probabilities.
_ROUNDING = 1e-9
# Half-width of the band that is tried first: tokens with e^-6 of the best probability.
_NEAR = 6.0


def _are_first(mask: Tensor, counts: Tensor) -> bool:
    """Return whether a mask (B, K) is True for the first counts[i] entries of each row i."""
    if len(mask) == 1:
        return bool(mask.all())
    return torch.equal(mask, torch.arange(mask.shape[1], device=mask.device) < counts[:, None])


def _deviation(n: Tensor, shift: Tensor, square: Tensor) -> Tensor:
    mean = shift / n
    return (square / n - mean * mean).clamp(min=0).sqrt()


Distribution = FullDistribution | TopCandidates
