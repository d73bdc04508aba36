"""The log-probability of a sampled token among the tokens it was drawn from, with gradients.

A trainer that learns from sampled text needs a token's probability in the distribution that it was
drawn from: at the sampler's temperature, on the tokens that the sampler had kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lmhead.linear_query import query


def kept_log_prob(
    hidden: Tensor,
    weight: Tensor,
    token: Tensor,
    kept: Sequence[Tensor],
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    max_bytes: int | None = None,
) -> Tensor:
    """Return log p(token | one of `kept`), differentiable, through `query`.

    Equivalent to: (logits / temperature)[kept].log_softmax(-1)[token], per row.

    Args:
        hidden: (..., D).
        weight: (V, D).
        token: (...), as in `Sampled.token`.
        kept: per row the ids that could have been drawn, as in `Sampled.kept`.
        temperature: the sampler's.
        bias: (V,), as in `query`.
        softcap: as in `query`.
        scale: as in `query`.
        max_bytes: as in `query`.

    Returns:
        (...): equal to `Sampled.log_prob` if the stages were temperature and cuts.

    >>> from lmhead import Sampler
    >>> hidden, weight = torch.randn(2, 8), torch.randn(50, 8)
    >>> sampled = Sampler(top_k=5, temperature=0.7, seed=1)(hidden @ weight.T)
    >>> again = kept_log_prob(hidden, weight, sampled.token, sampled.kept, temperature=0.7)
    >>> torch.allclose(again.double(), sampled.log_prob, atol=1e-5)
    True
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0; got {temperature}")
    n = token.numel()
    if len(kept) != n:
        raise ValueError(f"kept must have one list per token, {n}; got {len(kept)}")
    vocab = weight.shape[0]
    # c / T · tanh((s / T) x / (c / T)) is c · tanh(s x / c), divided by T.
    cap = None if softcap is None else softcap / temperature
    lists = [ids.to(hidden.device) for ids in kept]
    sizes = torch.tensor([len(ids) for ids in lists], device=hidden.device)
    full = bool((sizes == vocab).all())
    ids = token.reshape(n, 1)
    if not full:
        padded = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True)
        present = (_not_padding(padded, sizes) & (padded == ids)).any(1)
        if not bool(present.all()):
            raise ValueError("kept must hold the token of every row; it does not")
        ids = torch.cat([ids, padded], 1)
    answers = query(
        hidden.reshape(n, -1),
        weight,
        bias=bias,
        softcap=cap,
        scale=scale / temperature,
        log_prob=ids,
        max_bytes=max_bytes,
    )
    log_prob = answers.log_prob[:, 0]
    if not full:
        kept_log_probs = answers.log_prob[:, 1:].masked_fill(
            ~_not_padding(ids[:, 1:], sizes), -torch.inf
        )
        log_prob = log_prob - kept_log_probs.logsumexp(1)
    return log_prob.reshape(token.shape)  # type: ignore[no-any-return]


def _not_padding(padded: Tensor, sizes: Tensor) -> Tensor:
    return torch.arange(padded.shape[1], device=padded.device)[None] < sizes[:, None]
