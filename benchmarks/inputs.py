"""Inputs of a benchmark: hidden states, weight and targets; real or generated.

Random logits would be flat, but the cost of the gradient filter, top-k and rank depends on how the
probability mass is spread. So `generate` imitates a trained language model, a prior over tokens
times what the context adds:

    z_v = log f_v + s_n · (g_v · c_n)

    f    frequency of a token, Zipf's law: 1 / (rank + 2.7)^1.25; ids are shuffled.
    g_v  direction of a token, random normal numbers.
    c_n  the context, of length one: noise plus the directions of 16 tokens drawn from f, so that it
         favours tokens that are frequent anyway.
    s_n  strength of the context: log-normal with σ = 0.6 around s.

Both parts are one linear layer: log f is the first column of the weight, where every hidden state
has a 1. `s`, an inverse temperature, is found by bisection so that the mean entropy is `ENTROPY`,
that of SmolLM2-135M on WikiText-2. The targets are drawn from the distributions themselves, since
a trained model is calibrated: its loss is near its entropy.

The result, compared with the model that it imitates (V = 49152, D = 576):

                          entropy in nats: mean, quartiles     p of the argmax   tokens kept*
    SmolLM2-135M          2.95      1.0   2.9   4.7            0.47              14 %
    generated             2.95      1.3   3.1   4.6            0.49              15 %

    * by grad_filter=0.02, in chunks of 128 rows
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

# Mean entropy of SmolLM2-135M-Instruct on the first 1024 tokens of WikiText-2's test set, in nats.
ENTROPY = 2.95

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ZIPF_SHIFT, _ZIPF_POWER = 2.7, 1.25
_FAVOURED_TOKENS = 16
_SPREAD = 0.6
# Number of logits made at a time, and number of logits used by the bisection.
_CHUNK, _SAMPLE = 2**24, 2**23


@dataclass(frozen=True)
class Inputs:
    """Hidden states (N, D), weight (V, D), targets (N,), and their origin.

    Attributes:
        entropy: mean entropy of the distributions, in nats.
        max_bytes: limit of temporary memory, for the implementations that have one.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    origin: str
    entropy: float
    max_bytes: int | None = None

    def to(self, dtype: str) -> Inputs:
        """Convert hidden states and weight to a dtype, given by name."""
        hidden, weight = (t.to(_TYPES[dtype]) for t in (self.hidden, self.weight))
        return replace(self, hidden=hidden, weight=weight)

    def detached(self) -> Inputs:
        """Return the same tensors as new leaves, on which gradients can be required."""
        return replace(self, hidden=self.hidden.detach(), weight=self.weight.detach())

    def save(self, path: Path) -> None:
        """Write a file for a fresh process."""
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> Inputs:
        """Read a file into memory: memory-mapped pages would be slower, and not count as memory."""
        return cls(**torch.load(path, weights_only=True))


def generate(
    vocab: int, hidden_size: int, tokens: int, *, entropy: float | None = None, seed: int = 0
) -> Inputs:
    """Return hidden states (tokens, hidden_size), a weight (vocab, hidden_size), targets; float32.

    Args:
        vocab: V.
        hidden_size: D, at least 2.
        tokens: N.
        entropy: mean over the rows, in nats; None for `ENTROPY`, or half of log V in a
            vocabulary too small for that.
        seed: the same seed gives the same numbers.

    >>> inputs = generate(200, 16, 32)
    >>> inputs.hidden.shape, inputs.weight.shape, inputs.targets.shape
    (torch.Size([32, 16]), torch.Size([200, 16]), torch.Size([32]))
    """
    random = torch.Generator().manual_seed(seed)
    target = min(ENTROPY, math.log(vocab) / 2) if entropy is None else entropy
    weight = torch.randn(vocab, hidden_size, generator=random)
    log_f = -_ZIPF_POWER * torch.log(torch.arange(vocab) + _ZIPF_SHIFT)
    weight[:, 0] = (log_f - log_f.mean())[torch.randperm(vocab, generator=random)]
    context = _contexts(weight, tokens, random)

    # A few evenly spaced rows are enough for the mean.
    sample = context[:: max(1, tokens * vocab // _SAMPLE)]
    prior, likelihood = weight[:, 0], sample @ weight[:, 1:].T
    low, high = 0.0, 100.0
    for _ in range(20):
        s = (low + high) / 2
        if mean_entropy(prior + s * likelihood) > target:
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
    """Return s_n · c_n / s, (tokens, D - 1)."""
    frequency = weight[:, 0].double().exp()
    favoured = torch.multinomial(frequency, tokens * _FAVOURED_TOKENS, True, generator=random)
    shares = torch.rand(tokens, _FAVOURED_TOKENS, generator=random) / math.sqrt(_FAVOURED_TOKENS)
    context = torch.randn(tokens, weight.shape[1] - 1, generator=random)
    for ids, share in zip(favoured.view(tokens, -1).T, shares.T, strict=True):
        context += share[:, None] * weight[ids, 1:]
    context /= context.norm(dim=1, keepdim=True)
    return context * torch.exp(_SPREAD * torch.randn(tokens, 1, generator=random))


def mean_entropy(logits: Tensor) -> float:
    """Return the mean entropy of the distributions of (N, V) logits, in nats.

    >>> round(mean_entropy(torch.zeros(3, 8)), 4) == round(math.log(8), 4)
    True
    """
    log_p = logits.log_softmax(-1)
    return -float((log_p.exp() * log_p).sum(-1).mean())
