"""`FactoredHead`: the module around `Factors`, a replacement for `LMHead`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lmhead import checks
from lmhead.checks import eager
from lmhead.lazy import LazyLogits
from lmhead.sampling.distribution import (
    FOR_FACTORS,
    check_seed,
    position_tensor,
    row_keys,
    uniforms,
)
from lmhead.scores.answers import Asked
from lmhead.sweep import autocast
from lmhead.vocab.factored_scores import FactoredScores
from lmhead.vocab.factors import Factors, vmapped


class FactoredHead(nn.Module, ABC):
    """A head whose distribution is a product of smaller ones; it answers as `LMHead` does.

    Attributes:
        hidden_size: D.
        vocab_size: V.
        max_bytes: bound on temporary memory; None for 128 MiB.
    """

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        checks.check_integer("hidden_size", hidden_size, low=1)
        checks.check_integer("vocab_size", vocab_size, low=1)
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.max_bytes: int | None = None

    @abstractmethod
    def factors(self) -> Factors:
        """Return the distribution with the parameters as they are now."""

    @property
    def in_features(self) -> int:
        """D, as `nn.Linear` calls it."""
        return self.hidden_size

    @property
    def out_features(self) -> int:
        """V, as `nn.Linear` calls it."""
        return self.vocab_size

    @eager
    def forward(self, hidden: Tensor) -> LazyLogits:
        """Return log-probabilities of shape (..., V) that compute nothing until queried."""
        scores = self.scores(hidden)
        return LazyLogits.of(scores, hidden.shape[:-1], scores.hidden.dtype)

    def scores(self, hidden: Tensor) -> FactoredScores:
        """Return the scores of hidden states (..., D), as rows."""
        factors = self.factors()
        like = next((t for t in factors.tensors() if t.is_floating_point()), None)
        cast = hidden
        if isinstance(hidden, Tensor):
            (cast,) = autocast(hidden)
            if cast.dtype != hidden.dtype or (like is not None and autocast(like)[0] is not like):
                factors = factors.map(lambda t: autocast(t)[0])
                like = None if like is None else autocast(like)[0]
        checks.check_hidden(cast, self.hidden_size, like)
        if not vmapped() and cast.device.type != "meta" and bool(cast.isinf().any()):
            # An infinite state saturates some factors and gives NaN in others: use NaN for all.
            cast = cast.masked_fill(cast.isinf(), math.nan)
        return FactoredScores(factors, cast.reshape(-1, cast.shape[-1]))

    def log_prob(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return log p of tokens, without the others: ids (...) or (..., K) give the same shape.

        Equivalent to: head(hidden).ask(log_prob=ids).log_prob
        """
        if self._forward_hooks or self._forward_pre_hooks:  # as FSDP has them, to gather weights
            answer: Tensor = self(hidden).ask(log_prob=ids).log_prob
            return answer
        scores = self.scores(hidden)
        asked = Asked.checked(hidden.shape[:-1], self.vocab_size, hidden.device, log_prob=ids)
        found: Tensor = asked.answers(asked.compute(scores), scores.hidden.dtype).log_prob
        return found

    @torch.no_grad()
    def sample(
        self,
        hidden: Tensor,
        *,
        seed: int | Sequence[int] | None = None,
        position: int | Tensor = 0,
    ) -> Tensor:
        """Return a token for each hidden state, drawn step by step: (..., D) gives (...).

        Args:
            hidden: (..., D).
            seed: an integer, or one per row: the same seed, position and hidden state give the
                same token, in any batch. None takes new ones from torch's generator.
            position: of the token in its text, one or one per row.

        For temperature, top-p and so on give `head(hidden)` to a `Sampler`.
        """
        scores = self.scores(hidden)
        keys = row_keys(check_seed(seed), position_tensor(position), scores.n_rows)

        def uniform(i: int) -> Tensor:
            ids = torch.full((len(keys), 1), i, dtype=torch.int64)
            return uniforms(keys, ids, FOR_FACTORS)[:, 0].to(scores.device)

        return scores.draw(uniform).reshape(hidden.shape[:-1])
