"""The best next tokens of every beam, with their log-probabilities.

In:  logits of the beams (R, V), lazy or not.
Out: per beam the K best tokens and their log-probabilities, (R, K) each.

Without a processor the K best tokens and the normaliser come from one sweep, and nothing of size
R x V is built. A processor needs all V scores of a beam, so they are built for it.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Protocol

import torch
from torch import Tensor

from lmhead.errors import PerformanceWarning
from lmhead.lazy import LazyLogits
from lmhead.sampling.beam_groups import Candidate


class Processor(Protocol):
    """Changes scores before tokens are chosen; a `Sampler` is one."""

    def process(
        self,
        scores: Tensor,
        /,
        *,
        context: Tensor,
        prompt_length: Tensor,
        context_mask: Tensor,
    ) -> Tensor:
        """Return changed scores (R, V) for scores (R, V); -inf removes a token.

        `context` (R, L) are the ids so far, `context_mask` (R, L) is False for padding, and
        `prompt_length` (R,) says how many of them, without padding, are prompt.
        """
        ...


class TopTokens:
    """The `count` best tokens of each beam, from one sweep over logits (R, V).

    `diversity_penalty` is subtracted from a token each time that an earlier group chose it.
    """

    def __init__(self, logits: LazyLogits | Tensor, count: int, diversity_penalty: float) -> None:
        self._penalty = diversity_penalty
        count = min(count, logits.shape[-1])
        if isinstance(logits, LazyLogits):
            answers = logits.double().ask(top_k=count, logsumexp=True)  # type: ignore[attr-defined]
            (values, self._ids), normaliser = answers.top_k, answers.logsumexp
            _check_logits(normaliser)
        else:
            logits = _widened(logits)
            normaliser = logits.logsumexp(-1)
            _check_logits(normaliser)
            values, self._ids = top_tokens(logits, count)
        self._log_probs = values.double() - normaliser.double()[:, None]

    def best(self, rows: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and ids (N, K) for `rows` (N,), in no particular order.

        `chosen` (N, C) are the tokens that earlier groups chose at this step, -1 for none. A token
        can only get worse, so K + C tokens of the sweep hold the best K after the penalty.
        """
        log_probs, ids = self._log_probs[rows], self._ids[rows]
        times = (ids[:, :, None] == chosen[:, None, :]).sum(-1)
        return log_probs - self._penalty * times, ids


class ProcessedTokens:
    """The best tokens of each beam after a processor; the same answers as `TopTokens`.

    `normalize_last` is for greedy search: the processor gets logits, and its result is normalised.
    In beam search the processor gets log-probabilities.
    """

    def __init__(
        self,
        logits: LazyLogits | Tensor,
        count: int,
        diversity_penalty: float,
        processor: Processor,
        *,
        normalize_last: bool,
        **context: Tensor,
    ) -> None:
        self._count = min(count, logits.shape[-1])
        self._penalty, self._processor = diversity_penalty, processor
        self._normalize_last, self._context = normalize_last, context
        scores = _widened(_dense(logits))
        _check_logits(scores.logsumexp(-1))
        self._scores = scores if normalize_last else scores.log_softmax(-1)

    def best(self, rows: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and ids (N, K) for `rows` (N,); `chosen` (N, C) as in `TopTokens`."""
        scores = self._scores[rows]
        if chosen.shape[1]:
            penalties = torch.where(chosen < 0, 0.0, -self._penalty).to(scores.dtype)
            scores = scores.scatter_add(-1, chosen.clamp(min=0), penalties)
        context: dict[str, Any] = {name: tensor[rows] for name, tensor in self._context.items()}
        processed = self._processor.process(scores, **context)
        if not isinstance(processed, Tensor) or processed.shape != scores.shape:
            got = tuple(processed.shape) if isinstance(processed, Tensor) else type(processed)
            raise ValueError(
                f"processor.process must give scores of shape {tuple(scores.shape)}; got {got}"
            )
        best = processed.amax(-1)
        if bool((best.isnan() | (best == math.inf)).any()):
            raise ValueError(
                "processor.process must give scores that are finite or -inf; got NaN/inf"
            )
        if self._normalize_last:
            # All -inf remains all -inf: this beam has no continuation.
            lse = processed.logsumexp(-1, keepdim=True)
            processed = processed - lse.clamp(min=torch.finfo(processed.dtype).min)
        values, ids = top_tokens(processed, self._count)
        return values.double(), ids


def top_tokens(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of each row and their ids, by ascending id; ties: lowest id.

    `torch.topk` does not specify which of equal scores it returns.

    >>> top_tokens(torch.tensor([[0.0, 2.0, 1.0, 1.0]]), 2)
    (tensor([[2., 1.]]), tensor([[1, 2]]))
    """
    smallest = scores.topk(count).values[:, -1:]
    above, level = scores > smallest, scores == smallest
    missing = count - above.sum(-1, keepdim=True)
    kept = above | (level & (level.cumsum(-1) <= missing))
    ids = kept.nonzero()[:, 1].reshape(len(scores), count)
    return scores.gather(-1, ids), ids


def rank(totals: Tensor, scores: Tensor, ids: Tensor) -> list[list[Candidate]]:
    """Return all candidates of each prompt, best first; ties: first beam, then lowest id.

    `totals` (P, W) are sums of log-probabilities, `scores` those of the next tokens `ids`,
    (P, W, K) each.

    >>> rank(torch.tensor([[0.0]]), torch.tensor([[[-2.0, -1.0]]]), torch.tensor([[[5, 9]]]))
    [[Candidate(total=-1.0, beam=0, token=9), Candidate(total=-2.0, beam=0, token=5)]]
    """
    ids, by_id = ids.sort(-1)
    total = (totals[..., None] + scores.gather(-1, by_id)).flatten(1)
    total, order = total.sort(dim=-1, descending=True, stable=True)
    beam, token = order // ids.shape[-1], ids.flatten(1).gather(-1, order)
    columns = zip(total.tolist(), beam.tolist(), token.tolist(), strict=True)
    return [list(map(Candidate, *row)) for row in columns]


def _dense(logits: LazyLogits | Tensor) -> Tensor:
    if not isinstance(logits, LazyLogits):
        return logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)  # a processor needs the tensor
        return logits.materialize()


def _widened(scores: Tensor) -> Tensor:
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def _check_logits(normaliser: Tensor) -> None:
    if not bool(normaliser.isfinite().all()):
        raise ValueError(
            "model.head must give logits that are finite or -inf, with one that is finite in every "
            "row; got a row with NaN, inf or only -inf"
        )
