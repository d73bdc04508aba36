"""Base classes of stages, their inputs, and the temperature.

A stage takes a distribution over tokens and returns another one:

    Edit    changes the logits of tokens, by the context or by constraints
    Cut     keeps some tokens and removes the others

A parameter of a stage is a number for all rows, or one per row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import ClassVar, TypeGuard

import torch
from torch import Tensor

from lmhead.sampling.distribution import Distribution, FullDistribution, TopCandidates


@dataclass(frozen=True)
class Context:
    """Per row the ids so far, without padding, and the length of the prompt."""

    ids: tuple[tuple[int, ...], ...]
    prompts: tuple[int, ...]

    @classmethod
    def of(
        cls,
        context: Tensor | Sequence[Sequence[int]] | None,
        rows: int,
        vocab: int,
        *,
        prompt_length: int | Sequence[int] | Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Context:
        """Validate the context of a call.

        Without `prompt_length` all of it is the prompt.
        """
        ids = _lists(context, rows, mask)
        for row, row_ids in enumerate(ids):
            if row_ids and not 0 <= min(row_ids) <= max(row_ids) < vocab:
                wrong = next(i for i in row_ids if not 0 <= i < vocab)
                raise ValueError(f"context ids must be in [0, {vocab}); got {wrong} in row {row}")
        lengths = [len(row_ids) for row_ids in ids]
        if prompt_length is None:
            prompts = lengths
        else:
            prompt_lengths = torch.as_tensor(prompt_length)
            if prompt_lengths.dim() > 1 or (
                prompt_lengths.dim() == 1 and len(prompt_lengths) != rows
            ):
                raise ValueError(
                    f"prompt_length must be a number or one per row, {rows}; "
                    f"got shape {tuple(prompt_lengths.shape)}"
                )
            prompts = prompt_lengths.expand(rows).tolist()
            for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                if not 0 <= prompt <= length:
                    raise ValueError(
                        f"prompt_length must be from 0 to the {length} ids of context; "
                        f"got {prompt} in row {row}"
                    )
        return cls(ids, tuple(int(p) for p in prompts))

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, indices: Tensor) -> Context:
        """Return some of the rows."""
        chosen = indices.tolist()
        return Context(tuple(self.ids[i] for i in chosen), tuple(self.prompts[i] for i in chosen))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of ids of each row."""
        return tuple(len(row_ids) for row_ids in self.ids)

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """Generated ids of each row."""
        return tuple(row_ids[n:] for row_ids, n in zip(self.ids, self.prompts, strict=True))


def _lists(
    context: Tensor | Sequence[Sequence[int]] | None, rows: int, mask: Tensor | None
) -> tuple[tuple[int, ...], ...]:
    if context is None:
        return ((),) * rows
    if isinstance(context, Tensor):
        if context.is_floating_point() or context.dtype == torch.bool:
            raise TypeError(f"context must hold integer ids; got {context.dtype}")
        context = context.reshape(1, -1) if context.dim() == 1 else context
        if context.dim() != 2 or len(context) != rows:
            raise ValueError(
                f"context must have shape ({rows}, L), one row per row of logits; "
                f"got {tuple(context.shape)}"
            )
        if mask is None:
            return tuple(tuple(row_ids) for row_ids in context.tolist())
        if mask.shape != context.shape:
            raise ValueError(
                f"context_mask must have the shape of context, {tuple(context.shape)}; "
                f"got {tuple(mask.shape)}"
            )
        pairs = zip(context.tolist(), mask.tolist(), strict=True)
        return tuple(tuple(compress(row_ids, row_mask)) for row_ids, row_mask in pairs)
    if mask is not None:
        raise TypeError("context_mask needs a context tensor; got a list, which needs no padding")
    lists = list(context)
    if lists and isinstance(lists[0], int):  # one row
        lists = [lists]  # type: ignore[list-item]
    if len(lists) != rows:
        raise ValueError(f"context must have one list per row of logits, {rows}; got {len(lists)}")
    return tuple(tuple(int(i) for i in row_ids) for row_ids in lists)


PerRow = float | Sequence[float] | Tensor
"""A number, or one per row."""


