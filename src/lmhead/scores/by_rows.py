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

    def kl(z_p: Tensor, z_q: Tensor) -> Tensor:
        log_p, log_q = z_p.log_softmax(1), z_q.log_softmax(1)
        mass = log_p.exp()
        return (mass * (log_p - log_q)).masked_fill(mass == 0, 0.0).sum(1)

    return by_rows(kl, p, q)


def by_rows(function: Callable[..., Tensor], *scores: Scores) -> Tensor:
    """Return a function of dense float64 rows of some scores, (N,)."""
    first = scores[0]
    size = max(1, (first.max_bytes or DEFAULT_MAX_BYTES) // (64 * first.vocab_size))

    def block(start: int) -> Tensor:
        rows = slice(start, start + size)
        return function(*(s.select(rows).dense().double() for s in scores))

    if first.n_rows == 0:
        return block(0)
    return torch.cat([recomputed(lambda i=i: block(i)) for i in range(0, first.n_rows, size)])  # type: ignore[misc]


def mean_finite(z: Tensor) -> Tensor:
    """Return the mean of each row of z (N, V) without its -inf."""
    masked = z == -torch.inf
    return z.masked_fill(masked, 0.0).sum(1) / (~masked).sum(1)


def recomputed(function: Callable[[], Tensor]) -> Tensor:
    """Return `function()`, computed again in the backward pass instead of being remembered."""
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return function()
    made: Tensor = checkpoint(function, use_reentrant=False)
    return made
