"""Cross-entropy of an adaptive head with all its options, as weighted answers of its parts.

With target y, its class weight w_y, smoothing ε, and tokens v with weights w_v (1 if not given):

    loss = (1-ε) w_y · -log p(y)  +  ε/V Σ_v w_v · -log p(v)

and -log p(v) is the head's cross-entropy of the entry that v goes through, plus that of v in its
cluster. So each part has its own `RowLoss`: in the head a cluster has the sum of its
tokens' weights, and without smoothing a target concerns the head and at most one cluster. The
gradients of all parts are computed in the forward pass, three products each, as in
`linear_cross_entropy`. A few rows need no sweep: their loss is made of their log-probabilities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.scores.row_loss import CrossEntropy, RowLoss, RowSums, WeightedLoss
from lmhead.sweep import Questions, accumulation_dtype, row_answers, total_loss
from lmhead.sweep.small_batch import MAX_ROWS
from lmhead.vocab.clusters import Clusters, Part


def cluster_loss(clusters: Clusters, hidden: Tensor, loss: CrossEntropy) -> Tensor:
    """Return a number, or (N,) for "none". Targets are ids (N,) or probabilities (N, V)."""
    dtype = accumulation_dtype(hidden.dtype)
    masked = _masked(clusters) if loss.label_smoothing else None
    weighted = loss.weighted(clusters.vocab, dtype, masked)
    if weighted.ids is not None and weighted.mix is None and _is_small(clusters, hidden):
        counted, index = clusters.counted(hidden, weighted.active)
        sums = RowSums(picked=clusters.token_log_prob(counted, weighted.ids[index, None]))
        return clusters.reduced(hidden, loss, weighted, index, sums).to(dtype)
    jobs = _soft(clusters, weighted) if weighted.ids is None else _hard(clusters, weighted)

    def rows(weights: RowLoss) -> Tensor:
        total = torch.zeros(len(hidden), dtype=torch.float64, device=hidden.device)
        for job in jobs:
            part = job.weights(weights).rows(row_answers(job.questions(clusters, hidden))[0])
            total = total + part if job.rows is None else total.index_add(0, job.rows, part)
        return total

    def total(weights: RowLoss) -> Tensor:
        parts = [total_loss(j.questions(clusters, hidden), j.weights(weights)) for j in jobs]
        return torch.stack(parts).sum()

    made = loss.reduced(
        weighted,
        rows=rows,
        total=total,
        log_probs=lambda: clusters.constant_log_probs(hidden),
    )
    return made.to(dtype)


def _is_small(clusters: Clusters, hidden: Tensor) -> bool:
    """Return whether log-probabilities and their gradients take no sweep, or no gradient does."""
    if len(hidden) > MAX_ROWS:
        return False
    plain = hidden.is_cpu and hidden.dtype == clusters.head_weight.dtype == torch.float32
    return plain or not torch.is_grad_enabled()


@dataclass(frozen=True)
class _Job:
    """The terms of one part (head or cluster) in the loss."""

    part: Part
    rows: Tensor | None = None  # (M,), rows with a term in this part; None for all
    ids: Tensor | None = None  # (M,)
    mass: Tensor | None = None  # (M,), share of each row's target in this part; None for 1
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

    def weights(self, given: RowLoss) -> RowLoss:
        """Return the weights of this part's sums, from those for the whole vocabulary."""
        if self.rows is not None:
            given = given.at(self.rows)
        share = given.softened if given.picked is None else given.picked
        assert share is not None
        share = share if self.mass is None else share * self.mass
        lse = share
        if given.mixed is not None and self.mix is not None:
            lse = share + given.mixed * self.mix.double().sum()
        return given._replace(lse=lse, picked=None if self.ids is None else share)


def _hard(clusters: Clusters, weighted: WeightedLoss) -> list[_Job]:
    """Return the terms for targets that are ids, (N,)."""
    active, mixes = weighted.active, _mixes(clusters, weighted)
    places = clusters.places(weighted.ids)  # type: ignore[arg-type]
    part_of = clusters.part_of(places)
    if active is not None:
        part_of = torch.where(active, part_of, -1)
    head, *tails = clusters.parts
    jobs = [_Job(head, ids=clusters.entries(places), mix=mixes[0], active=active)]
    for part in tails:
        inside, mix = part_of == part.number, mixes[part.number]
        # With smoothing every row that counts reads every cluster. The others are left out before
        # the projection: they may be NaN.
        rows = (inside if mix is None else part_of >= 0).nonzero()[:, 0]
        local = torch.where(inside, places - part.start, 0)[rows]
        jobs.append(_Job(part, rows=rows, ids=local, mass=inside[rows].double(), mix=mix))
    return jobs


def _soft(clusters: Clusters, weighted: WeightedLoss) -> list[_Job]:
    """Return the terms for targets that are distributions, (N, V)."""
    targets, mixes = weighted.soft, _mixes(clusters, weighted)
    assert targets is not None
    if weighted.soft_weight is not None:
        targets = targets * weighted.soft_weight
    targets = _by_place(clusters, targets)
    pieces = [targets[:, part.start : part.stop] for part in clusters.parts]
    masses = torch.stack([piece.sum(1, dtype=torch.float64) for piece in pieces])
    head = torch.cat([pieces[0], masses[1:].T.to(targets.dtype)], 1)
    return [
        _Job(part, mass=mass, mix=mix, soft=soft)
        for part, mass, mix, soft in zip(
            clusters.parts, [masses.sum(0), *masses[1:]], mixes, [head, *pieces[1:]], strict=True
        )
    ]


def _mixes(clusters: Clusters, weighted: WeightedLoss) -> list[Tensor | None]:
    """Return the weights over which ε is spread in each part; masked tokens have none."""
    if weighted.mix is None:
        return [None] * len(clusters.parts)
    by_place = _by_place(clusters, weighted.mix)
    first, *tails = (by_place[part.start : part.stop] for part in clusters.parts)
    return [torch.cat([first, *(t.sum()[None] for t in tails)]), *tails]


def _by_place(clusters: Clusters, values: Tensor) -> Tensor:
    """Return values (..., V) of tokens in the order of frequency."""
    return values if clusters.word_at is None else values[..., clusters.word_at]


def _masked(clusters: Clusters) -> Tensor | None:
    """Return the tokens that a bias of -inf masks, or their cluster's does: (V,) bool."""
    head, biases = clusters.head_bias, clusters.biases
    if head is None:
        return None
    by_place = [head[: clusters.shortlist] == -math.inf]
    for part, bias in zip(clusters.parts[1:], biases, strict=True):
        entry = (head[clusters.shortlist + part.number - 1] == -math.inf).expand(part.size)
        by_place.append(entry if bias is None else entry | (bias == -math.inf))
    masked = torch.cat(by_place)
    return masked if clusters.place_of is None else masked[clusters.place_of]
