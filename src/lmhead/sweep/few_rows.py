"""Argmax and top-k of 2 to 16 rows: one pass over the weight, then a few float64 logits.

The compiled core sums the logits in float32 while it reads the weight, and finds the largest |w|
as well. That bounds the error of every logit: only tokens within twice that bound of the k-th best
can be among the k best, and their logits are computed in float64.

For more rows the sweep is as fast. For one row `answer_one_row` has float64 logits of all tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lmhead.scores.row_loss import RowSums
from lmhead.sweep import kernels
from lmhead.sweep.exact_decisions import in_order
from lmhead.sweep.questions import DEFAULT_MAX_BYTES, Decisions, Questions
from lmhead.sweep.source import Source

_MAX_ROWS = 16
_MAX_K = 1024
_MAX_CANDIDATES = 4096  # per row; exceeded only if many logits are nearly equal
_TILE = 1 << 19  # logits in memory at a time: two megabytes
_LARGE = 1e30  # above this, a partial sum may overflow float32
# Largest error of a float32 dot product, relative to |w| |h|: see native/float_logits.cpp.
_ERROR = 2.0**-17
_U = 2.0**-24  # unit roundoff of float32


class _Tile(NamedTuple):
    """Answers about a range of tokens, for all rows: parts of the log-sum-exp, and the top k."""

    largest: Tensor
    mass: Tensor  # Σ exp(z - largest)
    weighted: Tensor  # Σ exp(z - largest) (z - largest)
    values: Tensor  # (N, k), float64
    ids: Tensor


def answer_few_rows(questions: Questions) -> tuple[RowSums, Decisions] | None:
    """Return what `run_sweep.row_answers` returns; None if this method does not apply."""
    q, source = questions, questions.source
    if kernels.core is None or not _supports(q):
        return None
    answered = []
    tiles = math.ceil(source.rows * source.vocab / _TILE)
    step = math.ceil(source.vocab / tiles)
    for lo in range(0, source.vocab, step):
        tile = _answer_tile(source, lo, min(lo + step, source.vocab), q.top_k)
        if tile is None:
            return None
        answered.append(tile)
    largest = torch.stack([t.largest for t in answered]).amax(0)
    mass, weighted = torch.zeros_like(largest), torch.zeros_like(largest)
    for t in answered:
        below = t.largest - largest
        mass += below.exp() * t.mass
        weighted += below.exp() * (t.weighted + below * t.mass)
    entropy = mass.log() - weighted / mass if q.entropy else None
    picked = None if q.ids is None else source.at(q.ids)
    values, ids = (
        torch.cat(parts, 1) for parts in ([t.values for t in answered], [t.ids for t in answered])
    )
    top = in_order(values, ids, q.top_k)  # equal values are in the order of their ids already
    return RowSums(lse=largest + mass.log(), entropy=entropy, picked=picked), Decisions(*top, None)


def _answer_tile(all_tokens: Source, lo: int, hi: int, k: int) -> _Tile | None:
    """Return the answers for tokens [lo, hi); None if this method does not apply."""
    core = kernels.core
    if core is None:
        return None
    bias = None if all_tokens.bias is None else all_tokens.bias[lo:hi]
    source = replace(all_tokens, weights=(all_tokens.weights[0][lo:hi],), bias=bias)
    square = torch.zeros(1, dtype=torch.float64, device=source.device)
    z = kernels.row_logits(source.hiddens[0], source.weights[0], dtype=torch.float32, square=square)
    if z is None or not all(abs(float(end)) < _LARGE for end in z.aminmax()):
        return None  # NaN fails the test
    if source.bias is not None or not source.pointwise.is_identity:
        z = source.finished(z.double()).float()
    n = z.shape[0]
    largest, count = z.new_empty(2, n, dtype=torch.float64)
    core.row_max(*kernels.views(z, largest, count), kernels.threads())
    top = _top(source, z, min(k, hi - lo), float(square) ** 0.5)
    if top is None:
        return None
    sums = z.new_empty(2, 1, n, dtype=torch.float64)
    ones = z.new_ones(1, n, dtype=torch.float64)
    core.row_softmax_sums(*kernels.views(z, ones, largest, sums), kernels.threads())
    return _Tile(largest, sums[0, 0], sums[1, 0], top[0], top[1] + lo)


def _supports(q: Questions) -> bool:
    """Return whether the question is for few rows, without gradients, of one weight."""
    source = q.source
    if not 2 <= source.rows <= _MAX_ROWS or not 1 <= q.top_k <= min(_MAX_K, source.vocab):
        return False
    others = (q.active, q.shard, q.other, q.mix, q.soft, q.rank_ids, source.row_scale)
    if any(other is not None for other in others) or q.log_sum_sq:
        return False
    if len(source.weights) > 1 or source.dtype != torch.float32:
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    tensors = [t for t in q.tensors() if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    budget = DEFAULT_MAX_BYTES if q.max_bytes is None else q.max_bytes
    # A logit takes 4 bytes in float32, and twice 8 in float64 for a bias or a map.
    return 20 * min(_TILE + source.rows, source.rows * source.vocab) <= budget


def _top(source: Source, z: Tensor, k: int, norm: float) -> tuple[Tensor, Tensor] | None:
    """Return the k largest by float64 logits and their ids, (N, k); None if undecided.

    `z` (N, V) are the logits, `norm` is the largest |w|.
    """
    core = kernels.core
    if core is None:
        return None
    n, vocab = z.shape
    kth, places = z.new_empty(n), z.new_full((n,), k, dtype=torch.int64)
    core.row_kth_largest(*kernels.views(z, places, kth), kernels.threads())
    lo = kth.double() - 2.0 * _error(source, norm, kth.double())
    if not bool(lo.isfinite().all()):
        return None  # masked tokens in the top k, or norms that overflow float32
    below = torch.nextafter(lo.float(), z.new_tensor(-torch.inf))
    width = min(vocab, _MAX_CANDIDATES)
    counts = z.new_empty(n, dtype=torch.int64)
    ids = z.new_zeros(n, width, dtype=torch.int64)
    scratch = z.new_empty(n, width, dtype=torch.float64)
    above = z.new_full((n,), torch.inf)
    core.row_range(*kernels.views(z, below, above, counts, ids, scratch), kernels.threads())
    widest = int(counts.max())
    if widest > width or int(counts.min()) < k:
        return None
    missing = torch.arange(widest, device=z.device) >= counts[:, None]
    ids = ids[:, :widest].masked_fill(missing, vocab).sort(1).values
    missing = ids == vocab
    ids = ids.masked_fill(missing, 0)
    values = source.at(ids).masked_fill(missing, -torch.inf)
    return in_order(values, ids, k)


def _error(source: Source, norm: float, z: Tensor) -> Tensor:
    """Return a bound on the error of float32 logits of about z, (N,)."""
    p, hidden = source.pointwise, source.hiddens[0]
    size: Tensor = torch.linalg.vector_norm(hidden.detach(), dim=1, dtype=torch.float64)
    # 1 % covers the rounding of the norms and of this bound; `tiny` covers underflow.
    tiny = 4 * (source.hidden_size + 4) * torch.finfo(torch.float32).tiny
    map_error = 8 * _U * (abs(p.outer) if p.bounded else abs(p.shift))
    linear = 1.01 * _ERROR * norm * size + tiny
    error: Tensor = linear * max(1.0, p.lipschitz) + 4 * _U * z.abs() + map_error
    return error
