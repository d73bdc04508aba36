"""One rank's slice of a vocabulary, and the collectives that combine the answers of all slices.

The split is that of a `DTensor` with `Shard(0)`: slices of ⌈V / n⌉ tokens, the last ones shorter or
empty. Every rank computes the same answers from the same gathered numbers, in the order of ranks.

    lse     = log Σ_r exp lse_r,   w_r = exp(lse_r - lse)
    entropy = Σ_r w_r (entropy_r - log w_r)
    kl      = Σ_r w_r (kl_r + log w_r - log u_r),   u_r as w_r for the other scores
    log Σp² = log Σ_r w_r² exp(log Σp²)_r
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lmhead.scores.row_loss import RowSums
from lmhead.sweep.exact_decisions import in_order, no_order
from lmhead.sweep.questions import Decisions


@dataclass(frozen=True)
class VocabShard:
    """The slice [start, start + size) of a vocabulary of `total` tokens."""

    group: Any  # the process group whose ranks hold the slices, in their order
    total: int  # V

    @property
    def ranks(self) -> int:
        """Number of ranks that hold slices."""
        return dist.get_world_size(self.group)

    @property
    def most(self) -> int:
        """Tokens of the largest slice."""
        return -(-self.total // self.ranks)

    @property
    def start(self) -> int:
        """The first token of this rank's slice."""
        return min(self.total, dist.get_rank(self.group) * self.most)

    @property
    def size(self) -> int:
        """Tokens of this rank's slice."""
        return min(self.most, self.total - self.start)

    @property
    def has_empty(self) -> bool:
        """Whether some rank has no token at all."""
        return self.total <= (self.ranks - 1) * self.most

    def of_tokens(self, x: Tensor, dim: int = 0, fill: float = 0.0) -> Tensor:
        """Return this rank's part of a tensor with one entry per token; `fill` if it is empty."""
        part = x.narrow(dim, self.start, self.size)
        return part if self.size else self.padded(part, dim, fill)

    def padded(self, part: Tensor, dim: int = 0, fill: float = 0.0) -> Tensor:
        """Return a part with one entry of padding if it is empty."""
        if self.size:
            return part
        return F.pad(part, (0, 0) * (part.dim() - 1 - dim) + (0, 1), value=fill)

    def owns(self, ids: Tensor) -> Tensor:
        """Return which ids are of this slice."""
        return (ids >= self.start) & (ids < self.start + self.size)

    # Collectives ---------------------------------------------------------------------------------

    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, of equal shape: (ranks, *x.shape)."""
        out = x.new_empty(self.ranks, *x.shape)
        dist.all_gather(list(out.unbind()), x.contiguous(), group=self.group)
        return out

    def gather_tokens(self, part: Tensor) -> Tensor:
        """Return all of a tensor (..., V), from the slices (..., size) of the ranks."""
        dtype = part.dtype
        x = part.movedim(-1, 0).to(torch.uint8) if dtype == torch.bool else part.movedim(-1, 0)
        padded = x.new_zeros(self.most, *x.shape[1:])
        padded[: self.size] = x[: self.size]
        gathered = self.gather(padded).flatten(0, 1)[: self.total]
        return gathered.movedim(0, -1).to(dtype).contiguous()

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        total = x.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def combine(
        self, sums: RowSums, decisions: Decisions | None = None, top_k: int = 0
    ) -> tuple[RowSums, Decisions]:
        """Return the answers about the whole vocabulary, by one collective."""
        own_decisions = decisions or Decisions()
        if own_decisions.top_ids is not None:
            own_decisions = self._candidates(own_decisions, top_k)
        fields = (*sums, *own_decisions)
        columns = [x.reshape(len(sums.lse), -1).double() for x in fields if x is not None]
        gathered = self.gather(torch.cat(columns, 1))
        parts = iter(torch.split(gathered, [c.shape[1] for c in columns], 2))
        split = [None if x is None else next(parts) for x in fields]  # (ranks, N, ...) each
        combined = _combine_sums(RowSums(*split[: len(sums)]))
        return combined, _combine_decisions(Decisions(*split[len(sums) :]), combined.lse, top_k)

    def _candidates(self, decisions: Decisions, k: int) -> Decisions:
        """Return k candidates with global ids; padding gets the id V, which comes last."""
        values, ids = decisions.top_values, decisions.top_ids
        masked = ids < 0  # a row with a NaN or only -inf; the combined lse is NaN or -inf as well
        ids = torch.where(masked, torch.arange(ids.shape[1], device=ids.device), ids)
        values = values.masked_fill(masked, -math.inf)
        padding = ids >= self.size
        ids = (ids + self.start).masked_fill(padding, self.total)
        values = values.masked_fill(padding, -math.inf)
        missing = (0, k - ids.shape[1])
        ids, values = F.pad(ids, missing, value=self.total), F.pad(values, missing, value=-math.inf)
        return decisions._replace(top_values=values, top_ids=ids)


def _combine_sums(parts: RowSums) -> RowSums:
    """Return sums over the whole vocabulary from those of its slices, (ranks, N, ...) each."""
    lse = parts.lse[..., 0].logsumexp(0)
    log_w = parts.lse[..., 0] - lse
    w = log_w.exp()
    has_mass = w != 0  # a slice without mass has no distribution; NaN counts as mass

    def mean(x: Tensor) -> Tensor:
        return torch.where(has_mass, w * x, 0.0).sum(0)

    entropy = kl = other_lse = squares = None
    if parts.log_sum_sq is not None:
        each = parts.log_sum_sq[..., 0] + 2 * log_w
        squares = torch.where(has_mass, each, -math.inf).logsumexp(0)
    if parts.entropy is not None:
        entropy = mean(parts.entropy[..., 0] - log_w)
    if parts.kl is not None:
        other_lse = parts.other_lse[..., 0].logsumexp(0)
        kl = mean(parts.kl[..., 0] + log_w - (parts.other_lse[..., 0] - other_lse))
    return RowSums(
        lse=lse,
        entropy=entropy,
        picked=None if parts.picked is None else parts.picked.sum(0),
        mixed=None if parts.mixed is None else parts.mixed.sum(0)[:, 0],
        softened=None if parts.softened is None else parts.softened.sum(0)[:, 0],
        kl=kl,
        other_lse=other_lse,
        log_sum_sq=squares,
    )


def _combine_decisions(parts: Decisions, lse: Tensor, k: int) -> Decisions:
    """Return the first k of all candidates, and the ranks."""
    values = ids = ranks = None
    if parts.top_ids is not None:
        ids, order = parts.top_ids.movedim(0, 1).flatten(1).long().sort(dim=1)
        values = parts.top_values.movedim(0, 1).flatten(1).gather(1, order)
        values, ids = in_order(values, ids, k)
        ids = ids.masked_fill(no_order(lse), -1)
    if parts.ranks is not None:
        ranks = parts.ranks.sum(0).long().masked_fill(no_order(lse), -1)
    return Decisions(values, ids, ranks)
