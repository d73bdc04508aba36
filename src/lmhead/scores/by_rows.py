"""Answers from dense rows, a few rows at a time, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lmhead.scores.protocol import Scores

DEFAULT_MAX_BYTES = 128 * 2**20


def kl_by_rows(p: Scores, q: Scores) -> Tensor:
    """Return KL(p ‖ q) of each row, (N,) in float64, from dense rows."""
    size = max(1, (p.max_bytes or DEFAULT_MAX_BYTES) // (64 * p.vocab_size))

    def kl(first: int) -> Tensor:
        rows = slice(first, first + size)
        log_p = p.select(rows).dense().double().log_softmax(1)
        log_q = q.select(rows).dense().double().log_softmax(1)
        mass = log_p.exp()
        return (mass * (log_p - log_q)).masked_fill(mass == 0, 0.0).sum(1)

    if p.n_rows == 0:
        return kl(0)
    return torch.cat([recomputed(lambda i=i: kl(i)) for i in range(0, p.n_rows, size)])  # type: ignore[misc]


def recomputed(function: Callable[[], Tensor]) -> Tensor:
    """Return `function()`, computed again in the backward pass instead of being remembered."""
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return function()
    made: Tensor = checkpoint(function, use_reentrant=False)
    return made
