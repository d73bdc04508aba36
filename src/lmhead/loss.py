"""From the options of cross-entropy to the weights of a `RowLoss`.

For a token with target y, smoothing ε and class weights w (1 where not given), with A = Σ_v w_v:

    loss = (1-ε) w_y (lse - z_y) + ε/V Σ_v w_v (lse - z_v) + z_loss · lse²

so the weight of lse is (1-ε) w_y + ε/V A, that of z_y is (1-ε) w_y, that of Σ_v w_v z_v is ε/V.
With target probabilities t in place of y: (1-ε) Σ_v w_v t_v takes the place of (1-ε) w_y.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.sweep import GradFilter, Questions, RowLoss, Source, row_answers, total_loss


@dataclass(frozen=True)
class WeightedLoss:
    """A loss before its reduction: cross-entropy and z-loss are divided by different counts."""

    questions: Questions
    loss: RowLoss  # the weights for reduction="sum"
    own: Tensor  # (N,), the class weights of the targets: "mean" divides by their sum
    counted: Tensor  # (N,), 1 for the tokens that count: "mean" divides z-loss by their sum
    for_targets: Tensor | None = None  # (N,), 0, with the gradient of target probabilities


def class_targets(
    source: Source,
    targets: Tensor,
    *,
    ignore_index: int,
    class_weight: Tensor | None,
    label_smoothing: float,
    z_loss: float,
    grad_filter: GradFilter | None,
    max_bytes: int | None,
) -> WeightedLoss:
    """Targets are ids, (N,)."""
    keep = None if _all_count(targets, ignore_index) else targets != ignore_index
    if keep is None:
        ids, counted = targets, torch.ones_like(targets, dtype=torch.float64)
    else:
        ids, counted = torch.where(keep, targets, 0), keep.double()
    own = counted if class_weight is None else counted * class_weight.double()[ids]
    loss = RowLoss(lse=own, picked=own)
    mix, mix_sum = _smoothing(source, class_weight, label_smoothing)
    if mix is not None:
        spread = label_smoothing / source.vocab * counted
        picked = (1 - label_smoothing) * own
        loss = RowLoss(lse=picked + spread * mix_sum, picked=picked, mixed=spread)
    if z_loss:
        loss = loss._replace(squared=z_loss * counted)
    questions = Questions(
        source,
        ids=ids[:, None],
        mix=mix,
        active=keep,
        grad_filter=grad_filter,
        max_bytes=max_bytes,
    )
    return WeightedLoss(questions, loss, own, counted)


def probability_targets(
    source: Source,
    targets: Tensor,
    *,
    class_weight: Tensor | None,
    label_smoothing: float,
    z_loss: float,
    grad_filter: GradFilter | None,
    max_bytes: int | None,
) -> WeightedLoss:
    """Targets are distributions, (N, V)."""
    total = _row_sums(targets.detach(), class_weight)
    mix, mix_sum = _smoothing(source, class_weight, label_smoothing)
    spread = label_smoothing / source.vocab
    ones = torch.ones(len(targets), dtype=torch.float64, device=targets.device)
    loss = RowLoss(
        lse=(1 - label_smoothing) * total + spread * mix_sum * ones,
        mixed=None if mix is None else spread * ones,
        softened=(1 - label_smoothing) * ones,
        squared=z_loss * ones if z_loss else None,
    )
    weight = None if class_weight is None else class_weight.to(source.dtype)
    soft = targets.detach()
    questions = Questions(
        source,
        soft=soft,
        soft_weight=weight,
        mix=mix,
        grad_filter=grad_filter,
        max_bytes=max_bytes,
    )
    for_targets = None
    if targets.requires_grad:
        # Its value is 0. Its gradient, -(1-ε) w log p, is as large as the logits in any case.
        log_p = source.dense().detach().double().log_softmax(-1)
        change = (targets - soft) * (label_smoothing - 1)
        for_targets = (change * log_p * (1.0 if weight is None else weight)).sum(1)
    return WeightedLoss(questions, loss, ones, ones, for_targets)


def reduce(weighted: WeightedLoss, reduction: str, num_items: int | Tensor | None) -> Tensor:
    """The loss as a number, or (N,) for "none"; float64."""
    questions, loss, for_targets = weighted.questions, weighted.loss, weighted.for_targets
    if reduction == "none":
        rows = loss.rows(row_answers(questions)[0])
        return rows if for_targets is None else rows + for_targets
    if reduction == "sum":
        total = total_loss(questions, loss)
        return total if for_targets is None else total + for_targets.sum()
    if isinstance(num_items, int) and num_items > 0:
        total = total_loss(questions, loss.map(lambda w: w / num_items))
        return total if for_targets is None else total + for_targets.sum() / num_items
    if num_items is not None:
        device = weighted.own.device
        weight = count = torch.as_tensor(num_items, dtype=torch.float64, device=device)
    else:
        weight = count = weighted.own.sum()
        if weighted.counted is not weighted.own:
            count = weighted.counted.sum()
    # A token that does not count has weight 0; keep it so when the mean is over nothing.
    empty = weight == 0
    by_weight = torch.where(empty, 0.0, weight.reciprocal())
    mean = loss.map(lambda w: w * by_weight)
    if loss.squared is not None and count is not weight:
        by_count = torch.where(count == 0, 0.0, count.reciprocal())
        mean = mean._replace(squared=loss.squared * by_count)
    total = total_loss(questions, mean)
    if for_targets is not None:
        total = total + for_targets.sum() * by_weight
    return torch.where(empty, math.nan, total)


def _all_count(targets: Tensor, ignore_index: int) -> bool:
    """Whether no token is to be left out: then it need not be said of each. False if unknown."""
    if targets.device.type == "meta" or torch._C._are_functorch_transforms_active():
        return False
    return not bool((targets == ignore_index).any())


def _smoothing(
    source: Source, class_weight: Tensor | None, label_smoothing: float
) -> tuple[Tensor | None, Tensor | float]:
    """The weights over which ε is spread, (V,), and their sum; masked words get none."""
    if label_smoothing == 0.0:
        return None, 0.0
    like = source.weights[0]
    mix = like.new_ones(source.vocab) if class_weight is None else class_weight
    mix = mix.detach().to(source.dtype)
    if source.bias is not None:
        mix = mix.masked_fill(source.bias == -math.inf, 0.0)
    return mix, mix.double().sum()


def _row_sums(targets: Tensor, class_weight: Tensor | None) -> Tensor:
    """Σ_v w_v t_v in float64, (N,), a few rows at a time."""
    n, vocab = targets.shape
    block = max(1, min(-(-n // 2), 2**20 // vocab))
    weight = 1.0 if class_weight is None else class_weight.double()
    return torch.cat([(part.double() * weight).sum(1) for part in torch.split(targets, block)])
