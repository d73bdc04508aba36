"""Token frequencies: validate counts; Zipf's law if they are unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# b of the Zipf-Mandelbrot law 1 / (rank + b), which fits tokens of natural text.
_MANDELBROT_B = 2.7


def check_frequencies(frequencies: Any, vocab_size: int) -> Tensor:
    """Return counts or shares of V tokens as (V,) float64 on the CPU that sum to 1.

    >>> check_frequencies([3, 0, 1], 3)
    tensor([0.7500, 0.0000, 0.2500], dtype=torch.float64)
    """
    counts = check_counts(frequencies, vocab_size)
    return counts / counts.sum()


def check_counts(frequencies: Any, vocab_size: int) -> Tensor:
    """Validate counts or shares of V tokens, and return them as (V,) float64 on the CPU.

    Tokens that never occur have 0. Raises if an entry is negative or not finite, if the number
    of entries is not V, or if all are 0.
    """
    is_array = isinstance(frequencies, Tensor | Sequence) or hasattr(frequencies, "__array__")
    if isinstance(frequencies, str) or not is_array:
        raise TypeError(
            "frequencies must be a tensor or a list of numbers, one per token; "
            f"got {type(frequencies).__name__}"
        )
    try:
        counts = torch.as_tensor(frequencies).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        wrong_type = (
            f"got {x!r} for token {i}" for i, x in enumerate(frequencies) if not _is_number(x)
        )
        raise TypeError(
            f"frequencies must be numbers, one per token; {next(wrong_type, error)}"
        ) from None
    if counts.dtype == torch.bool or counts.is_complex():
        raise TypeError(f"frequencies must be numbers; got {counts.dtype}")
    counts = counts.double()
    if counts.shape != (vocab_size,):
        raise ValueError(
            f"frequencies must have one entry per token, ({vocab_size},); got {tuple(counts.shape)}"
        )
    wrong = ~(counts.isfinite() & (counts >= 0))
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        raise ValueError(
            f"frequencies must be finite and at least 0; "
            f"got {float(counts[token])} for token {token}"
        )
    if not bool(counts.any()):
        raise ValueError("frequencies must not all be 0: no token was counted")
    return counts


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def zipf(vocab_size: int) -> Tensor:
    """Return shares of tokens by rank, proportional to 1 / (rank + 2.7): (V,)."""
    shares = 1.0 / (torch.arange(1, vocab_size + 1, dtype=torch.float64) + _MANDELBROT_B)
    return shares / shares.sum()
