"""`Answers`: what `lmhead.query` returns, and how it is computed from any `Scores`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lmhead import checks
from lmhead.html_table import SHOWN, html_table
from lmhead.scores.protocol import RowAnswers, Scores

Ids: TypeAlias = "Tensor | Sequence[Tensor] | None"
"""Ids (...) or (..., K), or several such tensors."""


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
        log_sum_sq: log Σ p², (...).
        mean_logit: mean of the logits, (...); masked tokens (-inf) are left out.
        top1_match: whether each given id is the argmax, bool, with the shape of the ids.

    Where several tensors of ids were given, log_prob, rank and top1_match are tuples. Ids and ranks
    follow the float64 logits; they are -1 for a row whose logits hold a NaN or are all -inf.
    """

    log_prob: Any = None
    rank: Any = None
    entropy: Any = None
    logsumexp: Any = None
    argmax: Any = None
    top_k: Any = None
    kl: Any = None
    log_sum_sq: Any = None
    mean_logit: Any = None
    top1_match: Any = None

    def _repr_html_(self) -> str:
        rows = []
        for field in fields(self):
            value = getattr(self, field.name)
            parts = [value] if isinstance(value, Tensor) else value or ()
            names = getattr(value, "_fields", range(len(parts)))
            for name, part in zip(names, parts, strict=True):
                label = field.name if isinstance(value, Tensor) else f"{field.name} {name}"
                first = part.detach().flatten()[: SHOWN + 1].tolist()
                rows.append((label, str(tuple(part.shape)), first))
        return html_table("Answers", ["question", "shape", "answers"], rows)


@dataclass(frozen=True)
class Asked:
    """Checked questions about logits (*lead, V)."""

    lead: torch.Size
    log_prob: Ids = None
    rank: Ids = None
    entropy: bool = False
    logsumexp: bool = False
    argmax: bool = False
    top_k: int = 0
    kl: bool = False
    log_sum_sq: bool = False
    mean_logit: bool = False
    top1_match: Ids = None

    @classmethod
    def checked(cls, lead: torch.Size, vocab: int, device: torch.device, **questions: Any) -> Asked:
        """Validate the questions."""
        asked = cls(lead, **questions)
        checks.check_integer("top_k", asked.top_k, low=0, high=vocab)
        for name in ("log_prob", "rank", "top1_match"):
            for ids in _each(getattr(asked, name)):
                checks.check_ids(name, ids, vocab)
                if ids.device != device:
                    checks.check_device(name, ids, "hidden", torch.empty(0, device=device))
                if ids.shape[: len(lead)] != lead or ids.dim() > len(lead) + 1:
                    raise ValueError(
                        f"{name} must have shape {tuple(lead)} or {(*lead, 'K')}; "
                        f"got {tuple(ids.shape)}"
                    )
        return asked

    @property
    def smooth(self) -> bool:
        """Whether any of the answers has a gradient."""
        sums = self.entropy or self.logsumexp or self.kl or self.log_sum_sq or self.mean_logit
        return sums or self.log_prob is not None

    @property
    def any(self) -> bool:
        """Whether there is any question."""
        ids = self.rank is not None or self.top1_match is not None
        return self.smooth or ids or self.argmax or self.top_k > 0

    def rows(self, ids: Ids) -> Tensor | None:
        """Return ids (...) or (..., K), or several such tensors, as (N, K)."""
        if ids is None:
            return None
        n = self.lead.numel()
        rows = [i.reshape(n, self._width(i)).long() for i in _each(ids)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 1)

    def _width(self, ids: Tensor) -> int:
        return 1 if ids.dim() == len(self.lead) else ids.shape[-1]

    def compute(
        self,
        scores: Scores,
        other: Scores | None = None,
        rows: slice | Tensor | None = None,
        weight: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the answers about rows of scores, one tensor each, in a fixed order.

        `weight` has one number per row, which multiplies the differentiable answers.
        """

        def selected(ids: Tensor | None) -> Tensor | None:
            return ids if ids is None or rows is None else ids[rows]

        best = self.argmax or self.top1_match is not None
        # Passed only if asked: subclasses need not support them.
        optional = {name: True for name in ("log_sum_sq", "mean_logit") if getattr(self, name)}
        answers = scores.answer(
            logsumexp=self.logsumexp,
            entropy=self.entropy,
            picked=selected(self.rows(self.log_prob)),
            rank=selected(self.rows(self.rank)),
            top_k=max(self.top_k, int(best)),
            kl_to=other,
            **optional,
        )
        return tuple(self._list(answers, selected(self.rows(self.top1_match)), weight))

    def _list(
        self, answers: RowAnswers, candidates: Tensor | None, weight: Tensor | None
    ) -> Iterator[Tensor]:
        factor: Any = 1.0 if weight is None else weight.double()
        if self.log_prob is not None:
            log_prob = answers.picked - answers.lse[:, None]
            yield log_prob if weight is None else log_prob * factor[:, None]
        if self.rank is not None:
            yield answers.ranks
        if self.top_k or self.argmax:
            yield answers.top_ids
            yield answers.top_values
        if candidates is not None:
            yield candidates == answers.top_ids[:, :1]
        for asked, values in (
            (self.entropy, answers.entropy),
            (self.logsumexp, answers.lse),
            (self.kl, answers.kl),
            (self.log_sum_sq, answers.log_sum_sq),
            (self.mean_logit, answers.mean_logit),
        ):
            if asked:
                yield values if weight is None else values * factor

    def answers(self, computed: tuple[Tensor, ...], dtype: torch.dtype) -> Answers:
        """Return what `compute` gave in the shape of the logits."""
        tensors = iter(computed)
        fields: dict[str, Any] = {}
        if self.log_prob is not None:
            fields["log_prob"] = self._like(self.log_prob, next(tensors).to(dtype))
        if self.rank is not None:
            fields["rank"] = self._like(self.rank, next(tensors))
        if self.top_k or self.argmax:
            ids, values = next(tensors), next(tensors)
            if self.argmax:
                fields["argmax"] = ids[:, 0].reshape(self.lead)
            if self.top_k:
                shape = (*self.lead, self.top_k)
                fields["top_k"] = TopK(values.reshape(shape).to(dtype), ids.reshape(shape))
        if self.top1_match is not None:
            fields["top1_match"] = self._like(self.top1_match, next(tensors))
        for name in ("entropy", "logsumexp", "kl", "log_sum_sq", "mean_logit"):
            if getattr(self, name):
                fields[name] = next(tensors).reshape(self.lead).to(dtype)
        return Answers(**fields)

    def _like(self, ids: Ids, values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return values (N, K) in the shape of the ids: one tensor, or one for each."""
        if isinstance(ids, Tensor):
            return values.reshape(ids.shape)
        id_tensors = _each(ids)
        parts = torch.split(values, [self._width(i) for i in id_tensors], 1)
        return tuple(p.reshape(i.shape) for p, i in zip(parts, id_tensors, strict=True))


def _each(ids: Ids) -> Sequence[Tensor]:
    if ids is None:
        return ()
    return ids if isinstance(ids, list | tuple) else (ids,)
