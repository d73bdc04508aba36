"""`Answers`: what `lmhead.query` returns, and how it is computed from any `Scores`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmhead import checks
from lmhead.scores.protocol import Scores


class TopK(NamedTuple):
    """The k largest logits of each row, largest first, lowest id first among equals."""

    values: Tensor
    indices: Tensor


@dataclass(frozen=True)
class Answers:
    """Answers of `query`, one field per question; None where it was not asked.

    Attributes:
        log_prob: log p of the given ids, with the shape of the ids.
        rank: number of tokens ordered before each given id (0 is the argmax), int64.
        entropy: entropy of the distribution in nats, (...).
        logsumexp: log-sum-exp of the logits, (...).
        argmax: id of the largest logit, (...), int64.
        top_k: `TopK(values, indices)`, (..., k) each; values are logits.
        kl: KL(p ‖ q) in nats, (...).

    Ids and ranks follow the float64 logits; they are -1 for a row whose logits hold a NaN or are
    all -inf.
    """

    log_prob: Any = None
    rank: Any = None
    entropy: Any = None
    logsumexp: Any = None
    argmax: Any = None
    top_k: Any = None
    kl: Any = None


@dataclass(frozen=True)
class Asked:
    """Checked questions about logits (*lead, V)."""

    lead: torch.Size
    log_prob: Tensor | None = None
    rank: Tensor | None = None
    entropy: bool = False
    logsumexp: bool = False
    argmax: bool = False
    top_k: int = 0
    kl: bool = False

    @classmethod
    def checked(cls, lead: torch.Size, vocab: int, device: torch.device, **questions: Any) -> Asked:
        """Validate the questions."""
        asked = cls(lead, **questions)
        checks.check_integer("top_k", asked.top_k, low=0, high=vocab)
        for name, ids in (("log_prob", asked.log_prob), ("rank", asked.rank)):
            if ids is None:
                continue
            checks.check_ids(name, ids, vocab)
            checks.check_device(name, ids, "hidden", torch.empty(0, device=device))
            if ids.shape[: len(lead)] != lead or ids.dim() > len(lead) + 1:
                raise ValueError(
                    f"{name} must have shape {tuple(lead)} or {(*lead, 'K')}; "
                    f"got {tuple(ids.shape)}"
                )
        return asked

    def rows(self, ids: Tensor | None) -> Tensor | None:
        """Return ids (...) or (..., K) as (N, K)."""
        if ids is None:
            return None
        k = 1 if ids.dim() == len(self.lead) else ids.shape[-1]
        return ids.reshape(self.lead.numel(), k).long()

    def compute(
        self,
        scores: Scores,
        other: Scores | None = None,
        rows: slice | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the answers about rows of scores, one tensor each, in a fixed order."""

        def some(ids: Tensor | None) -> Tensor | None:
            return ids if ids is None or rows is None else ids[rows]

        found = scores.answer(
            logsumexp=self.logsumexp,
            entropy=self.entropy,
            picked=some(self.rows(self.log_prob)),
            rank=some(self.rows(self.rank)),
            top_k=max(self.top_k, int(self.argmax)),
            kl_to=other,
        )
        made = [] if self.log_prob is None else [found.picked - found.lse[:, None]]
        made += [] if self.rank is None else [found.ranks]
        made += [found.entropy] if self.entropy else []
        made += [found.lse] if self.logsumexp else []
        made += [found.top_ids, found.top_values] if self.top_k or self.argmax else []
        made += [found.kl] if self.kl else []
        return tuple(made)

    def answers(self, computed: tuple[Tensor, ...], dtype: torch.dtype) -> Answers:
        """Return what `compute` gave in the shape of the logits."""
        given = iter(computed)
        fields: dict[str, Any] = {}
        if self.log_prob is not None:
            fields["log_prob"] = next(given).reshape(self.log_prob.shape).to(dtype)
        if self.rank is not None:
            fields["rank"] = next(given).reshape(self.rank.shape)
        for name, asked in (("entropy", self.entropy), ("logsumexp", self.logsumexp)):
            if asked:
                fields[name] = next(given).reshape(self.lead).to(dtype)
        if self.top_k or self.argmax:
            ids, values = next(given), next(given)
            if self.argmax:
                fields["argmax"] = ids[:, 0].reshape(self.lead)
            if self.top_k:
                shape = (*self.lead, self.top_k)
                fields["top_k"] = TopK(values.reshape(shape).to(dtype), ids.reshape(shape))
        if self.kl:
            fields["kl"] = next(given).reshape(self.lead).to(dtype)
        return Answers(**fields)
