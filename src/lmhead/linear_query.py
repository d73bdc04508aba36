"""`query`: log-probabilities, entropy, ranks and more of a linear layer's logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmhead import checks
from lmhead.checks import eager
from lmhead.lazy import LazyLogits
from lmhead.parallel.linear_layer import LinearScores, linear_scores
from lmhead.scores.answers import Answers, Asked, Ids
from lmhead.sweep import Pointwise, accumulation_dtype


@eager
def query(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    log_prob: Ids = None,
    rank: Ids = None,
    entropy: bool = False,
    logsumexp: bool = False,
    argmax: bool = False,
    top_k: int = 0,
    kl_to: LazyLogits | tuple[Tensor, Tensor] | None = None,
    log_sum_sq: bool = False,
    mean_logit: bool = False,
    top1_match: Ids = None,
    max_bytes: int | None = None,
) -> Answers:
    """Answer any set of questions about the next-token distribution by one sweep.

    Equivalent to: z = F.linear(hidden, weight, bias).float() / temperature, then
    z.log_softmax(-1).gather(...), z.argmax(-1), z.topk(k),
    torch.distributions.Categorical(logits=z).entropy(), and so on.

    Args:
        hidden: (..., D).
        weight: (V, D).
        bias: (V,); -inf masks a token.
        softcap: logits become softcap · tanh(scale · x / softcap).
        scale: a factor of the logits, before soft-capping.
        temperature: positive; the logits are divided by it, after soft-capping. A number, or one
            per row, (...), which gets no gradient.
        log_prob: ids (...) or (..., K) whose log-probability is wanted; or several such tensors.
        rank: ids (...) or (..., K) whose place in the order is wanted; 0 is the argmax.
        entropy: whether to return the entropy.
        logsumexp: whether to return the log of the sum of exp(logits).
        argmax: whether to return the most probable token.
        top_k: number of largest logits to return, with their ids.
        kl_to: return KL(p ‖ q); q is a `LazyLogits` of the same shape, or (hidden, weight). The
            temperature applies to both.
        log_sum_sq: whether to return log Σ p².
        mean_logit: whether to return the mean of the logits that are not -inf.
        top1_match: ids (...) or (..., K) that are compared with the argmax.
        max_bytes: bound on temporary memory; None for 128 MiB.

    Returns:
        `Answers`. log_prob, entropy, logsumexp, kl, log_sum_sq and mean_logit are differentiable,
        together.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, type or range.

    >>> hidden, weight = torch.randn(2, 5, 8), torch.randn(50, 8)
    >>> ids = torch.randint(50, (2, 5))
    >>> answers = query(hidden, weight, log_prob=ids, entropy=True, top_k=3)
    >>> answers.log_prob.shape, answers.entropy.shape, answers.top_k.indices.shape
    (torch.Size([2, 5]), torch.Size([2, 5]), torch.Size([2, 5, 3]))
    """
    checks.check_map(softcap, scale)
    checks.check_max_bytes(max_bytes)
    pointwise = Pointwise.of(softcap=softcap, scale=scale)
    scores, plain = linear_scores(hidden, weight, bias, pointwise, max_bytes=max_bytes)
    lead = plain.shape[:-1]
    questions: dict[str, Any] = {
        "log_prob": log_prob,
        "rank": rank,
        "entropy": entropy,
        "logsumexp": logsumexp,
        "argmax": argmax,
        "top_k": top_k,
        "log_sum_sq": log_sum_sq,
        "mean_logit": mean_logit,
        "top1_match": top1_match,
    }
    kl = kl_to is not None
    asked = Asked.checked(lead, scores.vocab_size, plain.device, kl=kl, **questions)
    _check_temperature(temperature, plain)
    dtype = accumulation_dtype(hidden.dtype)
    if isinstance(kl_to, LazyLogits):
        _check_shape((*lead, scores.vocab_size), tuple(kl_to.shape))
        mine: Any = LazyLogits.of(scores, lead, dtype)
        other_logits: Any = kl_to
        if isinstance(temperature, Tensor) or temperature != 1.0:
            by = temperature[..., None] if isinstance(temperature, Tensor) else temperature
            mine, other_logits = mine / by, other_logits / by
        answers: Answers = mine.ask(kl_to=other_logits, **questions)
        return answers
    other = None if kl_to is None else _pair(kl_to, scores, lead)
    if other is not None:
        other = other.divided(temperature)
    return asked.answers(asked.compute(scores.divided(temperature), other), dtype)


def _pair(pair: Any, scores: LinearScores, lead: torch.Size) -> LinearScores:
    """Return the scores of kl_to=(hidden, weight)."""
    if not isinstance(pair, tuple):
        raise TypeError(
            f"kl_to must be a LazyLogits or a pair (hidden, weight); got {type(pair).__name__}"
        )
    if len(pair) != 2:
        raise ValueError(f"kl_to must be a pair (hidden, weight); got {len(pair)} entries")
    names = ("kl_to hidden", "kl_to weight")
    other, plain = linear_scores(*pair, None, Pointwise(), names=names, max_bytes=scores.max_bytes)
    _check_shape((*lead, scores.vocab_size), (*plain.shape[:-1], other.vocab_size))
    if other.dtype != scores.dtype:
        raise TypeError(f"kl_to must be computed in {scores.dtype}; got {other.dtype}")
    return other


def _check_temperature(temperature: float | Tensor, hidden: Tensor) -> None:
    if not isinstance(temperature, Tensor):
        checks.check_number("temperature", temperature, low=0.0, above=True)
        return
    checks.check_device("temperature", temperature, "hidden", hidden)
    if temperature.shape not in ((), hidden.shape[:-1]) or not temperature.is_floating_point():
        raise ValueError(
            f"temperature must be a number or a floating tensor of shape "
            f"{tuple(hidden.shape[:-1])}; got {temperature.dtype} {tuple(temperature.shape)}"
        )
    if not bool(((temperature > 0) & temperature.isfinite()).all()):
        raise ValueError("temperature must be above 0 and finite in every row")


def _check_shape(wanted: tuple[int, ...], given: tuple[int, ...]) -> None:
    if wanted != given:
        raise ValueError(f"kl_to must have logits of shape {wanted}; got {given}")
