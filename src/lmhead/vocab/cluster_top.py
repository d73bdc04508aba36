"""The k best tokens of an adaptive head, by branch and bound, exact.

A token has at most the probability of its cluster: a cluster whose probability is below that of the
k-th best token so far is not read. The head is always read, and for most states nothing else.

Products run in float32 first; rows that rounding leaves undecided are repeated in float64, and
rows that are still undecided are sorted in full. The order is that of exact log-probabilities,
lowest id first among equals, in any batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lmhead.sweep import Source
from lmhead.sweep.source import unit_roundoff, without_autocast
from lmhead.vocab.clusters import Clusters, Part, exact_source
from lmhead.vocab.factors import Factors

# Candidates kept beyond k: by then the gap to the k-th exceeds rounding errors.
_SPARE = 8
# Tokens converted to float64 at a time.
_TILE = 8192
# From this k on, comparing all pairs of candidates costs more than float64.
_LARGE = 256


def cluster_top(clusters: Clusters, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (N, k) in float64 and ids (N, k); -1 where a row has a NaN."""
    values = torch.empty(len(hidden), k, dtype=torch.float64, device=hidden.device)
    ids = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    start = 0
    with torch.no_grad(), without_autocast(hidden.device):
        for rows in clusters.blocks(hidden):
            undecided = torch.arange(len(rows), device=rows.device)
            for exact in (True,) if k > _LARGE else (False, True):
                search = _Search(clusters, rows[undecided], k, exact=exact)
                values[start + undecided], ids[start + undecided], decided = search.run()
                undecided = undecided[~decided]
                if len(undecided) == 0:
                    break
            else:
                values[start + undecided], ids[start + undecided] = Factors.top(
                    clusters, rows[undecided], k
                )
            start += len(rows)
    return values, ids


class _Candidates(NamedTuple):
    """The candidates of each row, best first: (B, K) each."""

    values: Tensor  # float64, log-probabilities; -inf where there is none
    places: Tensor
    parts: Tensor  # number of the candidate's part


class _Search:
    """Search of the head, and of the clusters that may hold one of the k best tokens."""

    def __init__(self, clusters: Clusters, hidden: Tensor, k: int, *, exact: bool) -> None:
        self.clusters, self.hidden, self.k, self.exact = clusters, hidden, k, exact
        n = len(hidden)
        self.error = torch.zeros(n, dtype=torch.float64, device=hidden.device)
        # Upper bound of the log-probability of all pruned or dropped tokens.
        self.bound = torch.full_like(self.error, -math.inf)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return values (B, k), ids (B, k), and which rows are decided beyond rounding."""
        clusters, head = self.clusters, self.clusters.parts[0]
        all_rows = torch.arange(len(self.hidden), device=self.hidden.device)
        log_p, source, lse = self._log_softmax(head, all_rows)
        entries = log_p[:, clusters.shortlist :]
        candidates = self._best(head, log_p[:, : clusters.shortlist], source, lse, all_rows, None)
        candidates = self._sorted(candidates)
        for part in clusters.parts[1:]:
            mass = entries[:, part.number - 1]
            found = candidates.values.shape[1]
            kth = candidates.values[:, self.k - 1] if found >= self.k else -math.inf
            needed = ~(mass + 2 * self.error < kth)  # true for NaN
            self.bound = torch.where(needed, self.bound, torch.maximum(self.bound, mass))
            rows = needed.nonzero()[:, 0]
            if len(rows) == 0:
                continue
            entry = torch.full((len(rows), 1), clusters.shortlist + part.number - 1)
            through = source.select(rows).at(entry.to(rows)) - lse[rows, None]
            inner, tail, tail_lse = self._log_softmax(part, rows)
            more = self._best(part, inner, tail, tail_lse, rows, through)
            candidates = self._merge(candidates, more, rows)
        broken = log_p.isnan().any(1) | candidates.values.isnan().any(1)
        values, places = candidates.values[:, : self.k], candidates.places[:, : self.k]
        ids = clusters.tokens(places).masked_fill(broken[:, None], -1)
        values = values.masked_fill(broken[:, None], math.nan)
        return values, ids, self._decided(candidates) | broken

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
    ) -> _Candidates:
        """Return the best tokens of a part, their logits exact: equal rows of the weight tie."""
        kept = min(log_p.shape[1], self.k + _SPARE)
        approximate, local = log_p.topk(kept, dim=1)
        if kept < log_p.shape[1]:
            rest = approximate[:, -1] if through is None else approximate[:, -1] + through[:, 0]
            self.bound[rows] = torch.maximum(self.bound[rows], rest)
        values = source.at(local) - lse[:, None]
        if through is not None:
            values = values + through
        return _Candidates(values, local + part.start, torch.full_like(local, part.number))

    def _merge(self, candidates: _Candidates, more: _Candidates, rows: Tensor) -> _Candidates:
        """Return all candidates, sorted; at most k + _SPARE."""
        joined = []
        for old, new, none in zip(candidates, more, (-math.inf, 0, 0), strict=True):
            of_all_rows = old.new_full((len(old), new.shape[1]), none)
            of_all_rows[rows] = new
            joined.append(torch.cat([old, of_all_rows], 1))
        return self._sorted(_Candidates(*joined))

    def _sorted(self, candidates: _Candidates) -> _Candidates:
        by_id = self.clusters.tokens(candidates.places).argsort(1)
        order = candidates.values.gather(1, by_id).sort(dim=1, descending=True, stable=True).indices
        order = by_id.gather(1, order)
        if order.shape[1] > self.k + _SPARE:
            order, rest = order[:, : self.k + _SPARE], order[:, self.k + _SPARE, None]
            self.bound = torch.maximum(self.bound, candidates.values.gather(1, rest)[:, 0])
        return _Candidates(*(t.gather(1, order) for t in candidates))

    def _decided(self, candidates: _Candidates) -> Tensor:
        """Return the rows whose k best tokens are certain despite rounding."""
        values, parts = candidates.values, candidates.parts
        # All dropped tokens, and those of clusters that were not read, are below the k-th.
        decided = self.bound + 2 * self.error < values[:, self.k - 1]
        if self.exact:
            return decided | (self.bound == -math.inf)
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

    In float32 if possible, which is several times faster than float64; the factor and the term
    cover rounding and underflow of the squares.
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
    tiles = [hidden @ weight[lo : lo + tile].to(dtype).T for lo in range(0, source.vocab, tile)]
    z = torch.cat(tiles, 1) if len(tiles) > 1 else tiles[0]
    return z if bias is None else z + bias.to(dtype)
