"""One token, as in decoding: the float64 logits of all words, in one pass over the weight.

Reading the weight is what one product with it costs, and float64 sums are done while it is read: so
there is nothing to bound and nothing to settle afterwards, as in `exact`.

Without gradients: those are made from float32 logits, whose own sum belongs to them.

In:  questions. Out: the same as `run.answer`, or None where the general way has to be taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmhead.sweep import native
from lmhead.sweep.exact import in_order, no_order
from lmhead.sweep.kernels import FLOOR
from lmhead.sweep.plan import DEFAULT_MAX_BYTES
from lmhead.sweep.questions import Decisions, Questions, RowAnswers

_NUMBERS = 8  # float64 numbers per word, at most, that are held at a time
_MOST = 1024  # words to be sorted
_LARGE = 1e30  # logits that float32 might not hold, on the way


def answer(questions: Questions) -> tuple[RowAnswers, Decisions] | None:
    """All answers, (1, ...) each; None if it is more than one token, or the core cannot do it."""
    if not _serves(questions):
        return None
    q, source = questions, questions.source
    words = torch.arange(source.vocab, device=source.device)
    z = source.pairs(torch.zeros_like(words), words, max_bytes=DEFAULT_MAX_BYTES)
    # Written so that a NaN is none of it.
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
            ranks[0, place] = _rank(z, words, id)
        ranks = ranks.masked_fill(no_order(lse), -1)
    return RowAnswers(lse=lse, entropy=entropy, picked=picked), Decisions(values, ids, ranks)


def _serves(q: Questions) -> bool:
    """Whether it is one token, without gradients, and the compiled core can make its logits."""
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
    room = DEFAULT_MAX_BYTES if q.max_bytes is None else q.max_bytes
    if 8 * _NUMBERS * source.vocab > room:
        return False
    pairs = zip(source.hiddens, source.weights, strict=True)
    return all(native.for_pairs(h, w) is not None for h, w in pairs)


def _top(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of z (V,), lowest id first among equals: (1, k) each."""
    least = z.topk(k, sorted=False).values.amin()
    ids = (z >= least).nonzero()[:, 0]
    return in_order(z[ids][None], ids[None], k)


def _rank(z: Tensor, words: Tensor, id: Tensor) -> Tensor:
    """How many words come before one: larger, or equal with a lower id."""
    return ((z > z[id]) | ((z == z[id]) & (words < id))).sum()
