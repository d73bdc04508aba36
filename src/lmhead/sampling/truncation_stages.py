"""Truncation stages: top-k, top-p, min-p and others.

`lmhead.reference` has a plain definition of each.

Every cut works on the distribution of the previous stage, and keeps at least one token.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lmhead.sampling.distribution import (
    FOR_COINS,
    Distribution,
    FullDistribution,
    TopCandidates,
    uniforms,
)
from lmhead.sampling.stage import Call, Cut, PerRow, Stage, per_row


def _ranks(candidates: TopCandidates) -> Tensor:
    """Return 0 for the best token of a row, 1 for the next one: (1, K)."""
    return torch.arange(candidates.z.shape[1], device=candidates.z.device)[None]


def _slack(lo: Tensor) -> Tensor:
    """Lower a bound by more than its rounding error."""
    return lo - 1e-9 * (1 + lo.abs().nan_to_num(posinf=0.0))


@dataclass(repr=False, eq=False)
class TopK(Cut):
    """Keep the k best tokens. Of ties for the last place the lowest ids are kept; `ties="keep"`
    keeps all of them, as Hugging Face and vLLM do.
    """

    name = "top_k"
    k: PerRow
    ties: str = field(default="lowest", kw_only=True)

    def wanted(self, call: Call) -> Tensor:
        """Return k of each row, (B,), as a float."""
        k = per_row(self.name, self.k, call)
        return torch.where(k > 0, k, call.vocab)

    def find_candidates(self, full: FullDistribution, call: Call) -> TopCandidates:
        """Return the tokens from the k-th largest logit upwards."""
        return full.above(full.kth(self.wanted(call)))

    def keep_mask(self, candidates: TopCandidates, before: Distribution, call: Call) -> Tensor:  # noqa: ARG002
        """Keep the first k."""
        k = self.wanted(call)[:, None]
        if self.ties == "lowest":
            return _ranks(candidates) < k
        last = (k - 1).clamp(max=candidates.z.shape[1] - 1).long()
        return candidates.z >= candidates.z.gather(1, last)


@dataclass(repr=False, eq=False)
class _WithMinimum(Cut):
    """A cut with a minimum number of tokens."""

    min_tokens_to_keep: int = field(default=1, kw_only=True)

    def _above(self, full: FullDistribution, lo: Tensor) -> TopCandidates:
        """Return the tokens above a bound (in units of z), or the minimum number of tokens."""
        bound = full.largest
        if self.min_tokens_to_keep > 1:
            bound = full.kth(torch.full_like(lo, self.min_tokens_to_keep))
        return full.above(torch.minimum(_slack(lo), bound))

    def _with_minimum(self, kept: Tensor) -> Tensor:
        kept[:, : self.min_tokens_to_keep] = True
        return kept


class _NearestMass(_WithMinimum):
    """A cut that keeps the tokens nearest to some logit until they hold a share of the mass."""

    @abstractmethod
    def share(self, call: Call) -> Tensor:
        """Return the share of each row, (B,)."""

    @abstractmethod
    def centre(self, full: FullDistribution) -> Tensor:
        """Return the logit of each row, (B,), in units of z."""

    def find_kept(self, full: FullDistribution, call: Call) -> TopCandidates | None:
        """Search among the tokens near the centre; not if a row keeps all tokens."""
        share = self.share(call)
        if max(share.tolist(), default=0.0) >= 1:
            return None
        return full.nearest(self.centre(full), share, self.min_tokens_to_keep)

    def find_candidates(self, full: FullDistribution, call: Call) -> TopCandidates:
        """Return the tokens around the centre that hold the share; all, if that is too few."""
        share = self.share(call)
        if not bool((share >= 1).any()):
            candidates = full.around(self.centre(full), share)
            if bool((candidates.n >= self.min_tokens_to_keep).all()):
                return candidates
        return full.above(torch.full_like(share, -math.inf))


@dataclass(repr=False, eq=False)
class TopP(_NearestMass):
    """Nucleus: keep the best tokens until their probabilities reach p. A token is kept if those
    before it have less than p together.
    """

    name = "top_p"
    p: PerRow

    def share(self, call: Call) -> Tensor:
        """Return p."""
        return per_row(self.name, self.p, call)

    def centre(self, full: FullDistribution) -> Tensor:
        """Return the largest logit."""
        return full.largest

    def keep_mask(self, candidates: TopCandidates, before: Distribution, call: Call) -> Tensor:
        """Keep a token if the mass before it is below p; p = 1 keeps all."""
        p = self.share(call)[:, None]
        mass = (candidates.z - before.lse[:, None]).exp()
        return self._with_minimum(mass.cumsum(1) - mass < torch.where(p < 1, p, math.inf))


@dataclass(repr=False, eq=False)
class MinP(_WithMinimum):
    """Keep the tokens with p >= min_p · (largest p)."""

    name = "min_p"
    min_p: PerRow

    def find_candidates(self, full: FullDistribution, call: Call) -> TopCandidates:
        """Return the tokens above a bound that needs the largest logit only."""
        min_p = per_row(self.name, self.min_p, call)
        return self._above(full, full.largest + min_p.log() / full.beta)

    def keep_mask(self, candidates: TopCandidates, before: Distribution, call: Call) -> Tensor:
        """Compare with the probability of the best token."""
        min_p = per_row(self.name, self.min_p, call)[:, None]
        return self._with_minimum((candidates.z - before.top[:, None]).exp() >= min_p)


@dataclass(repr=False, eq=False)
class Typical(_NearestMass):
    """Keep the tokens whose surprisal -log p is nearest to the entropy, until they reach `mass`."""

    name = "typical_p"
    keeps_argmax = False
    mass: PerRow

    def share(self, call: Call) -> Tensor:
        """Return the mass."""
        return per_row(self.name, self.mass, call)

    def centre(self, full: FullDistribution) -> Tensor:
        """Return the logit of log p = -entropy."""
        return (full.lse - full.entropy) / full.beta

    def keep_mask(self, candidates: TopCandidates, before: Distribution, call: Call) -> Tensor:
        """Keep the nearest tokens, including the one that reaches the mass."""
        limit = self.share(call)[:, None]
        log_p = candidates.z - before.lse[:, None]
        distance = (-log_p - before.entropy[:, None]).abs()  # inf for padding
        order = distance.argsort(dim=1, stable=True)
        mass = log_p.exp().gather(1, order)
        kept = self._with_minimum((mass.cumsum(1) - mass < limit) | (limit >= 1))
        return torch.zeros_like(kept).scatter_(1, order, kept)


@dataclass(repr=False, eq=False)
class Epsilon(_WithMinimum):
    """Keep the tokens with p >= epsilon."""

    name = "epsilon_cutoff"
    epsilon: PerRow

    def _least(self, before: Distribution, call: Call) -> Tensor:  # noqa: ARG002
        """Return the least probability that is kept, (B,)."""
        return per_row(self.name, self.epsilon, call)

    def find_candidates(self, full: FullDistribution, call: Call) -> TopCandidates:
        """Return the tokens with log p >= log epsilon."""
        return self._above(full, (full.lse + self._least(full, call).log()) / full.beta)

    def keep_mask(self, candidates: TopCandidates, before: Distribution, call: Call) -> Tensor:
        """Compare probabilities."""
        p = (candidates.z - before.lse[:, None]).exp()
        return self._with_minimum(p >= self._least(before, call)[:, None])


class Eta(Epsilon):
    """Keep the tokens with p >= min(epsilon, sqrt(epsilon) · exp(-entropy))."""

    name = "eta_cutoff"

    def _least(self, before: Distribution, call: Call) -> Tensor:
        epsilon = super()._least(before, call)
        return torch.minimum(epsilon, epsilon.sqrt() * (-before.entropy).exp())


@dataclass(repr=False, eq=False)
class TopNSigma(Cut):
    """Keep the tokens with z >= max z - n · (standard deviation of z); all if n <= 0."""

    name = "top_n_sigma"
    n: PerRow

    def _least(self, before: Distribution, call: Call) -> Tensor:
        n = per_row(self.name, self.n, call)
        return torch.where(n > 0, before.top - n * before.deviation, -math.inf)

    def find_candidates(self, full: FullDistribution, call: Call) -> TopCandidates:
        """Return the tokens with at least the least logit."""
        return full.above(_slack(self._least(full, call) / full.beta))

    def keep_mask(self, candidates: TopCandidates, before: Distribution, call: Call) -> Tensor:
        """Compare logits."""
        return candidates.z >= self._least(before, call)[:, None]


@dataclass(repr=False, eq=False)
class TopH(Cut):
    """Of the 100 best tokens, keep the first ones whose entropies -p log p add up to at most top_h
    of the entropy of the 100.
    """

    name = "top_h"
    CONSIDERED = 100
    top_h: PerRow

    def find_candidates(self, full: FullDistribution, call: Call) -> TopCandidates:  # noqa: ARG002
        """Return the tokens from the 100th largest logit upwards."""
        return full.above(full.kth(torch.full_like(full.beta, self.CONSIDERED)))

    def keep_mask(self, candidates: TopCandidates, before: Distribution, call: Call) -> Tensor:  # noqa: ARG002
        """Keep tokens while the sum of entropies, their own included, is at most the share."""
        share = per_row(self.name, self.top_h, call)[:, None]
        best = candidates.z[:, : self.CONSIDERED]
        log_p = best.log_softmax(1)
        terms = torch.where(best > -math.inf, -log_p.exp() * log_p, 0.0)
        # With a share of 1 all are kept, although rounding may exceed the sum before the last one.
        kept = (terms.cumsum(1) <= share * terms.sum(1, keepdim=True)) | (share >= 1)
        kept &= log_p.exp() > 0
        kept[:, :1] = True
        rest = torch.zeros_like(candidates.z[:, self.CONSIDERED :], dtype=torch.bool)
        return torch.cat([kept, rest], 1)


@dataclass(repr=False, eq=False)
class XTC(Stage):
    """Exclude top choices: with some probability, remove every token with p >= threshold but
    the least probable of them.
    """

    name = "xtc_probability"
    probability: PerRow
    threshold: PerRow = 0.1
    min_tokens_to_keep: int = field(default=1, kw_only=True)

    def __call__(self, distribution: Distribution, call: Call) -> Distribution:
        """Draw a random number per row, from its seed and position."""
        keys = call.keys
        coin = uniforms(keys, torch.zeros(len(keys), 1, dtype=torch.int64), FOR_COINS)[:, 0]
        active = coin < per_row(self.name, self.probability, call)
        threshold = per_row("xtc_threshold", self.threshold, call)
        threshold = torch.where(active & (threshold <= 0.5), threshold, math.inf)
        least = distribution.lse + threshold.log()
        if isinstance(distribution, TopCandidates):
            return distribution.keep(~self._removed(distribution, least, distribution.n))
        candidates = distribution.above(_slack(least / distribution.beta))
        removed = self._removed(candidates, least, distribution.n)
        z = distribution.scaled_logits()
        row = torch.arange(len(z), device=z.device)[:, None].expand_as(removed)
        z[row[removed], candidates.ids[removed]] = -math.inf
        return FullDistribution.of(z)

    def _removed(self, candidates: TopCandidates, least: Tensor, remaining: Tensor) -> Tensor:
        """Return every likely token but the last, if enough tokens remain."""
        likely = (candidates.z >= least[:, None]) & (candidates.z > -math.inf)
        count = likely.sum(1, keepdim=True)
        enough = remaining[:, None] - (count - 1) >= self.min_tokens_to_keep
        return likely & (_ranks(candidates) < count - 1) & enough
