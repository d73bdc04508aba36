"""What attention remembers of the tokens it has read, so that no token is read twice."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one layer: (B, G, S, d) each."""


@dataclass(frozen=True)
class KeyValueCache:
    """Keys and values of the tokens read so far: per layer (B, G, S, d) each.

    A value: reading more tokens makes a new cache and leaves this one as it is, so that several
    texts can go on from one beginning.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def length(self) -> int:
        """The number S of tokens, padding included."""
        return self.keys[0].shape[2]

    def layer(self, index: int) -> KeyValue:
        """Keys and values of one layer."""
        return self.keys[index], self.values[index]

    def select(self, rows: Tensor) -> KeyValueCache:
        """The cache of the rows (B',), which may repeat or drop some."""
        return KeyValueCache(
            tuple(key.index_select(0, rows) for key in self.keys),
            tuple(value.index_select(0, rows) for value in self.values),
        )
