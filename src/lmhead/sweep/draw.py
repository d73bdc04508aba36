"""Sampling words from softmax(z) by inverse CDF, tile by tile."""

from __future__ import annotations

import torch
from torch import Tensor

from lmhead.sweep import kernels
from lmhead.sweep.questions import Questions
from lmhead.sweep.run import answer, chunks, in_own_precision


def log_sums(questions: Questions) -> Tensor:
    """log Σ exp z of each token, (N,), of the very logits that `draw` goes through."""
    answers, _ = answer(questions)
    assert answers.lse is not None
    return answers.lse


@in_own_precision
def draw(questions: Questions, lse: Tensor, uniforms: Tensor) -> Tensor:
    """The word v with P(< v) <= u < P(<= v), for each u in [0, 1): (N, S) to (N, S).

    A word of probability 0 is never drawn. `lse` is what `log_sums` gives.
    """
    drawn = torch.full(uniforms.shape, -1, dtype=torch.int64, device=uniforms.device)
    for rows, chunk in chunks(questions):
        u = uniforms[rows].double()
        mass = u.new_zeros(len(u), 1)  # of the tiles before
        found = drawn[rows]
        last = torch.zeros_like(found[:, 0])  # the last word with p > 0, for u above the sum
        for lo, hi, z in chunk.logits():
            p = kernels.subtract_(z, lse[rows]).exp_()
            words = torch.arange(lo, hi, device=p.device)[:, None]
            last = torch.maximum(last, torch.where(p > 0, words, 0).amax(0))
            cumulated = p.T.double().cumsum(1).add_(mass)
            here = torch.searchsorted(cumulated, u, right=True)
            found = torch.where((found < 0) & (here < hi - lo), here + lo, found)
            mass = cumulated[:, -1:]
        drawn[rows] = torch.where(found < 0, last[:, None], found)
    return drawn
