"""Logits that are kept, for several sweeps that compare others with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmhead.scores import Scores
from lmhead.sweep import kernels
from lmhead.sweep.kernels import Pointwise
from lmhead.sweep.questions import DEFAULT_MAX_BYTES
from lmhead.sweep.source import Source
from lmhead.sweep.swept_scores import SweptScores

_TILE = 8192  # tokens


@dataclass(frozen=True)
class StoredLogits(Source):
    """A source whose weight is the logits themselves, (V, N); its hidden states are row numbers.

    Its tiles are copies of the logits. It serves as `Questions.other`, without gradients.
    """

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Source:
        """Return the same source on other tensors."""
        numbers, logits, _ = tensors
        return replace(self, hiddens=(numbers,), weights=(logits,))  # type: ignore[arg-type]

    def linear_tile(self, transposed: tuple[Tensor, ...], lo: int, hi: int, out: Tensor) -> Tensor:
        """Copy the logits of tokens [lo, hi) into `out`, (hi - lo, B)."""
        rows = transposed[0][0].long()
        return torch.index_select(self.weights[0][lo:hi], 1, rows, out=out)


@torch.no_grad()
def stored(scores: Scores) -> Scores:
    """Return scores whose logits are computed now, and once; the same if they do not fit.

    They must fit half of `max_bytes`: the sweeps that use them need the rest. Only for `kl_to`:
    for float32 inputs they are float32, not exact enough for argmax or ranks.
    """
    if not isinstance(scores, SweptScores) or torch._C._are_functorch_transforms_active():
        return scores
    source, n = scores.source, scores.n_rows
    budget = DEFAULT_MAX_BYTES if scores.max_bytes is None else scores.max_bytes
    if 2 * source.vocab * n * source.dtype.itemsize > budget:
        return scores
    logits = torch.empty(source.vocab, n, dtype=source.dtype, device=source.device)
    transposed = tuple(h.T.contiguous() for h in source.take(slice(0, n)))
    with source.products():
        for lo in range(0, source.vocab, _TILE):
            hi = min(lo + _TILE, source.vocab)
            z = source.linear_tile(transposed, lo, hi, logits[lo:hi])
            kernels.finish_(z, source.bias_tile(lo, hi), source.pointwise, source.row_scale)
    numbers = torch.arange(n, dtype=source.dtype, device=source.device)[:, None]
    return SweptScores(StoredLogits((numbers,), (logits,), None, Pointwise()))
