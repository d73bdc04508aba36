"""Mirostat: a cut that aims at a given surprise per token, and learns from what came out.

It keeps words by a bound mu on their surprise -log2 p, and after each token moves mu by
eta · (tau - surprise of the token). mu is carried from call to call as `Sampled.state`; it starts
at 2 · tau.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmhead.sampling.distribution import Distribution, Few, Whole
from lmhead.sampling.stage import Call, Cut, PerRow, per_row


class Mirostat2(Cut):
    """Version 2: the words with a surprise of at most mu."""

    name = "mirostat"
    gives = "ids"

    def __init__(self, tau: PerRow = 5.0, eta: PerRow = 0.1) -> None:
        self.tau, self.eta = tau, eta

    def start(self, call: Call) -> Tensor:
        """Mu before the first token, (B,)."""
        return 2 * per_row("mirostat_tau", self.tau, call)

    def learn(self, call: Call, log_prob: Tensor) -> Tensor:
        """Mu after a token with this log-probability among the words that were left."""
        tau = per_row("mirostat_tau", self.tau, call)
        eta = per_row("mirostat_eta", self.eta, call)
        return self._mu(call) - eta * (-log_prob / math.log(2) - tau)

    def _mu(self, call: Call) -> Tensor:
        assert call.surprise is not None
        return call.surprise

    def find(self, whole: Whole, call: Call) -> Few:
        """From log2 p = -mu upwards."""
        lo = (whole.lse - self._mu(call) * math.log(2)) / whole.beta
        return whole.above(torch.minimum(lo - 1e-9 * (1 + lo.abs()), whole.largest))

    def stays(self, few: Few, before: Distribution, call: Call) -> Tensor:
        """By surprise; the best word always."""
        surprise = (before.lse[:, None] - few.z) / math.log(2)
        stays = surprise <= self._mu(call)[:, None]
        stays[:, :1] = True
        return stays


class Mirostat1(Mirostat2):
    """Version 1: the k best words, k being estimated as if the words followed Zipf's law.

    The law's exponent is fitted to the 100 best words.
    """

    _FITTED = 100

    def __call__(self, words: Distribution, call: Call) -> Few:
        """Cut to the k best."""
        few = words
        if isinstance(words, Whole):
            few = words.above(words.kth(torch.full_like(words.beta, self._FITTED)))
        assert isinstance(few, Few)
        k = self._k(few, call)
        if isinstance(words, Whole):
            few = words.above(words.kth(k))
        return few.keep(torch.arange(few.z.shape[1], device=k.device)[None] < k[:, None])

    def _k(self, few: Few, call: Call) -> Tensor:
        """How many words a surprise of mu is worth, (B,): ⌊((s - 1) 2^mu / (1 - V^(1 - s)))^(1/s)⌋.

        In logs, since 2^mu and the power 1/s may be too large for a number.
        """
        z = few.z[:, : self._FITTED]
        place = torch.arange(1, z.shape[1], device=z.device, dtype=z.dtype)
        t = ((place + 1) / place).log()
        real = z[:, 1:] > -math.inf
        b = torch.where(real, z[:, :-1] - z[:, 1:], 0.0)
        s = (t * b).sum(1) / torch.where(real, t * t, 0.0).sum(1)
        vocab = float(call.vocab)  # words that were masked before included
        rest, log_vocab = s - 1, math.log(vocab)
        ratio = torch.where(rest == 0, 1 / log_vocab, rest / -torch.expm1(-rest * log_vocab))
        s_log_k = ratio.log() + self._mu(call) * math.log(2)
        k = (s_log_k / s).clamp(max=log_vocab + 1).exp().floor()
        k = torch.where(s == 0, torch.where(s_log_k > 0, vocab, 1.0), k)
        return torch.where(real.any(1), k.clamp(1, vocab), 1.0)
