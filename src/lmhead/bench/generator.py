"""Made-up hidden states whose distributions are as peaked as those of a trained model.

Flat random logits would flatter nobody and mislead everybody: the gradient filter, top-k and the
rank all depend on how the mass is spread. So the generator imitates what a language model does,
a prior over words times what the context says:

    z_v = log f_v + s_n · (g_v · c_n)

    f    the frequency of a word, Zipf's law: 1 / (rank + 2.7)^1.25; ids are shuffled.
    g_v  the word's own direction, random normal numbers.
    c_n  the context, of length one: noise plus the directions of 16 words drawn from f, so that it
         is aimed at words that are likely anyhow.
    s_n  how much the context knows: log-normal with σ = 0.6 around s.

Both parts are one linear layer: log f is the first column of the weight, where every hidden state
has a 1. `s`, an inverse temperature, is found by bisection so that the mean entropy is `ENTROPY`,
that of SmolLM2-135M on WikiText-2. The targets are drawn from the distributions themselves, since
a trained model is calibrated: its loss is near its entropy.

What comes out, beside the model that it imitates (V = 49152, D = 576):

                          entropy in nats: mean, quartiles     p of the best word   words kept*
    SmolLM2-135M          2.95      1.0   2.9   4.7            0.47                 14 %
    the generator         2.95      1.3   3.1   4.6            0.49                 15 %

    * by grad_filter=0.02, of chunks of 128 tokens
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmhead.bench.data import Inputs

# Of SmolLM2-135M-Instruct on the first 1024 tokens of WikiText-2's test set, in nats.
ENTROPY = 2.95

_ZIPF_SHIFT, _ZIPF_POWER = 2.7, 1.25
_LIKELY_WORDS = 16
_SPREAD = 0.6
# Logits made at a time, and logits that the bisection looks at.
_CHUNK, _SAMPLE = 2**24, 2**23


def generate(
    vocab: int, hidden_size: int, tokens: int, *, entropy: float | None = None, seed: int = 0
) -> Inputs:
    """Hidden states (tokens, hidden_size), a weight (vocab, hidden_size) and targets, float32.

    Args:
        vocab: V.
        hidden_size: D, at least 2.
        tokens: N.
        entropy: the mean over tokens, in nats; None for `ENTROPY`, or half of log V in a
            vocabulary too small for that.
        seed: the same seed gives the same numbers.

    >>> inputs = generate(200, 16, 32)
    >>> inputs.hidden.shape, inputs.weight.shape, inputs.targets.shape
    (torch.Size([32, 16]), torch.Size([200, 16]), torch.Size([32]))
    """
    random = torch.Generator().manual_seed(seed)
    wanted = min(ENTROPY, math.log(vocab) / 2) if entropy is None else entropy
    weight = torch.randn(vocab, hidden_size, generator=random)
    log_f = -_ZIPF_POWER * torch.log(torch.arange(vocab) + _ZIPF_SHIFT)
    weight[:, 0] = (log_f - log_f.mean())[torch.randperm(vocab, generator=random)]
    context = _contexts(weight, tokens, random)

    # Few rows tell the mean well enough, if they are taken from everywhere.
    some = context[:: max(1, tokens * vocab // _SAMPLE)]
    prior, likelihood = weight[:, 0], some @ weight[:, 1:].T
    low, high = 0.0, 100.0
    for _ in range(20):
        s = (low + high) / 2
        if mean_entropy(prior + s * likelihood) > wanted:
            low = s
        else:
            high = s

    hidden = torch.cat([torch.ones(tokens, 1), s * context], dim=1)
    targets, total = [], 0.0
    for rows in torch.split(hidden, max(1, _CHUNK // vocab)):
        logits = rows @ weight.T
        targets.append(torch.multinomial(logits.softmax(-1), 1, generator=random)[:, 0])
        total += mean_entropy(logits) * len(rows)
    return Inputs(
        hidden, weight, torch.cat(targets), f"generated, seed {seed}", entropy=total / tokens
    )


def _contexts(weight: Tensor, tokens: int, random: torch.Generator) -> Tensor:
    """s_n · c_n / s, (tokens, D - 1)."""
    frequency = weight[:, 0].double().exp()
    likely = torch.multinomial(frequency, tokens * _LIKELY_WORDS, True, generator=random)
    shares = torch.rand(tokens, _LIKELY_WORDS, generator=random) / math.sqrt(_LIKELY_WORDS)
    context = torch.randn(tokens, weight.shape[1] - 1, generator=random)
    for ids, share in zip(likely.view(tokens, -1).T, shares.T, strict=True):
        context += share[:, None] * weight[ids, 1:]
    context /= context.norm(dim=1, keepdim=True)
    return context * torch.exp(_SPREAD * torch.randn(tokens, 1, generator=random))


def mean_entropy(logits: Tensor) -> float:
    """Of the distributions of (N, V) logits, in nats.

    >>> round(mean_entropy(torch.zeros(3, 8)), 4) == round(math.log(8), 4)
    True
    """
    log_p = logits.log_softmax(-1)
    return -float((log_p.exp() * log_p).sum(-1).mean())
