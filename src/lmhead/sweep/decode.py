"""What decoding asks of a source: the top of some rows, or all logits of one."""

from __future__ import annotations

import torch
from torch import Tensor

from lmhead.sweep.autograd import row_answers
from lmhead.sweep.kernels import finish_
from lmhead.sweep.plan import DEFAULT_MAX_BYTES
from lmhead.sweep.questions import Questions
from lmhead.sweep.source import Source


def top_of_rows(source: Source, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest logits of each row, their ids, and log Σ exp over all words: one sweep.

    (N, k), (N, k) and (N,); float64, exact in value and order, ties to the lowest id.
    """
    with torch.no_grad():
        answers, decisions = row_answers(Questions(source, top_k=k))
    assert answers.lse is not None
    assert decisions.top_values is not None
    assert decisions.top_ids is not None
    return decisions.top_values, decisions.top_ids, answers.lse


def whole_row(source: Source, row: int) -> Tensor:
    """All logits of one row, (V,), in the type of the products.

    Made alone, so that they do not depend on the batch around it.
    """
    with torch.no_grad(), source.products():
        hiddens = source.take(slice(row, row + 1))
        turned = tuple(h.T.contiguous() for h in hiddens)
        z = turned[0].new_empty(source.vocab, 1)
        # Half precisions are converted a tile at a time.
        tile = max(1, DEFAULT_MAX_BYTES // (8 * source.hidden_size)) if source.converts else 0
        for lo in range(0, source.vocab, tile or source.vocab):
            hi = min(source.vocab, lo + (tile or source.vocab))
            out = source.linear_tile(turned, lo, hi, z[lo:hi])
            finish_(out, source.bias_tile(lo, hi), source.pointwise)
        return z[:, 0]
