"""Proposal distributions q of sampled losses, and draws of negatives from them.

    uniform        q = 1 / V
    log_uniform    q = log((r + 2) / (r + 1)) / log(V + 1), r the rank by frequency: Zipf's law
    unigram        q = frequency of the token

A draw is a function of (seed, step, number): the same in every process.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lmhead.sampling.distribution import FOR_NEGATIVES, make_keys, uniforms
from lmhead.vocab.frequencies import check_frequencies

PROPOSALS = ("log_uniform", "unigram", "uniform")


def log_proposal(proposal: str, vocab_size: int, frequencies: Any) -> Tensor:
    """Return log q of every token, (V,), float64.

    With "unigram", tokens that never occur count for half of the rarest one: a target must be
    possible. With "log_uniform", ranks are those of `frequencies`, or the token ids.

    >>> log_proposal("log_uniform", 3, None).exp()
    tensor([0.5000, 0.2925, 0.2075], dtype=torch.float64)
    """
    if proposal not in PROPOSALS:
        raise ValueError(f"proposal must be one of {', '.join(PROPOSALS)}; got {proposal!r}")
    counts = None if frequencies is None else check_frequencies(frequencies, vocab_size)
    if proposal == "uniform":
        return torch.full((vocab_size,), -math.log(vocab_size), dtype=torch.float64)
    if proposal == "unigram":
        if counts is None:
            raise ValueError("frequencies must be given with proposal='unigram'; got None")
        rarest = counts[counts > 0].min()
        shares = torch.where(counts > 0, counts, rarest / 2)
        return (shares / shares.sum()).log()
    rank = torch.arange(vocab_size)
    if counts is not None:
        rank = torch.empty_like(rank).scatter_(
            0, counts.argsort(descending=True, stable=True), rank
        )
    return torch.log1p(1 / (rank.double() + 1)).log() - math.log(math.log(vocab_size + 1))


def draw_negatives(cumulated: Tensor, count: int, seed: int, step: int) -> Tensor:
    """Draw `count` tokens with replacement: (K,). `cumulated` (V,) is the running sum of q."""
    keys = make_keys([seed], torch.tensor([step]))
    u = uniforms(keys, torch.arange(count)[None], FOR_NEGATIVES)[0].to(cumulated.device)
    tokens = torch.searchsorted(cumulated, u * cumulated[-1], right=True)
    return tokens.clamp(max=len(cumulated) - 1)
