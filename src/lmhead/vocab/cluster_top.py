"""The k best tokens of an adaptive head, by branch and bound, exact.

A token has at most the probability of its cluster: a cluster whose probability is under the k-th
best token found so far need not be read. The head is always read, and for most states nothing else.

Products run in float32 first; what their rounding leaves undecided is done again in float64, and
what ties even there is sorted whole. The order is that of exact log-probabilities, lowest id first
among equals, in any batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.sweep import Source
from lmhead.sweep.source import unit_roundoff, without_autocast
from lmhead.vocab.clusters import Clusters, Part, exact_source
from lmhead.vocab.factors import Factors

# Candidates kept beyond k: that far down the list the gap is larger than rounding.
_SPARE = 8
# Tokens converted to float64 at a time.
_TILE = 8192
# From here on comparing all pairs of candidates costs more than float64.
_LARGE = 256


def cluster_top(clusters: Clusters, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (N, k) in float64 and ids (N, k); -1 where a row has a NaN."""
    values = torch.empty(len(hidden), k, dtype=torch.float64, device=hidden.device)
    ids = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    start = 0
    with torch.no_grad(), without_autocast(hidden.device):
        for rows in clusters.blocks(hidden):
            open = torch.arange(len(rows), device=rows.device)
            for exact in (True,) if k > _LARGE else (False, True):
                search = _Search(clusters, rows[open], k, exact=exact)
                values[start + open], ids[start + open], decided = search.run()
                open = open[~decided]
                if len(open) == 0:
                    break
            else:
                values[start + open], ids[start + open] = Factors.top(clusters, rows[open], k)
            start += len(rows)
    return values, ids


@dataclass
class _Found:
    """The candidates of each row, best first by what is known: (B, K) each."""

    values: Tensor  # float64, log-probabilities; -inf where there is none
    places: Tensor
    parts: Tensor  # which part a candidate is of


