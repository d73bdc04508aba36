"""`Factors`: the interface of a factored distribution, from which every question is answered.

A factored head gives a normalised distribution as a product of smaller ones: a cluster and a token
in it, or the decisions on a path. A `Factors` holds its tensors at the time of the call;
`FactoredScores` uses nothing else.

In:  rows of hidden states, (N, D).
Out: numbers in float32 (float64 for float64 hidden states) that carry gradients, unless stated
     otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor

from lmhead import checks
from lmhead.scores.protocol import recomputed
from lmhead.scores.row_loss import CrossEntropy, RowLoss, RowSums, WeightedLoss
from lmhead.sweep import DEFAULT_MAX_BYTES

Uniform = Callable[[int], Tensor]
"""The i-th random number of every row: a number to (N,), float64 in (0, 1)."""

Self = TypeVar("Self", bound="Factors")


class Factors(ABC):
    """A factored distribution over V tokens.

    A subclass implements the five abstract methods. The others use whole rows of log-probabilities
    unless overridden: exact, in bounded memory, but at a cost of V per row.

    Attributes:
        name: of the head, for messages.
        vocab: V.
        max_bytes: bound on temporary memory; None for 128 MiB.
    """

    name: str
    vocab: int
    max_bytes: int | None = None

    # To be implemented ---------------------------------------------------------------------------

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors that may require a gradient."""

    @abstractmethod
    def map(self: Self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the same with every floating tensor changed: detached, moved, converted."""

    @abstractmethod
    def log_prob(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return log p of given tokens: (N, D) and (N, K) give (N, K)."""

    @abstractmethod
    def log_probs(self, hidden: Tensor, *, exact: bool = False) -> Tensor:
        """Return log p of all tokens: (N, D) gives (N, V).

        Callers pass few rows at a time. `exact` asks for float64 arithmetic on the stored numbers,
        with sums in one order whatever the batch; no gradients then.
        """

    @abstractmethod
    def cross_entropy(self, hidden: Tensor, loss: CrossEntropy) -> Tensor:
        """Return `loss.of_dense(log_probs(hidden))`: a number, or (N,) for the reduction "none".

        `loss` has been validated. If an option is not supported, raise a `ValueError`.
        """

    # From whole rows; override them if there is a cheaper way -----------------------------------

    def explain(self, rows: int) -> list[str]:
        """Return the costs of questions about a number of rows, one line each."""
        return [f"  an answer               all {self.vocab:,} tokens of {rows:,} rows"]

    def top(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest log-probabilities and ids, (N, k) each; float64, no gradients.

        In the order of exact log-probabilities, lowest id first among equals. Where a row holds a
        NaN there is no order: its ids are -1.
        """

        def best(rows: Tensor) -> Tensor:
            values, ids = self.log_probs(rows, exact=True).sort(dim=1, descending=True, stable=True)
            ids = ids.masked_fill(values.isnan().any(1, keepdim=True), -1)
            return torch.stack([values[:, :k], ids[:, :k].double()])

        with torch.no_grad():
            parts = [best(rows) for rows in self.blocks(hidden)]
            values, ids = torch.cat(parts, 1) if parts else hidden.new_zeros(2, 0, k).double()
        return values, ids.long()

    def entropy(self, hidden: Tensor) -> Tensor:
        """Return -Σ_v p_v log p_v in nats, (N,)."""

        def of(rows: Tensor) -> Tensor:
            log_p = self.log_probs(rows)
            # 0 · log 0 is 0, and has no gradient.
            log_p = log_p.masked_fill(log_p == -torch.inf, 0.0)
            p = torch.where(log_p == 0, 0.0, log_p.exp())
            return -(p * log_p).sum(1)

        return self.by_blocks(of, hidden)

    def draw(self, hidden: Tensor, uniform: Uniform) -> Tensor:
        """Return a token per row, drawn from the distribution: (N,), no gradients."""
        u = uniform(0)
        drawn = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        with torch.no_grad():
            for i in range(len(hidden)):  # one at a time: rounding must not depend on other rows
                drawn[i] = inverse_cdf(self.log_probs(hidden[i : i + 1])[0], u[i])
        return drawn

    # Helpers -------------------------------------------------------------------------------------

    def counted(self, hidden: Tensor, active: Tensor | None) -> tuple[Tensor, Any]:
        """Return the rows that count in a loss, and their indices: the others may be NaN."""
        if active is None:
            return hidden, slice(None)
        if vmapped():
            return torch.where(active[:, None], hidden, 0.0), slice(None)
        rows = active.nonzero()[:, 0]
        return hidden[rows], rows

    def reduced(
        self, hidden: Tensor, loss: CrossEntropy, weighted: WeightedLoss, rows: Any, sums: RowSums
    ) -> Tensor:
        """Return the loss from the sums of some rows over log-probabilities; their lse is 0."""

        def counted(weights: RowLoss) -> Tensor:
            weights = weights.at(rows)
            return weights.rows(sums._replace(lse=torch.zeros_like(weights.lse)))

        def spread(weights: RowLoss) -> Tensor:
            found = counted(weights)
            if isinstance(rows, slice):
                return found
            return found.new_zeros(len(hidden)).index_copy(0, rows, found)

        return loss.reduced(
            weighted,
            rows=spread,
            total=lambda weights: counted(weights).sum(),
            log_probs=lambda: self.constant_log_probs(hidden),
        )

    @torch.no_grad()
    def constant_log_probs(self, hidden: Tensor) -> Tensor:
        """Return log p of all tokens, (N, V), in float64 and without a gradient."""
        return self.by_blocks(self.log_probs, hidden).double()

    def blocks(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Yield rows, as many at a time as fit `max_bytes`; none if there are none."""
        budget = DEFAULT_MAX_BYTES if self.max_bytes is None else self.max_bytes
        size = max(1, budget // (32 * self.vocab))
        return torch.split(hidden, size) if len(hidden) else ()

    def by_blocks(self, function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Apply `function` to rows (B, D) -> (B, ...), a block at a time, in both passes."""
        blocks = self.blocks(hidden)
        return torch.cat([recomputed(function, b) for b in blocks]) if blocks else function(hidden)

    def bounded(self: Self, max_bytes: int) -> Self:
        """Return the same with another bound on temporary memory."""
        checks.check_max_bytes(max_bytes)
        other = copy(self)
        object.__setattr__(other, "max_bytes", max_bytes)  # subclasses may be frozen dataclasses
        return other


def vmapped() -> bool:
    """Return whether `torch.func.vmap` is active, where no size may depend on values."""
    stack = torch._C._functorch.get_interpreter_stack()
    vmap = torch._C._functorch.TransformType.Vmap
    return any(level.key() == vmap for level in stack or ())


def inverse_cdf(log_p: Tensor, u: Tensor) -> Tensor:
    """Return the token v with P(< v) <= u < P(<= v), never of probability 0: (V,), () give ()."""
    cumulated = log_p.double().exp().cumsum(0)
    # The sum may differ from 1 by rounding.
    index = torch.searchsorted(cumulated, u * cumulated[-1], right=True)
    last = (log_p > -torch.inf).nonzero()[-1, 0]
    return torch.minimum(index, last)
