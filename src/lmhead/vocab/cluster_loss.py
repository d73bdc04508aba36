"""Cross-entropy of an adaptive head with all its options, as weighted answers of its parts.

With target y, its class weight w_y, smoothing ε, and tokens v with weights w_v (1 if not given):

    loss = (1-ε) w_y · -log p(y)  +  ε/V Σ_v w_v · -log p(v)

and -log p(v) is the head's cross-entropy of the entry that v goes through, plus that of v in its
cluster. So each part has its own `RowLoss`: in the head a cluster has the sum of its
tokens' weights, and without smoothing a target concerns the head and at most one cluster. The
gradients of all parts are computed in the forward pass, three products each, as in
`linear_cross_entropy`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.scores.row_loss import CrossEntropy
from lmhead.sweep import Questions, RowLoss, accumulation_dtype, row_answers, total_loss
from lmhead.vocab.clusters import Clusters, Part


def cluster_loss(clusters: Clusters, hidden: Tensor, loss: CrossEntropy) -> Tensor:
    """Return a number, or (N,) for "none". Targets are ids (N,) or probabilities (N, V)."""
    if not loss.targets.is_floating_point():
        plan = _hard(clusters, loss)
    elif loss.targets.requires_grad:
        raise ValueError(
            "targets of an AdaptiveHead must not require a gradient; detach them, or use "
            "head(hidden).materialize()"
        )
    else:
        plan = _soft(clusters, loss)
    dtype = accumulation_dtype(hidden.dtype)
    if loss.reduction == "none":
        rows = torch.zeros(len(hidden), dtype=torch.float64, device=hidden.device)
        for job in plan.jobs:
            questions = job.questions(clusters, hidden)
            part_loss = job.loss.rows(row_answers(questions)[0])
            rows = rows + part_loss if job.rows is None else rows.index_add(0, job.rows, part_loss)
        return rows.to(dtype)
    scale = torch.ones_like(plan.weight)
    if loss.reduction == "mean":
        scale = torch.where(plan.weight == 0, 0.0, 1.0 / plan.weight)
    total = torch.zeros_like(scale)
    for job in plan.jobs:
        weights = job.loss.map(lambda w: w * scale)
        total = total + total_loss(job.questions(clusters, hidden), weights)
    if loss.reduction == "mean":
        total = torch.where(plan.weight == 0, math.nan, total)
    return total.to(dtype)


@dataclass(frozen=True)
class _Job:
    """The terms of one part (head or cluster) in the loss."""

    part: Part
    loss: RowLoss
    rows: Tensor | None = None  # (M,), rows with a term in this part; None for all
    ids: Tensor | None = None  # (M,)
    mix: Tensor | None = None  # (tokens of the part,)
    soft: Tensor | None = None  # (M, tokens of the part)
    active: Tensor | None = None  # (M,)

    def questions(self, clusters: Clusters, hidden: Tensor) -> Questions:
        rows = hidden if self.rows is None else hidden[self.rows]
        return Questions(
            clusters.source(self.part, rows),
            ids=None if self.ids is None else self.ids[:, None],
            mix=self.mix,
            soft=self.soft,
            active=self.active,
            max_bytes=clusters.max_bytes,
        )


@dataclass(frozen=True)
class _Plan:
    jobs: list[_Job]
    weight: Tensor  # (), what "mean" divides by


def _hard(clusters: Clusters, given: CrossEntropy) -> _Plan:
    """Plan the loss for targets that are ids, (N,)."""
    keep = given.targets != given.ignore_index
    ids = torch.where(keep, given.targets, 0)
    target_weight = keep.double()
    if given.class_weight is not None:
        target_weight = target_weight * given.class_weight.double()[ids]
    places = clusters.places(ids)
    part_of = torch.where(keep, clusters.part_of(places), -1)
    share = (1 - given.label_smoothing) * target_weight
    mixes = _mixes(clusters, given)
    spread = given.label_smoothing / clusters.vocab * keep.double()
    jobs = []
    for part, mix in zip(clusters.parts, mixes, strict=True):
        if part.number == 0:
            loss = _row_loss(share, mix, spread)
            jobs.append(_Job(part, loss, ids=clusters.entries(places), mix=mix, active=keep))
            continue
        inside = part_of == part.number
        local = torch.where(inside, places - part.start, 0)
        if mix is not None:  # smoothing involves every cluster for every row
            # Ignored rows are removed before the projection: they may be NaN.
            rows = keep.nonzero()[:, 0]
            loss = _row_loss((share * inside)[rows], mix, spread[rows])
            jobs.append(_Job(part, loss, rows=rows, ids=local[rows], mix=mix))
            continue
        rows = inside.nonzero()[:, 0]
        jobs.append(_Job(part, _row_loss(share[rows], None, spread), rows=rows, ids=local[rows]))
    return _Plan(jobs, target_weight.sum())


def _soft(clusters: Clusters, given: CrossEntropy) -> _Plan:
    """Plan the loss for targets that are distributions, (N, V)."""
    targets, smoothing = given.targets, given.label_smoothing
    weighted = targets if given.class_weight is None else targets * given.class_weight
    if clusters.word_at is not None:
        weighted = weighted[:, clusters.word_at]
    mixes = _mixes(clusters, given)
    ones = torch.ones(len(targets), dtype=torch.float64, device=targets.device)
    spread = smoothing / clusters.vocab * ones
    pieces = [weighted[:, part.start : part.stop] for part in clusters.parts]
    sums = [piece.sum(1, keepdim=True, dtype=torch.float64) for piece in pieces]
    head_targets = torch.cat([pieces[0], *(s.to(weighted.dtype) for s in sums[1:])], 1)
    jobs = []
    for part, mix in zip(clusters.parts, mixes, strict=True):
        mass = torch.cat(sums, 1).sum(1) if part.number == 0 else sums[part.number][:, 0]
        loss = _row_loss((1 - smoothing) * mass, mix, spread)
        loss = loss._replace(picked=None, softened=(1 - smoothing) * ones)
        soft = head_targets if part.number == 0 else pieces[part.number]
        jobs.append(_Job(part, loss, mix=mix, soft=soft))
    return _Plan(jobs, ones.sum())


def _row_loss(share: Tensor, mix: Tensor | None, spread: Tensor) -> RowLoss:
    """Return weights (N,) for `share` of a target and `spread` over the tokens of `mix`."""
    if mix is None:
        return RowLoss(lse=share, picked=share)
    return RowLoss(lse=share + spread * mix.double().sum(), picked=share, mixed=spread)


def _mixes(clusters: Clusters, given: CrossEntropy) -> list[Tensor | None]:
    """Return the weights over which ε is spread in each part; masked tokens get none."""
    if given.label_smoothing == 0.0:
        return [None] * len(clusters.parts)
    dtype = accumulation_dtype(clusters.head_weight.dtype)
    if given.class_weight is None:
        weights = torch.ones(clusters.vocab, dtype=dtype, device=given.targets.device)
    else:
        weights = given.class_weight.detach().to(dtype)
        weights = weights if clusters.word_at is None else weights[clusters.word_at]
    tails = []
    for part, bias in zip(clusters.parts[1:], clusters.biases, strict=True):
        mix = weights[part.start : part.stop]
        tails.append(mix if bias is None else mix.masked_fill(bias == -math.inf, 0.0))
    head = torch.cat([weights[: clusters.shortlist], *(t.sum()[None] for t in tails)])
    if clusters.head_bias is not None:
        masked = clusters.head_bias == -math.inf
        head = head.masked_fill(masked, 0.0)
        removed = masked[clusters.shortlist :].tolist()
        tails = [torch.zeros_like(t) if g else t for t, g in zip(tails, removed, strict=True)]
    return [head, *tails]
