"""Losses of post-training, each a few lines on log-probabilities that `query` gives.

A trainer computes per-token log-probabilities with gradients by `lmhead.query(hidden, weight,
log_prob=ids)`, those of the reference model without, and passes them here. Sequence-level losses
take one number per sequence: see `sequence_log_prob`.

>>> import lmhead
>>> hidden, weight = torch.randn(4, 6, 8, requires_grad=True), torch.randn(50, 8)
>>> ids, mask = torch.randint(50, (4, 6)), torch.ones(4, 6)
>>> log_prob = sequence_log_prob(lmhead.query(hidden, weight, log_prob=ids).log_prob, mask)
>>> chosen, rejected = log_prob.chunk(2)
>>> dpo(chosen, rejected, chosen.detach(), rejected.detach()).mean().backward()
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sequence_log_prob(log_prob: Tensor, mask: Tensor, *, mean: bool = False) -> Tensor:
    """Return the log-probability of each sequence, (B,), from those of its tokens (B, T).

    Equivalent to: (log_prob * mask).sum(-1), divided by mask.sum(-1) if `mean`.
    """
    total = (log_prob * mask).sum(-1)
    return total / mask.sum(-1).clamp(min=1) if mean else total


def dpo(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1
) -> Tensor:
    """Return the loss of direct preference optimisation, (B,).

    Equivalent to: -logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected))).

    Args:
        chosen: log-probability of each preferred sequence, (B,).
        rejected: of each other sequence, (B,).
        ref_chosen: of the preferred ones under the reference model, (B,).
        ref_rejected: of the others under the reference model, (B,).
        beta: strength of the tie to the reference model.
    """
    return -F.logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected)))


def ipo(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1
) -> Tensor:
    """Return the loss of identity preference optimisation, (B,), from means over tokens.

    Equivalent to: ((chosen - ref_chosen) - (rejected - ref_rejected) - 1 / (2 * beta)) ** 2.
    The arguments are those of `dpo`, each divided by the length of its sequence.
    """
    gap = (chosen - ref_chosen) - (rejected - ref_rejected)
    return (gap - 1 / (2 * beta)).square()


def kto(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    desirable: Tensor,
    *,
    kl: float | Tensor = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return the loss of Kahneman-Tversky optimisation, (B,).

    Equivalent to: 1 - sigmoid(±beta * (log_prob - ref_log_prob - kl)), times a weight.

    Args:
        log_prob: log-probability of each sequence, (B,).
        ref_log_prob: the same under the reference model, (B,).
        desirable: bool (B,).
        kl: estimate of KL(policy ‖ reference), at least 0, without a gradient.
        beta: strength of the tie to the reference model.
        desirable_weight: weight of desirable sequences.
        undesirable_weight: weight of the others.
    """
    sign = torch.where(desirable, 1.0, -1.0)
    weight = torch.where(desirable, desirable_weight, undesirable_weight)
    return weight * (1 - torch.sigmoid(beta * sign * (log_prob - ref_log_prob - kl)))


def orpo(
    chosen: Tensor, rejected: Tensor, *, nll: float | Tensor = 0.0, beta: float = 0.1
) -> Tensor:
    """Return the loss of odds-ratio preference optimisation, (B,), from means over tokens.

    Equivalent to: nll - beta * logsigmoid(log_odds(chosen) - log_odds(rejected)), with
    log_odds(x) = x - log(1 - exp(x)).

    Args:
        chosen: mean log-probability of each preferred sequence's tokens, (B,), below 0.
        rejected: of each other sequence's, (B,).
        nll: loss on the preferred sequences, a number or (B,).
        beta: weight of the odds ratio.
    """
    odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return nll - beta * F.logsigmoid(odds)


