"""Protocols of a model for generation: body, head, end token ids, and optionally a tokenizer.

These are structural types: any object with these attributes works, without inheritance.
The body turns ids into hidden states and keeps keys and values in a cache; the head turns
hidden states into logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from lmhead.lazy import LazyLogits


class Cache(Protocol):
    """State of a body after the ids it has processed, one entry per row of the batch."""

    def select(self, rows: Tensor, /) -> Cache:
        """Return the cache of these rows, (B',) int64; a row may repeat or be left out."""
        ...


class Body(Protocol):
    """A model without its head."""

    # A body accepts only its own caches, of any type: hence Any.
    def __call__(self, ids: Tensor, cache: Any, mask: Tensor, /) -> tuple[Tensor, Any]:
        """Process new ids.

        Args:
            ids: (B, T), int64, the new ids.
            cache: what the last call returned (a `Cache`), or None at the start.
            mask: (B, T_before + T), bool, False for padding, which is on the left.

        Returns:
            Hidden states (B, T, D) after the final norm, and the `Cache`.
        """
        ...


class Tokenizer(Protocol):
    """Text to ids, and an id to its bytes."""

    def encode(self, text: str, /) -> list[int]:
        """Return the ids of a text."""
        ...

    def token_bytes(self, id: int, /) -> bytes:
        """Return the bytes of one id; a character may be spread over several ids."""
        ...


class Model(Protocol):
    """A language model."""

    @property
    def body(self) -> Body:
        """Ids to hidden states (B, T, D)."""
        ...

    @property
    def head(self) -> Callable[[Tensor], LazyLogits | Tensor]:
        """Hidden states (..., D) to logits (..., V)."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text; () for none."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """For stop strings and text; None if there is none."""
        ...
