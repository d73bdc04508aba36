"""What generation asks of a model: a body, a head, the ids that end a text, perhaps a tokenizer.

These are structural types: any object with these attributes will do, nothing has to be inherited.
The body turns ids into hidden states and remembers what it has read in a cache; the head turns
hidden states into logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from lmhead.logits import LazyLogits


class Cache(Protocol):
    """What a body remembers of the ids it has read, one entry per row of the batch."""

    def select(self, rows: Tensor, /) -> Cache:
        """The cache of these rows, (B',) int64; a row may repeat or be left out."""
        ...


class Body(Protocol):
    """A model without its head."""

    # A body takes back only the caches that it gave out, whatever their type: hence Any.
    def __call__(self, ids: Tensor, cache: Any, mask: Tensor, /) -> tuple[Tensor, Any]:
        """Read new ids.

        Args:
            ids: (B, T), int64, the new ids.
            cache: what the last call gave back (a `Cache`), or None at the start.
            mask: (B, T_before + T), bool, False for padding, which is on the left.

        Returns:
            Hidden states (B, T, D) after the final norm, and the `Cache`.
        """
        ...


class Tokenizer(Protocol):
    """Text to ids, and an id to its bytes."""

    def encode(self, text: str, /) -> list[int]:
        """The ids of a text."""
        ...

    def token_bytes(self, id: int, /) -> bytes:
        """The bytes of one id; a character may be spread over several."""
        ...


class Model(Protocol):
    """A language model, as generation sees it."""

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
        """For stop strings and text; None where ids are all there is."""
        ...