class _Search:
    """Some rows through the head and the clusters that may hold one of the best."""

    def __init__(self, clusters: Clusters, hidden: Tensor, k: int, *, exact: bool) -> None:
        self.clusters, self.hidden, self.k, self.exact = clusters, hidden, k, exact
        n = len(hidden)
        self.error = torch.zeros(n, dtype=torch.float64, device=hidden.device)
        # Of a pruned or cut-off token, the largest log-probability that it may have.
        self.left = torch.full_like(self.error, -math.inf)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return values (B, k), ids (B, k), and which rows are decided beyond rounding."""
        clusters = self.clusters
        head, every = clusters.parts[0], torch.arange(len(self.hidden), device=self.hidden.device)
        log_p, source, lse = self._log_softmax(head, every)
        entries = log_p[:, clusters.shortlist :]
        found = self._best(head, log_p[:, : clusters.shortlist], source, lse, every, None)
        found = self._sorted(found)
        for part in clusters.parts[1:]:
            mass = entries[:, part.number - 1]
            least = found.values[:, self.k - 1] if found.values.shape[1] >= self.k else -math.inf
            # Written so that a NaN is looked at.
            near = ~(mass + 2 * self.error < least)
            self.left = torch.where(near, self.left, torch.maximum(self.left, mass))
            rows = near.nonzero()[:, 0]
            if len(rows) == 0:
                continue
            entry = torch.full((len(rows), 1), clusters.shortlist + part.number - 1)
            through = source.select(rows).at(entry.to(rows)) - lse[rows, None]
            inner, tail, tail_lse = self._log_softmax(part, rows)
            some = self._best(part, inner, tail, tail_lse, rows, through)
            found = self._merge(found, some, rows)
        broken = log_p.isnan().any(1) | found.values.isnan().any(1)
        values, places = found.values[:, : self.k], found.places[:, : self.k]
        ids = clusters.tokens(places).masked_fill(broken[:, None], -1)
        values = values.masked_fill(broken[:, None], math.nan)
        return values, ids, self._decided(found) | broken

    def _log_softmax(self, part: Part, rows: Tensor) -> tuple[Tensor, Source, Tensor]:
        """Return log-probabilities (B, tokens) of a part, its source, lse (B,); float64."""
        hidden = self.hidden[rows]
        exact = exact_source(self.clusters, part, hidden)
        source = exact if self.exact else self.clusters.source(part, hidden)
        z = _product(source, torch.float64 if self.exact else source.dtype).double()
        self.error[rows] = self.error[rows] + self._rounding(part, source, hidden)
        lse = z.logsumexp(1)
        return z - lse[:, None], exact, lse

    def _rounding(self, part: Part, source: Source, hidden: Tensor) -> Tensor:
        """Return the error bound of a log-probability of this part, (B,): logit and logsumexp.

        A product of D terms errs by at most γ |h| |w|, γ = D u / (1 - D u); see `Source`.
        """
        u = 2.0**-53 if self.exact else unit_roundoff(hidden.dtype)
        size, largest = _norms(source.hiddens[0]), _largest(source.weights[0])
        error = _gamma(source.hidden_size, u) * size * largest
        if part.number:
            projection = self.clusters.projections[part.number - 1]
            norm = torch.linalg.vector_norm(projection, dtype=torch.float64)
            error = error + largest * _gamma(hidden.shape[1], u) * _norms(hidden) * norm
        if source.bias is not None:
            size = size + source.bias.abs().nan_to_num(posinf=0.0).max()
        tiny = 4 * source.hidden_size * torch.finfo(torch.float32).tiny * (not self.exact)
        return 2 * (error + 8 * u * size * largest + source.vocab * 2.0**-52 + tiny)

    def _best(
        self,
        part: Part,
        log_p: Tensor,
        source: Source,
        lse: Tensor,
        rows: Tensor,
        through: Tensor | None,
    ) -> _Found:
        """Return the best tokens of a part, their logits exact: equal rows of the weight tie."""
        kept = min(log_p.shape[1], self.k + _SPARE)
        rough, local = log_p.topk(kept, dim=1)
        if kept < log_p.shape[1]:
            rest = rough[:, -1] if through is None else rough[:, -1] + through[:, 0]
            self.left[rows] = torch.maximum(self.left[rows], rest)
        values = source.at(local) - lse[:, None]
        if through is not None:
            values = values + through
        return _Found(values, local + part.start, torch.full_like(local, part.number))

    def _merge(self, found: _Found, some: _Found, rows: Tensor) -> _Found:
        """Return all candidates, sorted, as many as may matter."""
        n, width = len(found.values), some.values.shape[1]
        values = found.values.new_full((n, width), -math.inf)
        places, parts = found.places.new_zeros(n, width), found.parts.new_zeros(n, width)
        values[rows], places[rows], parts[rows] = some.values, some.places, some.parts
        values = torch.cat([found.values, values], 1)
        places, parts = torch.cat([found.places, places], 1), torch.cat([found.parts, parts], 1)
        return self._sorted(_Found(values, places, parts))

    def _sorted(self, found: _Found) -> _Found:
        by_id = self.clusters.tokens(found.places).argsort(1)
        order = found.values.gather(1, by_id).sort(dim=1, descending=True, stable=True).indices
        order = by_id.gather(1, order)
        if order.shape[1] > self.k + _SPARE:
            order, rest = order[:, : self.k + _SPARE], order[:, self.k + _SPARE, None]
            self.left = torch.maximum(self.left, found.values.gather(1, rest)[:, 0])
        return _Found(*(t.gather(1, order) for t in (found.values, found.places, found.parts)))

    def _decided(self, found: _Found) -> Tensor:
        """Return rows whose k best tokens no rounding could change."""
        values, parts = found.values, found.parts
        # Tokens that were not kept, or lie in a cluster that was not read.
        decided = self.left + 2 * self.error < values[:, self.k - 1]
        if self.exact:
            return decided | (self.left == -math.inf)
        # Within a part the order is exact; between parts it depends on their sums.
        gap = values[:, : self.k, None] - values[:, None, :]
        close = (gap.abs() <= 2 * self.error[:, None, None]) & (
            parts[:, : self.k, None] != parts[:, None, :]
        )
        return decided & ~close.flatten(1).any(1)


def _norms(hidden: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(hidden, dim=1, dtype=torch.float64)
    return norms


def _largest(weight: Tensor) -> Tensor:
    """Return an upper bound of the largest |w| of all rows.

    In float32 where it can be, which is several times faster than float64; squares may be rounded,
    or lost below 10⁻³⁸.
    """
    if weight.dtype == torch.float64:
        return torch.linalg.vector_norm(weight, dim=1).max() * 1.001  # type: ignore[no-any-return]
    norms = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
    return norms.max().double() * 1.001 + 2e-19 * math.sqrt(weight.shape[1])  # type: ignore[no-any-return]


def _gamma(terms: int, u: float) -> float:
    return 1.01 * (terms + 4) * u / max(1 - (terms + 4) * u, 0.5)


def _product(source: Source, dtype: torch.dtype) -> Tensor:
    """Return all logits (B, tokens) in `dtype`, the weight converted tile by tile."""
    hidden = source.hiddens[0].to(dtype)
    weight, bias = source.weights[0], source.bias
    tile = source.vocab if weight.dtype == dtype else _TILE
    made = [hidden @ weight[lo : lo + tile].to(dtype).T for lo in range(0, source.vocab, tile)]
    z = torch.cat(made, 1) if len(made) > 1 else made[0]
    return z if bias is None else z + bias.to(dtype)
