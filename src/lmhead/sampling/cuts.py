"""Cuts: which words may be drawn at all. `lmhead.reference` has each as a plain definition.

Every cut works on the distribution that the stage before it left, and leaves a word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lmhead.sampling.distribution import Distribution, Few, Whole
from lmhead.sampling.noise import FOR_COINS, uniforms
from lmhead.sampling.stage import Call, Cut, PerRow, Stage, per_row


def _places(few: Few) -> Tensor:
    """0 for the best word of a row, 1 for the next one: (1, K)."""
    return torch.arange(few.z.shape[1], device=few.z.device)[None]


def _slack(lo: Tensor) -> Tensor:
    """A bound lowered by more than its rounding error."""
    return lo - 1e-9 * (1 + lo.abs().nan_to_num(posinf=0.0))


def _below_one(share: PerRow) -> bool:
    """Whether every row is to keep less than everything."""
    return share < 1 if isinstance(share, int | float) else bool((torch.as_tensor(share) < 1).all())


class TopK(Cut):
    """The k best words. Of words that tie for the last place the lowest ids stay; `ties="keep"`
    keeps them all, as Hugging Face and vLLM do.
    """

    name = "top_k"
    takes = "logits"

    def __init__(self, k: PerRow, *, ties: str = "lowest") -> None:
        self.k, self.ties = k, ties

    def wanted(self, call: Call) -> Tensor:
        """K of each row, (B,), as a float."""
        k = per_row(self.name, self.k, call)
        return torch.where(k > 0, k, call.vocab)

    def find(self, whole: Whole, call: Call) -> Few:
        """From the k-th best logit upwards."""
        return whole.above(whole.kth(self.wanted(call)))

    def stays(self, few: Few, before: Distribution, call: Call) -> Tensor:  # noqa: ARG002
        """The first k."""
        k = self.wanted(call)[:, None]
        if self.ties == "lowest":
            return _places(few) < k
        last = (k - 1).clamp(max=few.z.shape[1] - 1).long()
        return few.z >= few.z.gather(1, last)


class _WithFloor(Cut):
    """A cut that keeps at least so many words."""

    def __init__(self, min_tokens_to_keep: int) -> None:
        self.min_tokens_to_keep = min_tokens_to_keep

    def _above(self, whole: Whole, lo: Tensor) -> Few:
        """The words above a bound (in units of z), or enough words."""
        least = whole.largest
        if self.min_tokens_to_keep > 1:
            least = whole.kth(torch.full_like(lo, self.min_tokens_to_keep))
        return whole.above(torch.minimum(_slack(lo), least))

    def _or_enough(self, stays: Tensor) -> Tensor:
        stays[:, : self.min_tokens_to_keep] = True
        return stays


class TopP(_WithFloor):
    """Nucleus: the best words until their probabilities reach p. A word stays if those before it
    have less than p together.
    """

    name = "top_p"

    def __init__(self, p: PerRow, *, min_tokens_to_keep: int = 1) -> None:
        super().__init__(min_tokens_to_keep)
        self.p = p

    def quick(self, whole: Whole, call: Call) -> Few | None:
        """Among the words near the best one."""
        if not _below_one(self.p):
            return None
        p = per_row(self.name, self.p, call)
        return whole.nearest(whole.largest, p, self.min_tokens_to_keep)

    def find(self, whole: Whole, call: Call) -> Few:
        """The words around the best one that hold p of the mass."""
        p = per_row(self.name, self.p, call)
        if bool((p >= 1).any()):
            return whole.above(torch.full_like(p, -math.inf))
        few = whole.around(whole.largest, p)
        if self.min_tokens_to_keep == 1 or bool((few.n >= self.min_tokens_to_keep).all()):
            return few
        least = few.z.masked_fill(few.z == -math.inf, math.inf).amin(1)
        return self._above(whole, least / whole.beta)

    def count(self, z: Sequence[float], total: float, call: Call) -> int:
        """How many words of one row stay, given its best ones and the log of the mass of all."""
        p = float(per_row(self.name, self.p, call)[0])
        before = 0.0
        for place, x in enumerate(z):
            if before >= p and p < 1 and place >= self.min_tokens_to_keep:
                return place
            before += math.exp(x - total)
        return len(z)

    def stays(self, few: Few, before: Distribution, call: Call) -> Tensor:
        """Where the mass before a word is below p; all of it is never reached."""
        p = per_row(self.name, self.p, call)[:, None]
        mass = (few.z - before.lse[:, None]).exp()
        return self._or_enough(mass.cumsum(1) - mass < torch.where(p < 1, p, math.inf))


class MinP(_WithFloor):
    """The words with p >= min_p · (largest p)."""

    name = "min_p"

    def __init__(self, min_p: PerRow, *, min_tokens_to_keep: int = 1) -> None:
        super().__init__(min_tokens_to_keep)
        self.min_p = min_p

    def find(self, whole: Whole, call: Call) -> Few:
        """Needs the largest logit only."""
        min_p = per_row(self.name, self.min_p, call)
        return self._above(whole, whole.largest + min_p.log() / whole.beta)

    def stays(self, few: Few, before: Distribution, call: Call) -> Tensor:
        """By the ratio to the best word."""
        min_p = per_row(self.name, self.min_p, call)[:, None]
        return self._or_enough((few.z - before.top[:, None]).exp() >= min_p)


class Typical(_WithFloor):
    """The words whose surprise -log p is nearest to the entropy, until they reach `mass`."""

    name = "typical_p"
    keeps_argmax = False

    def __init__(self, mass: PerRow, *, min_tokens_to_keep: int = 1) -> None:
        super().__init__(min_tokens_to_keep)
        self.mass = mass

    def quick(self, whole: Whole, call: Call) -> Few | None:
        """Among the words near log p = -entropy."""
        if not _below_one(self.mass):
            return None
        mass = per_row(self.name, self.mass, call)
        centre = (whole.lse - whole.entropy) / whole.beta
        return whole.nearest(centre, mass, self.min_tokens_to_keep)

    def find(self, whole: Whole, call: Call) -> Few:
        """The words around log p = -entropy that hold the mass."""
        mass = per_row(self.name, self.mass, call)
        everything = torch.full_like(mass, -math.inf)
        if bool((mass >= 1).any()):
            return whole.above(everything)
        few = whole.around((whole.lse - whole.entropy) / whole.beta, mass)
        if self.min_tokens_to_keep == 1 or bool((few.n >= self.min_tokens_to_keep).all()):
            return few
        return whole.above(everything)

    def stays(self, few: Few, before: Distribution, call: Call) -> Tensor:
        """In the order of distance, up to and with the word that reaches the mass."""
        limit = per_row(self.name, self.mass, call)[:, None]
        log_p = few.z - before.lse[:, None]
        distance = (-log_p - before.entropy[:, None]).abs()  # inf for what is no word
        order = distance.argsort(dim=1, stable=True)
        mass = log_p.exp().gather(1, order)
        stays = self._or_enough((mass.cumsum(1) - mass < limit) | (limit >= 1))
        return torch.zeros_like(stays).scatter_(1, order, stays)


class Epsilon(_WithFloor):
    """The words with p >= epsilon."""

    name = "epsilon_cutoff"

    def __init__(self, epsilon: PerRow, *, min_tokens_to_keep: int = 1) -> None:
        super().__init__(min_tokens_to_keep)
        self.epsilon = epsilon

    def _least(self, before: Distribution, call: Call) -> Tensor:  # noqa: ARG002
        """The least probability that stays, (B,)."""
        return per_row(self.name, self.epsilon, call)

    def find(self, whole: Whole, call: Call) -> Few:
        """From log p = log epsilon upwards."""
        return self._above(whole, (whole.lse + self._least(whole, call).log()) / whole.beta)

    def stays(self, few: Few, before: Distribution, call: Call) -> Tensor:
        """By probability."""
        p = (few.z - before.lse[:, None]).exp()
        return self._or_enough(p >= self._least(before, call)[:, None])


class Eta(Epsilon):
    """The words with p >= min(epsilon, sqrt(epsilon) · exp(-entropy))."""

    name = "eta_cutoff"

    def _least(self, before: Distribution, call: Call) -> Tensor:
        epsilon = super()._least(before, call)
        return torch.minimum(epsilon, epsilon.sqrt() * (-before.entropy).exp())


class TopNSigma(Cut):
    """The words with z >= max z - n · (standard deviation of z); all where n is not above 0."""

    name = "top_n_sigma"
    takes = "logits"

    def __init__(self, n: PerRow) -> None:
        self.n = n

    def _least(self, before: Distribution, call: Call) -> Tensor:
        n = per_row(self.name, self.n, call)
        return torch.where(n > 0, before.top - n * before.deviation, -math.inf)

    def find(self, whole: Whole, call: Call) -> Few:
        """Upwards from there."""
        return whole.above(_slack(self._least(whole, call) / whole.beta))

    def stays(self, few: Few, before: Distribution, call: Call) -> Tensor:
        """By logit."""
        return few.z >= self._least(before, call)[:, None]


class TopH(Cut):
    """Of the 100 best words: the first ones whose entropies -p log p add up to at most top_h of
    the entropy of the 100.
    """

    name = "top_h"
    MOST = 100

    def __init__(self, top_h: PerRow) -> None:
        self.top_h = top_h

    def find(self, whole: Whole, call: Call) -> Few:  # noqa: ARG002
        """From the 100th best logit upwards."""
        return whole.above(whole.kth(torch.full_like(whole.beta, self.MOST)))

    def stays(self, few: Few, before: Distribution, call: Call) -> Tensor:  # noqa: ARG002
        """By the sum of entropies of those before and itself."""
        share = per_row(self.name, self.top_h, call)[:, None]
        best = few.z[:, : self.MOST]
        log_p = best.log_softmax(1)
        terms = torch.where(best > -math.inf, -log_p.exp() * log_p, 0.0)
        # A share of 1 is all of it, though rounding may exceed the sum before the last word.
        stays = (terms.cumsum(1) <= share * terms.sum(1, keepdim=True)) | (share >= 1)
        stays &= log_p.exp() > 0
        stays[:, :1] = True
        none = torch.zeros_like(few.z[:, self.MOST :], dtype=torch.bool)
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
        wins = coin < per_row(self.name, self.probability, call)
        threshold = per_row("xtc_threshold", self.threshold, call)
        threshold = torch.where(wins & (threshold <= 0.5), threshold, math.inf)
        least = words.lse + threshold.log()
        if isinstance(words, Few):
            return words.keep(~self._out(words, least, words.n))
        few = words.above(_slack(least / words.beta))
        out = self._out(few, least, words.n)
        z = words.applied()
        row = torch.arange(len(z), device=z.device)[:, None].expand_as(out)
        z[row[out], few.ids[out]] = -math.inf
        return Whole.of(z)

    def _out(self, few: Few, least: Tensor, left: Tensor) -> Tensor:
        """Every likely word but the last, where enough words are left then."""
        likely = (few.z >= least[:, None]) & (few.z > -math.inf)
        several = likely.sum(1, keepdim=True)
        enough = left[:, None] - (several - 1) >= self.min_tokens_to_keep
        return likely & (_places(few) < several - 1) & enough
