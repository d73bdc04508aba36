"""How often words occur: the door for counts, and a stand-in where nobody has counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Of the Zipf-Mandelbrot law 1 / (rank + b), which fits words of natural text.
_FLATTENED = 2.7


def check_frequencies(frequencies: Any, vocab_size: int) -> Tensor:
    """Counts or shares of V words as (V,) float64 on the CPU that sum to 1.

    >>> check_frequencies([3, 0, 1], 3)
    tensor([0.7500, 0.0000, 0.2500], dtype=torch.float64)
    """
    counts = check_counts(frequencies, vocab_size)
    return counts / counts.sum()


def check_counts(frequencies: Any, vocab_size: int) -> Tensor:
    """Counts or shares of V words as they are, (V,) float64 on the CPU.

    Words that never occur have 0. Raises where an entry is negative or not finite, where the number
    of entries is not V, or where all are 0.
    """
    given = isinstance(frequencies, Tensor | Sequence) or hasattr(frequencies, "__array__")
    if isinstance(frequencies, str) or not given:
        raise TypeError(
            "frequencies must be a tensor or a list of numbers, one per word; "
            f"got {type(frequencies).__name__}"
        )
    try:
        counts = torch.as_tensor(frequencies).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        odd = (f"got {x!r} for word {i}" for i, x in enumerate(frequencies) if not _is_number(x))
        raise TypeError(f"frequencies must be numbers, one per word; {next(odd, error)}") from None
    if counts.dtype == torch.bool or counts.is_complex():
        raise TypeError(f"frequencies must be numbers; got {counts.dtype}")
    counts = counts.double()
    if counts.shape != (vocab_size,):
        raise ValueError(
            f"frequencies must have one entry per word, ({vocab_size},); got {tuple(counts.shape)}"
        )
    wrong = ~(counts.isfinite() & (counts >= 0))
    if bool(wrong.any()):
        word = int(wrong.nonzero()[0])
        raise ValueError(
            f"frequencies must be finite and at least 0; got {float(counts[word])} for word {word}"
        )
    if not bool(counts.any()):
        raise ValueError("frequencies must not all be 0: no word was counted")
    return counts


def _is_number(given: Any) -> bool:
    return isinstance(given, int | float)


def zipf(vocab_size: int) -> Tensor:
    """Shares of words by rank, where they have not been counted: 1 / (rank + 2.7), (V,)."""
    shares = 1.0 / (torch.arange(1, vocab_size + 1, dtype=torch.float64) + _FLATTENED)
    return shares / shares.sum()
