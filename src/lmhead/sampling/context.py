"""The token ids so far, for stages that depend on previous tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Context:
    """Per row the ids so far, without padding, and how many of them are the prompt."""

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
        for row, some in enumerate(ids):
            wrong = next((i for i in some if not 0 <= i < vocab), None)
            if wrong is not None:
                raise ValueError(f"context ids must be in [0, {vocab}); got {wrong} in row {row}")
        lengths = [len(some) for some in ids]
        if prompt_length is None:
            prompts = lengths
        else:
            given = torch.as_tensor(prompt_length)
            if given.dim() > 1 or (given.dim() == 1 and len(given) != rows):
                raise ValueError(
                    f"prompt_length must be a number or one per row, {rows}; "
                    f"got shape {tuple(given.shape)}"
                )
            prompts = given.expand(rows).tolist()
            for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                if not 0 <= prompt <= length:
                    raise ValueError(
                        f"prompt_length must be from 0 to the {length} ids of context; "
                        f"got {prompt} in row {row}"
                    )
        return cls(ids, tuple(int(p) for p in prompts))

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, some: Tensor) -> Context:
        """Return some of the rows."""
        chosen = some.tolist()
        return Context(tuple(self.ids[i] for i in chosen), tuple(self.prompts[i] for i in chosen))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of ids of each row."""
        return tuple(len(some) for some in self.ids)

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """Generated ids of each row."""
        return tuple(some[n:] for some, n in zip(self.ids, self.prompts, strict=True))


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
            return tuple(tuple(some) for some in context.tolist())
        if mask.shape != context.shape:
            raise ValueError(
                f"context_mask must have the shape of context, {tuple(context.shape)}; "
                f"got {tuple(mask.shape)}"
            )
        pairs = zip(context, mask.bool(), strict=True)
        return tuple(tuple(some[real].tolist()) for some, real in pairs)
    if mask is not None:
        raise TypeError("context_mask needs a context tensor; got a list, which needs no padding")
    given = list(context)
    if given and isinstance(given[0], int):  # one row
        given = [given]  # type: ignore[list-item]
    if len(given) != rows:
        raise ValueError(f"context must have one list per row of logits, {rows}; got {len(given)}")
    return tuple(tuple(int(i) for i in some) for some in given)
