"""What a stage is: one step from logits to a token.

A stage takes a distribution and gives one back, or, as the last one, a token. Three kinds:

    Edit    changes the logits of words, by what has been said or by decree
    Cut     keeps some words and strikes out the others
    Choice  gives the token

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
from lmhead.sampling.distribution import Distribution, Few, Whole

PerRow = float | Sequence[float] | Tensor
"""A number, or one per row."""

Kind = Literal["logits", "probabilities", "ids"]


@dataclass(frozen=True)
class Call:
    """What a stage knows besides the logits: one call of a sampler.

    Attributes:
        keys: (B, 2), seed and position of each row.
        rows: (B,), the numbers of the rows in the batch that the sampler was called with.
        batch: how many rows that has.
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
        """Some of its rows."""
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
        name: the option that asks for it.
        takes: what its definition reads: logits, or probabilities.
        gives: logits again, or ids.
        keeps_argmax: whether the best word surely stays the best one.
    """

    name: str
    takes: ClassVar[Kind] = "logits"
    gives: ClassVar[Kind] = "logits"
    keeps_argmax: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, words: Distribution, call: Call) -> Distribution:
        """The distribution after this stage."""

    def __repr__(self) -> str:
        given = ", ".join(
            f"{k}={v!r}" for k, v in vars(self).items() if k[0] != "_" and k != "name"
        )
        return f"{type(self).__name__}({given})"


class Edit(Stage):
    """A stage that changes the logits of words where they stand."""

    def __call__(self, words: Distribution, call: Call) -> Distribution:
        """Edit a copy of all logits."""
        whole = words.widen(call.vocab) if isinstance(words, Few) else words
        z = whole.applied()
        self.edit(z, call)
        return Whole.of(z)

    @abstractmethod
    def edit(self, z: Tensor, call: Call) -> None:
        """Change z (B, V) in place, each word by its own logit."""

    def touches(self, call: Call) -> Sequence[Sequence[int]] | None:  # noqa: ARG002
        """Per row the words whose logits it may change; None if that may be all of them."""
        return None


class Cut(Stage):
    """A stage that keeps some words: found by selection among all, decided among few.

    `find` gets the words that may stay, by selection; `stays` decides. What it may use is the same
    whether all words or few were left: the words that may stay, best first, and what is known of
    the distribution before the cut.
    """

    takes: ClassVar[Kind] = "probabilities"
    keeps_argmax: ClassVar[bool] = True

    def __call__(self, words: Distribution, call: Call) -> Distribution:
        """Keep what `stays`."""
        if isinstance(words, Few):
            return words.keep(self.stays(words, words, call))
        quick = self.quick(words, call)
        if quick is not None:
            return quick
        few = self.find(words, call)
        return few.keep(self.stays(few, words, call))

    def quick(self, whole: Whole, call: Call) -> Few | None:  # noqa: ARG002
        """The words that stay, where there is a short way to them."""
        return None

    @abstractmethod
    def find(self, whole: Whole, call: Call) -> Few:
        """All words that may stay, and few others."""

    @abstractmethod
    def stays(self, few: Few, before: Distribution, call: Call) -> Tensor:
        """Which words stay: (B, K), bool."""


def per_row(name: str, value: PerRow, call: Call) -> Tensor:
    """A number, or one per row of the batch, for the rows of a call: (B,) in float64."""
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
    """Whether a parameter is something else than `idle` for some row."""
    given = torch.as_tensor(value, dtype=torch.float64)
    return bool(given.ne(idle).any())
