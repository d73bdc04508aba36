"""One row, as in decoding: the float64 logits of all tokens, in one pass over the weight.

Reading the weight is what one product with it costs, and float64 sums are done while it is read: so
error bounds and a second pass, as in `exact_decisions`, are not needed.

Without gradients: those need the float32 logits and their sum.

In:  questions. Out: the same as `run_sweep.answer`, or None where the general sweep is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmhead.scores.row_loss import RowSums
from lmhead.sweep import native
from lmhead.sweep.exact_decisions import in_order, no_order
from lmhead.sweep.kernels import FLOOR
from lmhead.sweep.plan import DEFAULT_MAX_BYTES
from lmhead.sweep.questions import Decisions, Questions

_NUMBERS = 8  # float64 numbers per token, at most, that are held at a time
_MOST = 1024  # tokens to be sorted
_LARGE = 1e30  # logits that float32 might not hold, on the way


def answer(questions: Questions) -> tuple[RowSums, Decisions] | None:
    """Return all answers, (1, ...) each; None for several rows, or if the core cannot do it."""
    if not _supports(questions):
        return None
    q, source = questions, questions.source
    tokens = torch.arange(source.vocab, device=source.device)
    z = source.pairs(torch.zeros_like(tokens), tokens, max_bytes=DEFAULT_MAX_BYTES)
    # NaN fails this test.
    if not bool(((z.abs() < _LARGE) | (z == -torch.inf)).all()):
        return None
    lse = z.logsumexp(0, keepdim=True)
    entropy = None
    if q.entropy:
        log_p = (z - lse).clamp_(min=FLOOR)
        entropy = -(log_p.exp() * log_p).sum(0, keepdim=True)
    picked = None if q.ids is None else z[q.ids]
    values = ids = ranks = None
    if q.top_k:
        values, ids = _top(z, q.top_k)
        ids = ids.masked_fill(no_order(lse), -1)
    if q.rank_ids is not None:
        ranks = torch.zeros_like(q.rank_ids)
        for place, id in enumerate(q.rank_ids[0]):
            ranks[0, place] = _rank(z, tokens, id)
        ranks = ranks.masked_fill(no_order(lse), -1)
    return RowSums(lse=lse, entropy=entropy, picked=picked), Decisions(values, ids, ranks)


def _supports(q: Questions) -> bool:
    """Return whether it is one row, without gradients, that the compiled core can compute."""
    source = q.source
    if source.rows != 1 or q.active is not None or q.top_k > _MOST:
        return False
    if q.other is not None or q.mix is not None or q.soft is not None:
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    given = [t for t in q.tensors() if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return False
    budget = DEFAULT_MAX_BYTES if q.max_bytes is None else q.max_bytes
    if 8 * _NUMBERS * source.vocab > budget:
        return False
    pairs = zip(source.hiddens, source.weights, strict=True)
    return all(native.for_pairs(h, w) is not None for h, w in pairs)


def _top(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of z (V,), lowest id first among equals: (1, k) each."""
    least = z.topk(k, sorted=False).values.amin()
    ids = (z >= least).nonzero()[:, 0]
    return in_order(z[ids][None], ids[None], k)


def _rank(z: Tensor, tokens: Tensor, id: Tensor) -> Tensor:
    """Return how many tokens come before one: larger, or equal with a lower id."""
    return ((z > z[id]) | ((z == z[id]) & (tokens < id))).sum()
