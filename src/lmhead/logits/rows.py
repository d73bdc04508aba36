"""What decoding asks of lazy logits, row by row: the top, some words, all words of one row.

In:  what is behind the logits.
Out: float64 numbers that do not depend on the batch around a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lmhead.sweep import Source, top_of_rows, whole_row

_PAIR_BYTES = 2**26


class Rows(Protocol):
    """N rows of logits over V words, none of them built."""

    def select(self, which: Tensor) -> Rows:
        """Some of the rows, (M,)."""
        ...

    def top(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """The k largest logits, their ids, and log Σ exp of all: (N, k), (N, k), (N,).

        Largest first, lowest id first among equals; a row without an order has NaN or inf.
        """
        ...

    def at(self, ids: Tensor) -> Tensor:
        """The logits of words (N, K), in float64."""
        ...

    def whole(self, row: int) -> Tensor:
        """All logits of one row, (V,), made alone."""
        ...

    def __len__(self) -> int:
        """N."""
        ...


@dataclass(frozen=True)
class SweptRows:
    """Rows of a linear layer."""

    source: Source

    def __len__(self) -> int:
        return self.source.rows

    def select(self, which: Tensor) -> SweptRows:
        """Some of the rows, (M,)."""
        return SweptRows(self.source.select(which))

    def top(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """The k largest logits, their ids, and log Σ exp of all: one sweep."""
        return top_of_rows(self.source, k)

    def at(self, ids: Tensor) -> Tensor:
        """The logits of words (N, K)."""
        numbers = torch.arange(len(ids))[:, None].expand_as(ids).reshape(-1)
        flat = self.source.pairs(numbers, ids.reshape(-1), max_bytes=_PAIR_BYTES)
        return flat.reshape(ids.shape)

    def whole(self, row: int) -> Tensor:
        """All logits of one row, (V,)."""
        return whole_row(self.source, row)
