"""Mirostat: truncation with a target surprisal per token and feedback from sampled tokens.

It keeps tokens by a bound mu on their surprisal -log2 p, and after each token moves mu by
eta · (tau - surprisal of the token). mu is carried from call to call as `Sampled.state`; it starts
at 2 · tau.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.sampling.distribution import Distribution, FullDistribution, TopCandidates
from lmhead.sampling.stage import Call, Cut, PerRow, per_row


@dataclass(repr=False, eq=False)
class Mirostat2(Cut):
    """Version 2: keep the tokens with a surprisal of at most mu."""

    name = "mirostat"
    must_be_last = True
    tau: PerRow = 5.0
    eta: PerRow = 0.1

    def start(self, call: Call) -> Tensor:
        """Return mu before the first token, (B,)."""
        return 2 * per_row("mirostat_tau", self.tau, call)

    def update(self, call: Call, log_prob: Tensor) -> Tensor:
        """Return mu after a token with this log-probability among the remaining tokens."""
        tau = per_row("mirostat_tau", self.tau, call)
        eta = per_row("mirostat_eta", self.eta, call)
        return self._mu(call) - eta * (-log_prob / math.log(2) - tau)

    def _mu(self, call: Call) -> Tensor:
        return self.start(call) if call.surprise is None else call.surprise

    def find_candidates(self, full: FullDistribution, call: Call) -> TopCandidates:
        """Return the tokens with log2 p >= -mu."""
        lo = (full.lse - self._mu(call) * math.log(2)) / full.beta
        return full.above(torch.minimum(lo - 1e-9 * (1 + lo.abs()), full.largest))

    def keep_mask(self, candidates: TopCandidates, before: Distribution, call: Call) -> Tensor:
        """Return the tokens with a surprisal of at most mu, and always the best one."""
        surprisal = (before.lse[:, None] - candidates.z) / math.log(2)
        kept = surprisal <= self._mu(call)[:, None]
        kept[:, :1] = True
        return kept


class Mirostat1(Mirostat2):
    """Version 1: keep the k best tokens, with k estimated as if the tokens followed Zipf's law.

    The law's exponent is fitted to the 100 best tokens.
    """

    _FITTED = 100

    def __call__(self, distribution: Distribution, call: Call) -> TopCandidates:
        """Keep the k best tokens."""
        candidates = distribution
        if isinstance(distribution, FullDistribution):
            candidates = distribution.above(
                distribution.kth(torch.full_like(distribution.beta, self._FITTED))
            )
        assert isinstance(candidates, TopCandidates)
        k = self._k(candidates, call)
        if isinstance(distribution, FullDistribution):
            candidates = distribution.above(distribution.kth(k))
        return candidates.keep(
            torch.arange(candidates.z.shape[1], device=k.device)[None] < k[:, None]
        )

    def _k(self, candidates: TopCandidates, call: Call) -> Tensor:
        """Return the k for a surprisal of mu, (B,): ⌊((s - 1) 2^mu / (1 - V^(1 - s)))^(1/s)⌋.

        Computed in logarithms, since 2^mu and the power 1/s may overflow.
        """
        z = candidates.z[:, : self._FITTED]
        rank = torch.arange(1, z.shape[1], device=z.device, dtype=z.dtype)
        t = ((rank + 1) / rank).log()
        present = z[:, 1:] > -math.inf
        b = torch.where(present, z[:, :-1] - z[:, 1:], 0.0)
        s = (t * b).sum(1) / torch.where(present, t * t, 0.0).sum(1)
        vocab = float(call.vocab)  # including masked tokens
        rest, log_vocab = s - 1, math.log(max(2.0, vocab))  # k is 1 below two tokens
        ratio = torch.where(rest == 0, 1 / log_vocab, rest / -torch.expm1(-rest * log_vocab))
        s_log_k = ratio.log() + self._mu(call) * math.log(2)
        k = (s_log_k / s).clamp(max=log_vocab + 1).exp().floor()
        k = torch.where(s == 0, torch.where(s_log_k > 0, vocab, 1.0), k)
        return torch.where(present.any(1), k.clamp(1, vocab), 1.0)
