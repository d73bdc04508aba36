"""What can be asked of logits in one sweep, and the form of the answers.

Every answer is a number per token (or a few), computed from the logits z of that token while its
tiles pass by. With p = softmax(z) and lse = log Σ exp z:

    lse        log Σ_v exp z_v
    entropy    -Σ_v p_v log p_v
    picked     z at given ids
    mixed      Σ_v mix_v z_v              masked words (z = -inf) left out
    softened   Σ_v soft_v weight_v z_v    masked words with soft_v = 0 left out
    kl         Σ_v p_v (log p_v - log q_v), q from another source

All of these are differentiable; their gradients with respect to z are in `gradients.coefficients`.
Losses are weighted sums of the answers, see `loss`: cross-entropy, for one, is lse - picked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from lmhead.sweep.plan import Plan, make_plan
from lmhead.sweep.source import Rows, Source

if TYPE_CHECKING:
    from lmhead.sweep.filter import GradFilter


class RowAnswers(NamedTuple):
    """One entry per token, in float64; None where not asked. Also for the gradients of these."""

    lse: Tensor | None = None  # (N,)
    entropy: Tensor | None = None  # (N,)
    picked: Tensor | None = None  # (N, K)
    mixed: Tensor | None = None  # (N,)
    softened: Tensor | None = None  # (N,)
    kl: Tensor | None = None  # (N,)
    other_lse: Tensor | None = None  # (N,), log Σ exp of the other source, for the gradient of kl

    def at(self, rows: Rows) -> RowAnswers:
        """The answers of some tokens."""
        return RowAnswers(*(None if a is None else a[rows] for a in self))


class Decisions(NamedTuple):
    """Answers that are whole numbers: exact, from float64 where float32 cannot decide."""

    top_values: Tensor | None = None  # (N, k)
    top_ids: Tensor | None = None  # (N, k)
    ranks: Tensor | None = None  # (N, K)


@dataclass(frozen=True)
class Questions:
    """A source and what is asked of it.

    `active` (N,) leaves tokens out: their answers are 0, their gradients 0, at no cost.
    """

    source: Source
    other: Source | None = None
    entropy: bool = False
    top_k: int = 0
    grad_filter: GradFilter | None = None
    max_bytes: int | None = None
    ids: Tensor | None = None  # (N, K)
    mix: Tensor | None = None  # (V,)
    soft: Tensor | None = None  # (N, V)
    soft_weight: Tensor | None = None  # (V,)
    rank_ids: Tensor | None = None  # (N, K)
    active: Tensor | None = None  # (N,) bool

    @property
    def rows(self) -> int:
        """How many tokens are asked about."""
        return self.source.rows if self.active is None else int(self.active.sum())

    def plan(
        self, *, rows: int | None = None, retain: bool = False, filtered: bool = False
    ) -> Plan:
        """How to cut the sweep: for answers, or for gradients, filtered or not.

        `rows` is how many tokens are still to be seen; None for all.
        """
        source = self.source
        return make_plan(
            self.rows if rows is None else rows,
            source.vocab,
            source.hidden_size,
            itemsize=source.dtype.itemsize,
            converts=source.converts,
            max_bytes=self.max_bytes,
            retain=retain and self.other is None,
            sources=1 if self.other is None else 2,
            filtered=filtered and self.filters,
        )

    @property
    def filters(self) -> bool:
        """Whether the gradient filter applies.

        With soft-capping, label smoothing and soft targets have no rank-one tail: exact then.
        """
        spread = self.mix is not None or self.soft is not None
        return self.grad_filter is not None and not (self.source.pointwise.bounded and spread)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors in a fixed order: first those of the sources, which have gradients."""
        return (
            *_source_tensors(self.source),
            *(() if self.other is None else _source_tensors(self.other)),
            self.ids,
            self.mix,
            self.soft,
            self.soft_weight,
            self.rank_ids,
            self.active,
        )

    def with_tensors(self, tensors: tuple[Tensor | None, ...]) -> Questions:
        """The same questions about other tensors, in the order of `tensors()`."""
        source, rest = _rebuild(self.source, tensors)
        other = None
        if self.other is not None:
            other, rest = _rebuild(self.other, rest)
        ids, mix, soft, soft_weight, rank_ids, active = rest
        return replace(
            self,
            source=source,
            other=other,
            ids=ids,
            mix=mix,
            soft=soft,
            soft_weight=soft_weight,
            rank_ids=rank_ids,
            active=active,
        )

    def without_tensors(self) -> Questions:
        """The form alone, for keeping beside saved tensors."""
        return self.with_tensors((None,) * len(self.tensors()))

    @property
    def n_differentiable(self) -> int:
        """How many of `tensors()`, from the first, have gradients."""
        return sum(2 * len(s.hiddens) + 1 for s in (self.source, self.other) if s is not None)


def _source_tensors(source: Source) -> tuple[Tensor | None, ...]:
    return (*source.hiddens, *source.weights, source.bias)


def _rebuild(
    source: Source, tensors: tuple[Tensor | None, ...]
) -> tuple[Source, tuple[Tensor | None, ...]]:
    n = len(source.hiddens)
    hiddens, weights, bias = tensors[:n], tensors[n : 2 * n], tensors[2 * n]
    rebuilt = Source(hiddens, weights, bias, source.pointwise)  # type: ignore[arg-type]
    return rebuilt, tensors[2 * n + 1 :]
