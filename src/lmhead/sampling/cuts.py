"""Cuts: which words may be drawn at all. `lmhead.reference` has each as a plain definition.

Every cut works on the distribution that the stage before it left, and keeps the best word.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmhead.sampling.distribution import Distribution, Few, Norm, Whole
from lmhead.sampling.noise import FOR_COINS, uniforms
from lmhead.sampling.rows import reach
from lmhead.sampling.stage import Call, Cut, PerRow, Stage, per_row


def _upwards(lo: Tensor) -> tuple[Tensor, Tensor]:
    return lo, torch.full_like(lo, math.inf)


def _places(few: Few) -> Tensor:
    """0 for the best word of a row, 1 for the next one: (1, K)."""
    return torch.arange(few.z.shape[1], device=few.z.device)[None]


class TopK(Cut):
    """The k best words. Of words that tie for the last place the lowest ids stay; `ties="keep"`
    keeps them all, as Hugging Face and vLLM do.
    """

    name = "top_k"
    takes = "logits"

    def __init__(self, k: PerRow, *, ties: str = "lowest") -> None:
        self.k, self.ties = k, ties

    def _k(self, call: Call) -> Tensor:
        k = per_row(self.name, self.k, call)
        return torch.where(k > 0, k, math.inf)

    def span(self, whole: Whole, call: Call) -> tuple[Tensor, Tensor]:
        """From the k-th best logit upwards."""
        return _upwards(whole.largest(self._k(call)))

    def stays(self, few: Few, norm: Norm, call: Call) -> Tensor:  # noqa: ARG002
        """The first k."""
        k = self._k(call)[:, None]
        if self.ties == "lowest" or few.z.shape[1] == 0:
            return _places(few) < k
        last = (k - 1).clamp(max=few.z.shape[1] - 1).long()
        return few.z >= few.z.gather(1, last)


class _WithFloor(Cut):
    """A cut that keeps at least so many words."""

    def __init__(self, min_tokens_to_keep: int) -> None:
        self.min_tokens_to_keep = min_tokens_to_keep

    def _floor(self, whole: Whole, lo: Tensor) -> Tensor:
        """A bound lowered so that enough words are above it."""
        if self.min_tokens_to_keep <= 1:
            return torch.minimum(lo, whole.sums.max)
        return torch.minimum(lo, whole.largest(torch.full_like(lo, self.min_tokens_to_keep)))

    def _and_floor(self, few: Few, stays: Tensor) -> Tensor:
        return stays | (_places(few) < self.min_tokens_to_keep)


class TopP(_WithFloor):
    """Nucleus: the best words until their probabilities reach p. A word stays if those before it
    have less than p together.
    """

    name = "top_p"

    def __init__(self, p: PerRow, *, min_tokens_to_keep: int = 1) -> None:
        super().__init__(min_tokens_to_keep)
        self.p = p

    def span(self, whole: Whole, call: Call) -> tuple[Tensor, Tensor]:
        """The words around the best one that hold p of the mass."""
        p = per_row(self.name, self.p, call)
        lo = whole.sums.max - whole.heaviest(whole.sums.max, p)
        return _upwards(self._floor(whole, torch.where(p < 1, lo, -math.inf)))

    def stays(self, few: Few, norm: Norm, call: Call) -> Tensor:
        """Where the mass before is below p."""
        p = per_row(self.name, self.p, call)[:, None]
        mass = (few.z - norm.lse[:, None]).exp()
        before = mass.cumsum(1) - mass
        return self._and_floor(few, (before < p) | (p >= 1))


class MinP(_WithFloor):
    """The words with p >= min_p · (largest p)."""

    name = "min_p"

    def __init__(self, min_p: PerRow, *, min_tokens_to_keep: int = 1) -> None:
        super().__init__(min_tokens_to_keep)
        self.min_p = min_p

    def span(self, whole: Whole, call: Call) -> tuple[Tensor, Tensor]:
        """Needs the largest logit only."""
        min_p = per_row(self.name, self.min_p, call)
        return _upwards(self._floor(whole, _slack(whole.sums.max + min_p.log() / whole.beta)))

    def stays(self, few: Few, norm: Norm, call: Call) -> Tensor:
        """By the ratio to the best word."""
        min_p = per_row(self.name, self.min_p, call)[:, None]
        return self._and_floor(few, (few.z - norm.top[:, None]).exp() >= min_p)


class Typical(_WithFloor):
    """The words whose surprise -log p is nearest to the entropy, until they reach `mass`."""

    name = "typical_p"
    keeps_argmax = False

    def __init__(self, mass: PerRow, *, min_tokens_to_keep: int = 1) -> None:
        super().__init__(min_tokens_to_keep)
        self.mass = mass

    def span(self, whole: Whole, call: Call) -> tuple[Tensor, Tensor]:
        """The words around log p = -entropy that hold the mass."""
        mass = per_row(self.name, self.mass, call)
        norm = whole.norm
        centre = (norm.lse - norm.entropy) / whole.beta
        radius = torch.where(mass < 1, whole.heaviest(centre, mass), math.inf)
        if self.min_tokens_to_keep > 1:
            enough = torch.full_like(centre, float(self.min_tokens_to_keep))
            s, width = whole.sums, torch.full_like(centre, 1 / 64)
            nearest = reach(whole.z, whole.beta, s.max, centre, width, enough, count=True)
            radius = torch.maximum(radius, nearest)
        slack = 1e-9 * (1 + centre.abs())
        return centre - radius - slack, centre + radius + slack

    def stays(self, few: Few, norm: Norm, call: Call) -> Tensor:
        """In the order of distance, up to and with the word that reaches the mass."""
        limit = per_row(self.name, self.mass, call)[:, None]
        real = few.z > -math.inf
        log_p = few.z - norm.lse[:, None]
        distance = (-log_p - norm.entropy[:, None]).abs().masked_fill(~real, math.inf)
        order = distance.argsort(dim=1, stable=True)
        mass = log_p.exp().gather(1, order)
        before = mass.cumsum(1) - mass
        stays = self._and_floor(few, (before < limit) | (limit >= 1))
        return torch.zeros_like(stays).scatter_(1, order, stays)


class Epsilon(_WithFloor):
    """The words with p >= epsilon."""

    name = "epsilon_cutoff"

    def __init__(self, epsilon: PerRow, *, min_tokens_to_keep: int = 1) -> None:
        super().__init__(min_tokens_to_keep)
        self.epsilon = epsilon

    def _least(self, norm: Norm, call: Call) -> Tensor:  # noqa: ARG002
        """The least probability that stays, (B,)."""
        return per_row(self.name, self.epsilon, call)

    def span(self, whole: Whole, call: Call) -> tuple[Tensor, Tensor]:
        """From log p = log epsilon upwards."""
        lo = (whole.norm.lse + self._least(whole.norm, call).log()) / whole.beta
        return _upwards(self._floor(whole, _slack(lo)))

    def stays(self, few: Few, norm: Norm, call: Call) -> Tensor:
        """By probability."""
        p = (few.z - norm.lse[:, None]).exp()
        return self._and_floor(few, p >= self._least(norm, call)[:, None])


class Eta(Epsilon):
    """The words with p >= min(epsilon, sqrt(epsilon) · exp(-entropy))."""

    name = "eta_cutoff"

    def _least(self, norm: Norm, call: Call) -> Tensor:
        epsilon = super()._least(norm, call)
        return torch.minimum(epsilon, epsilon.sqrt() * (-norm.entropy).exp())


class TopNSigma(Cut):
    """The words with z >= max z - n · (standard deviation of z)."""

    name = "top_n_sigma"
    takes = "logits"

    def __init__(self, n: PerRow) -> None:
        self.n = n

    def _least(self, norm: Norm, call: Call) -> Tensor:
        n = per_row(self.name, self.n, call)
        return torch.where(n > 0, norm.top - n * norm.deviation, -math.inf)

    def span(self, whole: Whole, call: Call) -> tuple[Tensor, Tensor]:
        """Upwards from there."""
        return _upwards(_slack(self._least(whole.norm, call) / whole.beta))

    def stays(self, few: Few, norm: Norm, call: Call) -> Tensor:
        """By logit."""
        return few.z >= self._least(norm, call)[:, None]


class TopH(Cut):
    """Of the 100 best words: the first ones whose entropies -p log p add up to at most top_h of
    the entropy of the 100.
    """

    name = "top_h"
    _MOST = 100

    def __init__(self, top_h: PerRow) -> None:
        self.top_h = top_h

    def span(self, whole: Whole, call: Call) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """From the 100th best logit upwards."""
        return _upwards(whole.largest(torch.full_like(whole.beta, self._MOST)))

    def stays(self, few: Few, norm: Norm, call: Call) -> Tensor:  # noqa: ARG002
        """By the sum of entropies of those before and itself."""
        share = per_row(self.name, self.top_h, call)[:, None]
        best = few.z[:, : self._MOST]
        log_p = best.log_softmax(1)
        terms = torch.where(best > -math.inf, -log_p.exp() * log_p, 0.0)
        stays = terms.cumsum(1) <= share * terms.sum(1, keepdim=True)
        stays[:, :1] = True
        none = torch.zeros_like(few.z[:, self._MOST :], dtype=torch.bool)
        return torch.cat([stays, none], 1)


class XTC(Stage):
    """Exclude top choices: with some probability, strike out every word with p >= threshold but
    the least probable of them.
    """

    name = "xtc_probability"
    takes = "probabilities"

    def __init__(
        self, probability: PerRow, threshold: PerRow = 0.1, *, min_tokens_to_keep: int = 1
    ) -> None:
        self.probability, self.threshold = probability, threshold
        self.min_tokens_to_keep = min_tokens_to_keep

    def __call__(self, words: Distribution, call: Call) -> Distribution:
        """A coin per row, from its seed and position."""
        keys = call.keys
        coin = uniforms(keys, torch.zeros(len(keys), 1, dtype=torch.int64), FOR_COINS)[:, 0]
        norm = words.norm
        wins = coin.to(norm.lse) < per_row(self.name, self.probability, call)
        threshold = per_row("xtc_threshold", self.threshold, call)
        threshold = torch.where(wins & (threshold <= 0.5), threshold, math.inf)
        least = norm.lse + threshold.log()
        if isinstance(words, Few):
            return words.keep(~self._out(words, least, words.counts))
        few = words.above(_slack(least / words.beta))
        out = self._out(few, least, norm.n)
        z = words.z.clone()
        row = torch.arange(len(z), device=z.device)[:, None].expand_as(out)
        z[row[out], few.ids[out]] = -math.inf
        return Whole(z, words.beta)

    def _out(self, few: Few, least: Tensor, left: Tensor) -> Tensor:
        """Every likely word but the last, where enough words are left then."""
        likely = (few.z >= least[:, None]) & (few.z > -math.inf)
        several = likely.sum(1, keepdim=True)
        enough = left[:, None] - (several - 1) >= self.min_tokens_to_keep
        return likely & (_places(few) < several - 1) & enough


def _slack(lo: Tensor) -> Tensor:
    """A bound lowered by more than its rounding error."""
    return lo - 1e-9 * (1 + lo.abs().nan_to_num(posinf=0.0))
