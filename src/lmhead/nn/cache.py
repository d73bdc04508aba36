"""Keys and values of the tokens processed so far, so that no token is processed twice."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one layer: (B, G, S, d) each."""


@dataclass(frozen=True)
class Memory:
    """Keys and values of the encoder's output, for cross-attention.

    Attributes:
        keys, values: per layer (B, G, S, d) each.
        mask: (B, S) bool, False for padding of the source; None for no padding.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor | None = None

    def select(self, rows: Tensor) -> Memory:
        """Return the memory of the rows (B',), which may repeat or drop some."""
        mask = None if self.mask is None else self.mask.index_select(0, rows)
        return Memory(_select(self.keys, rows), _select(self.values, rows), mask)


@dataclass(frozen=True)
class KeyValueCache:
    """Keys and values of the tokens processed so far: per layer (B, G, S, d) each.

    Immutable: processing more tokens returns a new cache, so that several continuations can share
    one prefix. `memory` holds the encoder's keys and values in a model with cross-attention.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    memory: Memory | None = None

    @property
    def length(self) -> int:
        """The number S of tokens, padding included."""
        return self.keys[0].shape[2]

    def layer(self, index: int) -> KeyValue:
        """Return the keys and values of one layer."""
        return self.keys[index], self.values[index]

    def select(self, rows: Tensor) -> KeyValueCache:
        """Return the cache of the rows (B',), which may repeat or drop some."""
        memory = None if self.memory is None else self.memory.select(rows)
        return KeyValueCache(_select(self.keys, rows), _select(self.values, rows), memory)


def _select(tensors: tuple[Tensor, ...], rows: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.index_select(0, rows) for tensor in tensors)
