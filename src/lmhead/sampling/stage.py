"""Base classes of stages: one step from logits to a token.

A stage takes a distribution and gives one back, or, as the last one, a token. Three kinds:

    Edit    changes the logits of tokens, by the context or by constraints
    Cut     keeps some tokens and removes the others
    Choice  chooses the token

A number in a stage may be one for all rows, or one per row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lmhead.sampling.context import Context
from lmhead.sampling.distribution import Distribution, FullDistribution, TopCandidates

PerRow = float | Sequence[float] | Tensor
"""A number, or one per row."""

Kind = Literal["logits", "probabilities", "ids"]


@dataclass(frozen=True)
class Call:
    """The input of a stage besides the logits: one call of a sampler.

    Attributes:
        keys: (B, 2), seed and position of each row.
        rows: (B,), the numbers of the rows in the batch that the sampler was called with.
        batch: number of rows of that batch.
        vocab: V.
        context: the ids so far.
        unconditional: (B, V), the logits without the prompt, for guidance.
        surprise: (B,), mirostat's running target.
    """

    keys: Tensor
    rows: Tensor
    batch: int
    vocab: int
    context: Context
    unconditional: Tensor | None = None
    surprise: Tensor | None = None

    def select(self, which: Tensor) -> Call:
        """Return the call of some of its rows."""
        return Call(
            self.keys[which],
            self.rows[which],
            self.batch,
            self.vocab,
            self.context.rows(which),
            None if self.unconditional is None else self.unconditional[which],
            None if self.surprise is None else self.surprise[which],
        )


class Stage(ABC):
    """One step of a chain.

    Attributes:
        name: the sampler option.
        takes: what its definition reads: logits, or probabilities.
        gives: logits again, or ids.
        keeps_argmax: whether the best token always remains the best one.
    """

    name: str
    takes: ClassVar[Kind] = "logits"
    gives: ClassVar[Kind] = "logits"
    keeps_argmax: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, distribution: Distribution, call: Call) -> Distribution:
        """Return the distribution after this stage."""

    def __repr__(self) -> str:
        given = ", ".join(
            f"{k}={v!r}" for k, v in vars(self).items() if k[0] != "_" and k != "name"
        )
        return f"{type(self).__name__}({given})"


class Edit(Stage):
    """A stage that changes logits."""

    def __call__(self, distribution: Distribution, call: Call) -> Distribution:
        """Edit a copy of all logits."""
        full = (
            distribution.to_full(call.vocab)
            if isinstance(distribution, TopCandidates)
            else distribution
        )
        z = full.scaled_logits()
        self.edit(z, call)
        return FullDistribution.of(z)

    @abstractmethod
    def edit(self, z: Tensor, call: Call) -> None:
        """Change z (B, V) in place, each token by its own logit."""

    def touches(self, call: Call) -> Sequence[Sequence[int]] | None:  # noqa: ARG002
        """Return, per row, the tokens whose logits it may change; None if that may be all."""
        return None


class Cut(Stage):
    """A stage that keeps some tokens: found by selection among all, decided among candidates.

    `find_candidates` selects the tokens that may be kept; `keep_mask` decides. Its arguments are
    the same whether all tokens or candidates were left: the tokens that may be kept, best first,
    and the distribution before the cut.
    """

    takes: ClassVar[Kind] = "probabilities"
    keeps_argmax: ClassVar[bool] = True

    def __call__(self, distribution: Distribution, call: Call) -> Distribution:
        """Keep the tokens of `keep_mask`."""
        if isinstance(distribution, TopCandidates):
            return distribution.keep(self.keep_mask(distribution, distribution, call))
        kept = self.find_kept(distribution, call)
        if kept is not None:
            return kept
        candidates = self.find_candidates(distribution, call)
        return candidates.keep(self.keep_mask(candidates, distribution, call))

    def find_kept(self, full: FullDistribution, call: Call) -> TopCandidates | None:  # noqa: ARG002
        """Return the tokens that are kept, where there is a faster way to find them, else None."""
        return None

    @abstractmethod
    def find_candidates(self, full: FullDistribution, call: Call) -> TopCandidates:
        """Return all tokens that may be kept, and few others."""

    @abstractmethod
    def keep_mask(self, candidates: TopCandidates, before: Distribution, call: Call) -> Tensor:
        """Return which candidates are kept: (B, K), bool."""


def per_row(name: str, value: PerRow, call: Call) -> Tensor:
    """Return a parameter for the rows of a call: (B,) in float64."""
    if isinstance(value, int | float):
        return torch.full(call.rows.shape, float(value), dtype=torch.float64)
    given = torch.as_tensor(value, dtype=torch.float64, device=call.rows.device)
    if given.dim() == 0:
        return given.expand(len(call.rows)).contiguous()
    if given.shape != (call.batch,):
        raise ValueError(
            f"{name} must be a number or one per row, {call.batch}; got {given.numel()} of them"
        )
    return given[call.rows]


def any_row(value: PerRow, idle: float) -> bool:
    """Return whether a parameter differs from `idle` in some row."""
    given = torch.as_tensor(value, dtype=torch.float64)
    return bool(given.ne(idle).any())
