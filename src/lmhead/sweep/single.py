"""One token, as in decoding: the float64 logits of all words, in one pass over the weight.

Reading the weight is what one product with it costs, and float64 sums are done while it is read: so
there is nothing to bound and nothing to settle afterwards, as in `exact`.

In:  questions that `serves` says yes to. Out: the same as `run.answer`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmhead.sweep import native
from lmhead.sweep.exact import in_order, no_order
from lmhead.sweep.kernels import FLOOR
from lmhead.sweep.plan import DEFAULT_MAX_BYTES
from lmhead.sweep.questions import Decisions, Questions, RowAnswers

_NUMBERS = 4  # float64 numbers per word, at most, that are held at a time


def serves(questions: Questions) -> bool:
    """Whether it is one token, and the compiled core can make its logits."""
    q, source = questions, questions.source
    if source.rows != 1 or q.active is not None:
        return False
    if q.other is not None or q.mix is not None or q.soft is not None:
        return False
    room = DEFAULT_MAX_BYTES if q.max_bytes is None else q.max_bytes
    if 8 * _NUMBERS * source.vocab > room:
        return False
    pairs = zip(source.hiddens, source.weights, strict=True)
    return all(native.for_pairs(h, w) is not None for h, w in pairs)


def answer(questions: Questions) -> tuple[RowAnswers, Decisions]:
    """All answers, (1, ...) each."""
    q, source = questions, questions.source
    words = torch.arange(source.vocab)
    z = source.pairs(torch.zeros_like(words), words, max_bytes=DEFAULT_MAX_BYTES)
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
        ranks = torch.stack([_rank(z, words, id) for id in q.rank_ids[0]])[None]
        ranks = ranks.masked_fill(no_order(lse), -1)
    return RowAnswers(lse=lse, entropy=entropy, picked=picked), Decisions(values, ids, ranks)


def _top(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of z (V,), lowest id first among equals: (1, k) each."""
    least = z.topk(k, sorted=False).values.amin()
    ids = (~(z < least)).nonzero()[:, 0] if math.isfinite(least) else torch.arange(len(z))
    return in_order(z[ids][None], ids[None], k)


def _rank(z: Tensor, words: Tensor, id: Tensor) -> Tensor:
    """How many words come before one: larger, or equal with a lower id."""
    return ((z > z[id]) | ((z == z[id]) & (words < id))).sum()
