"""Questions of a sweep: a source, and which sums and decisions to compute for its rows.

The sums are those of `RowSums`; all are differentiable, and their gradients with respect to the
logits are in `gradients.coefficients`. Losses are weighted sums of them, see `scores.row_loss`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from lmhead.sweep.plan import Plan, make_plan
from lmhead.sweep.source import Source

if TYPE_CHECKING:
    from lmhead.sweep.filter import GradFilter


class Decisions(NamedTuple):
    """Exact integer answers, decided in float64 where float32 cannot; None if not asked for."""

    top_values: Any = None  # (N, k)
    top_ids: Any = None  # (N, k)
    ranks: Any = None  # (N, K)


@dataclass(frozen=True)
class Questions:
    """A source and the questions about it.

    `active` (N,) leaves rows out: their answers are 0, their gradients 0, at no cost.
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
        """Number of active rows."""
        return self.source.rows if self.active is None else int(self.active.sum())

    def plan(
        self, *, rows: int | None = None, retain: bool = False, filtered: bool = False
    ) -> Plan:
        """Return the plan of the sweep: for answers, or for gradients, filtered or not.

        `rows` is how many rows are still to be seen; None for all.
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
        """Return all tensors in a fixed order: first those of the sources, which have gradients."""
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
        """Return the same questions about other tensors, in the order of `tensors()`."""
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
        """Return the questions without tensors, to keep beside saved tensors."""
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