def simpo(chosen: Tensor, rejected: Tensor, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """Return the loss of simple preference optimisation, (B,), from means over tokens.

    Equivalent to: -logsigmoid(beta * (chosen - rejected) - gamma).
    """
    return -F.logsigmoid(beta * (chosen - rejected) - gamma)


def cpo(
    chosen: Tensor,
    rejected: Tensor,
    *,
    nll: float | Tensor = 0.0,
    beta: float = 0.1,
    nll_weight: float = 1.0,
) -> Tensor:
    """Return the loss of contrastive preference optimisation, (B,).

    Equivalent to: -logsigmoid(beta * (chosen - rejected)) + nll_weight * nll.
    """
    return -F.logsigmoid(beta * (chosen - rejected)) + nll_weight * nll


def grpo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    ref_log_prob: Tensor | None = None,
    beta: float = 0.0,
    sequence_level: bool = False,
) -> Tensor:
    """Return the loss of group relative policy optimisation, (B,): means over each one's tokens.

    Equivalent to: -min(r * A, clamp(r, 1 - epsilon, 1 + epsilon_high) * A) + beta * kl, with the
    ratio r = exp(log_prob - old_log_prob); kl is exp(d) - d - 1 with d = ref_log_prob - log_prob.

    Args:
        log_prob: (B, T), with gradient.
        old_log_prob: (B, T), of the policy that sampled.
        advantages: (B,) or (B, T); see `group_advantages`.
        mask: (B, T), 1 for tokens of the completion.
        epsilon: clipping below 1.
        epsilon_high: clipping above 1; None for `epsilon`.
        ref_log_prob: (B, T) under the reference model, if beta is not 0.
        beta: weight of the KL term.
        sequence_level: one ratio per sequence (GSPO): exp of the mean of the log-ratios.
    """
    log_ratio = log_prob - old_log_prob
    if sequence_level:
        log_ratio = sequence_log_prob(log_ratio, mask, mean=True)[:, None]
    gains = advantages if advantages.dim() == 2 else advantages[:, None]
    loss = _clipped(log_ratio, gains, epsilon, epsilon_high)
    if beta != 0.0:
        if ref_log_prob is None:
            raise ValueError("ref_log_prob must be given where beta is not 0")
        gap = ref_log_prob - log_prob
        loss = loss + beta * (gap.exp() - gap - 1)
    return sequence_log_prob(loss, mask, mean=True)


def rloo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> Tensor:
    """Return the loss of REINFORCE leave-one-out, (B,).

    Equivalent to: -min(r * A, clamp(r, 1 - epsilon, 1 + epsilon_high) * A), with the ratio
    r = exp(log_prob - old_log_prob) of whole sequences, (B,); for A see `leave_one_out`.
    """
    return _clipped(log_prob - old_log_prob, advantages, epsilon, epsilon_high)


def dft(log_prob: Tensor) -> Tensor:
    """Return the loss of dynamic fine-tuning, with the shape of log_prob.

    Equivalent to: -log_prob.exp().detach() * log_prob: tokens count by their probability.
    """
    return -log_prob.exp().detach() * log_prob


def group_advantages(rewards: Tensor, group: int, *, scale: bool = True) -> Tensor:
    """Return rewards (B,) minus their group's mean, divided by its deviation if `scale`.

    Equivalent to: (r - r.mean()) / (r.std() + 1e-4) for each `group` neighbours.
    """
    grouped = rewards.view(-1, group)
    gains = grouped - grouped.mean(1, keepdim=True)
    if scale:
        gains = gains / (grouped.std(1, keepdim=True) + 1e-4)
    return gains.reshape(rewards.shape)


def leave_one_out(rewards: Tensor, group: int) -> Tensor:
    """Return rewards (B,) minus the mean of the others in their group.

    Equivalent to: r - (r.sum() - r) / (group - 1) for each `group` neighbours.
    """
    if group < 2:
        raise ValueError(f"group must be at least 2; got {group}")
    grouped = rewards.view(-1, group)
    others = (grouped.sum(1, keepdim=True) - grouped) / (group - 1)
    return (grouped - others).reshape(rewards.shape)


def _clipped(
    log_ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float | None
) -> Tensor:
    ratio = log_ratio.exp()
    high = epsilon if epsilon_high is None else epsilon_high
    return -torch.min(ratio * advantages, ratio.clamp(1 - epsilon, 1 + high) * advantages)


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) of x < 0, without cancellation at either end."""
    near = x > -0.6931472
    # Where the other branch is selected, each gets a constant: NaN gradients would spread.
    small = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    return torch.where(near, small, torch.log1p(-torch.exp(torch.where(near, -1.0, x))))
