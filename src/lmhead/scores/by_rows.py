"""Answers from dense rows, a few rows at a time, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from lmhead.scores.protocol import Scores

DEFAULT_MAX_BYTES = 128 * 2**20


def kl_by_rows(p: Scores, q: Scores) -> Tensor:
    """Return KL(p ‖ q) of each row, (N,) in float64, from dense rows."""
    return by_rows(lambda z_p, z_q: divergence_of(z_p, z_q, "kl"), p, q)


def divergence_of(z_p: Tensor, z_q: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """Return a divergence of each row of two tensors of logits (N, V), by its definition: (N,).

    kl: Σ p log(p/q); reverse_kl: Σ q log(q/p); tvd: Σ |p - q| / 2;
    jsd: β KL(p ‖ m) + (1-β) KL(q ‖ m), with m = β p + (1-β) q.
    """
    if kind == "reverse_kl":
        return divergence_of(z_q, z_p, "kl")
    log_p, log_q = z_p.log_softmax(1), z_q.log_softmax(1)
    if kind == "kl":
        return _kl(log_p, log_q)
    if kind == "tvd":
        return (log_p.exp() - log_q.exp()).abs().sum(1) / 2
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    none = log_p == -math.inf  # 0 log 0 = 0; filled before the difference, for its gradient
    log_p = log_p.masked_fill(none, 0.0)
    gap = log_p - log_q.masked_fill(none, 0.0)
    return (log_p.exp().masked_fill(none, 0.0) * gap).sum(1)


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