@dataclass(frozen=True)
class Call:
    """The input of a stage besides the logits: one call of a sampler."""

    keys: Tensor  # (B, 2), seed and position of each row
    rows: Tensor  # (B,), indices of the rows in the sampler's batch
    batch: int  # number of rows of the sampler's batch
    vocab: int  # V
    context: Context  # the ids so far
    unconditional: Tensor | None = None  # (B, V), the logits without the prompt, for guidance
    surprise: Tensor | None = None  # (B,), mirostat's bound mu on the surprisal

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
        must_be_last: whether no stage may follow.
        keeps_argmax: whether the best token always remains the best one.
    """

    name: str
    must_be_last: ClassVar[bool] = False
    keeps_argmax: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, distribution: Distribution, call: Call) -> Distribution:
        """Return the distribution after this stage."""

    def __repr__(self) -> str:
        parameters = ", ".join(
            f"{k}={v!r}" for k, v in vars(self).items() if k[0] != "_" and k != "name"
        )
        return f"{type(self).__name__}({parameters})"


class Edit(Stage):
    """A stage that changes logits."""

    def __call__(self, distribution: Distribution, call: Call) -> Distribution:
        """Edit a copy of all logits."""
        z = distribution.to_full(call.vocab).scaled_logits()
        self.edit(z, call)
        return FullDistribution.of(z)

    @abstractmethod
    def edit(self, z: Tensor, call: Call) -> None:
        """Change z (B, V) in place, each token by its own logit."""

    def touches(self, call: Call) -> Sequence[Sequence[int]] | None:  # noqa: ARG002
        """Return, per row, the tokens whose logits it may change; None if that may be all."""
        return None


class Cut(Stage):
    """A stage that keeps some tokens.

    `find_candidates` selects from all tokens those that may be kept; `keep_mask` decides, given
    these tokens, best first, and the distribution before the cut.
    """

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
        """Return the kept tokens if there is a faster way to find them; else None."""
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
    values = torch.as_tensor(value, dtype=torch.float64, device=call.rows.device)
    if values.dim() == 0:
        return values.expand(len(call.rows)).contiguous()
    if values.shape != (call.batch,):
        raise ValueError(
            f"{name} must be a number or one per row, {call.batch}; got {values.numel()} of them"
        )
    return values[call.rows]


def any_row(value: PerRow | None, neutral: float) -> TypeGuard[PerRow]:
    """Return whether a parameter is given and differs in any row from the value without effect."""
    if value is None:
        return False
    return bool(torch.as_tensor(value, dtype=torch.float64).ne(neutral).any())


@dataclass(repr=False, eq=False)
class Temperature(Stage):
    """Divide by T. For temperature 0 the sampler takes the best token and skips this stage."""

    name = "temperature"
    keeps_argmax = True
    temperature: PerRow

    def __call__(self, distribution: Distribution, call: Call) -> Distribution:
        """Scale the logits; for a full distribution only the factor is stored."""
        return distribution.scaled(1 / per_row(self.name, self.temperature, call))


@dataclass(repr=False, eq=False)
class DynamicTemperature(Stage):
    """Divide by T', which goes from T - range to T + range with the entropy of the distribution.

    T' = low + (high - low) · (entropy / log(number of tokens))^exponent
    """

    name = "dynatemp_range"
    keeps_argmax = True
    _MIN_TEMPERATURE = 1e-6  # avoids division by zero
    temperature: PerRow
    range: PerRow
    exponent: PerRow = 1.0

    def __call__(self, distribution: Distribution, call: Call) -> Distribution:
        """Scale the logits by a temperature that depends on the entropy."""
        middle = per_row("temperature", self.temperature, call)
        range = per_row(self.name, self.range, call)
        exponent = per_row("dynatemp_exponent", self.exponent, call)
        low, high = (middle - range).clamp(min=0), middle + range
        share = torch.where(distribution.n > 1, distribution.entropy / distribution.n.log(), 0.0)
        temperature = low + (high - low) * share.clamp(0, 1) ** exponent
        temperature = torch.where((range > 0) & (distribution.n > 1), temperature, middle)
        return distribution.scaled(1 / temperature.clamp(min=self._MIN_TEMPERATURE))
