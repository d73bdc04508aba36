"""The k best tokens of an adaptive head, by branch and bound, exact.

A token has at most the probability of its cluster: a cluster whose probability is below that of the
k-th best token so far is not read. The head is always read, and for most states nothing else.

One row is read in float64: that takes no longer, since the time goes into reading the weights.
Several rows are multiplied in float32 first; those that rounding leaves undecided are repeated one
by one. What is still undecided is sorted in full. The order is that of exact log-probabilities,
lowest id first among equals, in any batch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lmhead.sweep import Source
from lmhead.sweep.source import without_autocast
from lmhead.vocab.clusters import Clusters, Part, exact_source, reads_one_row
from lmhead.vocab.factors import Factors

# Candidates kept beyond k: by then the gap to the k-th exceeds rounding errors.
_SPARE = 8
# From this k on, comparing all pairs of candidates costs more than float64.
_LARGE = 256


def cluster_top(clusters: Clusters, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (N, k) in float64 and ids (N, k); -1 where a row has a NaN."""
    values = torch.empty(len(hidden), k, dtype=torch.float64, device=hidden.device)
    ids = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    alone = reads_one_row(clusters.source(clusters.parts[0], hidden[:1]))
    start = 0
    with torch.no_grad(), without_autocast(hidden.device):
        for rows in clusters.blocks(hidden):
            undecided = list(range(start, start + len(rows)))
            if k <= _LARGE and not (alone and len(rows) == 1):
                found = _Search(clusters, rows, k).run()
                values[undecided], ids[undecided], decided = found
                undecided = [start + i for i in (~decided).nonzero()[:, 0].tolist()]
            for i in undecided:
                values[i], ids[i] = _top_of_row(clusters, hidden[i : i + 1], k)
            start += len(rows)
    return values, ids


def _top_of_row(clusters: Clusters, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the best tokens of a row (1, D) from float64 logits: (k,) each."""
    candidates: list[tuple[Tensor, Tensor]] = []
    kth, bound, size = -math.inf, -math.inf, float(clusters.vocab)

    def read(part: Part, mass: float) -> Tensor:
        """Add the best tokens of a part; return all log-probabilities within it."""
        nonlocal kth, bound, size
        z = exact_source(clusters, part, hidden).float64_row()
        lse = z.logsumexp(0)
        size += abs(float(lse))
        log_p = z.sub_(lse)
        values, local = log_p[: part.size].topk(min(part.size, k + _SPARE))
        candidates.append((values + mass, local + part.start))
        if len(values) < part.size:  # no other token of the part has more
            bound = max(bound, float(values[-1]) + mass)
        if len(values) >= k:
            kth = max(kth, float(values[k - 1]) + mass)
        return log_p

    head, *tails = clusters.parts
    masses = read(head, 0.0)[head.size :].tolist()
    for part, mass in zip(tails, masses, strict=True):
        if mass + _rounding(size, kth) < kth:
            bound = max(bound, mass)
        else:
            read(part, mass)
    values, places = (torch.cat(parts) for parts in zip(*candidates, strict=True))
    if bool(values.isnan().any()):
        return values.new_full((k,), math.nan), places.new_full((k,), -1)
    ids, by_id = clusters.tokens(places).sort()
    values, order = values[by_id].sort(descending=True, stable=True)
    if bound == -math.inf or bound + _rounding(size, kth) < float(values[k - 1]):
        return values[:k], ids[order[:k]]
    in_full = Factors.top(clusters, hidden, k)
    return in_full[0][0], in_full[1][0]


def _rounding(size: float, value: float) -> float:
    """Return more than the rounding errors of two log-probabilities of about `value`.

    `size` is the number of terms in their sums, and how large these are: products are exact.
    """
    return 2.0**-50 * (size + abs(value)) if math.isfinite(value) else 0.0


class _Candidates(NamedTuple):
    """The candidates of each row, best first: (B, K) each."""

    values: Tensor  # float64, log-probabilities; -inf where there is none
    places: Tensor
    parts: Tensor  # number of the candidate's part


class _Search:
    """Search of the head, and of the clusters that may hold one of the k best tokens."""

    def __init__(self, clusters: Clusters, hidden: Tensor, k: int) -> None:
        self.clusters, self.hidden, self.k = clusters, hidden, k
        self.error = torch.zeros(len(hidden), dtype=torch.float64, device=hidden.device)
        # Upper bound of the log-probability of all pruned or dropped tokens.
        self.bound = torch.full_like(self.error, -math.inf)
        nothing = self.error.new_empty(len(hidden), 0)
        self.candidates = _Candidates(nothing, nothing.long(), nothing.long())

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return values (B, k), ids (B, k), and which rows are decided beyond rounding."""
        clusters, (head, *tails) = self.clusters, self.clusters.parts
        all_rows = torch.arange(len(self.hidden), device=self.hidden.device)
        source, lse = self._read(head, all_rows, 0.0)
        entries = clusters.shortlist + torch.arange(len(tails), device=all_rows.device)
        masses = source.at(entries.expand(len(all_rows), -1)) - lse[:, None]
        for part, mass in zip(tails, masses.T, strict=True):
            found = self.candidates.values
            kth = found[:, self.k - 1] if found.shape[1] >= self.k else -math.inf
            needed = ~(mass + 2 * self.error < kth)  # true for NaN
            self.bound = torch.where(needed, self.bound, torch.maximum(self.bound, mass))
            rows = needed.nonzero()[:, 0]
            if len(rows):
                self._read(part, rows, mass[rows, None])
        broken = ~lse.isfinite() | self.candidates.values.isnan().any(1)
        values, places = (t[:, : self.k] for t in self.candidates[:2])
        ids = clusters.tokens(places).masked_fill(broken[:, None], -1)
        values = values.masked_fill(broken[:, None], math.nan)
        return values, ids, self._decided() | broken

    def _read(self, part: Part, rows: Tensor, mass: Tensor | float) -> tuple[Source, Tensor]:
        """Add the best tokens of a part to the candidates; return its source and lse (B,).

        Their logits are exact, so that equal rows of the weight tie; `lse` is not.
        """
        source = exact_source(self.clusters, part, self.hidden[rows])
        z = self._logits(source, rows)
        lse = z.logsumexp(1)
        kept = min(part.size, self.k + _SPARE)
        approximate, local = z[:, : part.size].topk(kept, dim=1)
        if kept < part.size:
            rest = approximate[:, -1:] - lse[:, None] + mass
            self.bound[rows] = torch.maximum(self.bound[rows], rest[:, 0])
        values = source.at(local) - lse[:, None] + mass
        self._add(
            _Candidates(values, local + part.start, local.new_full(local.shape, part.number)), rows
        )
        return source, lse

    def _logits(self, source: Source, rows: Tensor) -> Tensor:
        """Return all logits (B, tokens) in float64, and add to the errors of log-probabilities.

        They are float32 products of the first term: a second one holds what this type rounds off.
        """
        first = replace(source, hiddens=source.hiddens[:1], weights=source.weights[:1])
        z = first.linear_rows(slice(0, source.rows)).double()
        size = torch.zeros_like(z[:, 0])
        if source.bias is not None:
            z += source.bias
            size = z.masked_fill(z == -math.inf, 0.0).abs().amax(1)
        per_row, relative, absolute = source.error_bounds(source.hiddens, slice(0, source.rows))
        error = per_row.double() * first.token_norms.max() + relative * size + absolute
        self.error[rows] += 2 * (error + source.vocab * 2.0**-52)
        return z

    def _add(self, more: _Candidates, rows: Tensor) -> None:
        """Add candidates of some rows, and keep the best k + _SPARE of each row, sorted."""
        joined = []
        for old, new, none in zip(self.candidates, more, (-math.inf, 0, 0), strict=True):
            of_all_rows = old.new_full((len(old), new.shape[1]), none)
            of_all_rows[rows] = new
            joined.append(torch.cat([old, of_all_rows], 1))
        values, places, _ = joined
        by_id = self.clusters.tokens(places).argsort(1)
        order = values.gather(1, by_id).sort(dim=1, descending=True, stable=True).indices
        order = by_id.gather(1, order)
        if order.shape[1] > self.k + _SPARE:
            order, rest = order[:, : self.k + _SPARE], order[:, self.k + _SPARE, None]
            self.bound = torch.maximum(self.bound, values.gather(1, rest)[:, 0])
        self.candidates = _Candidates(*(t.gather(1, order) for t in joined))

    def _decided(self) -> Tensor:
        """Return the rows whose k best tokens are certain despite rounding."""
        values, _, parts = self.candidates
        # All dropped tokens, and those of clusters that were not read, are below the k-th.
        decided = self.bound + 2 * self.error < values[:, self.k - 1]
        # Within a part the order is exact; between parts it depends on their sums.
        gap = values[:, : self.k, None] - values[:, None, :]
        close = (gap.abs() <= 2 * self.error[:, None, None]) & (
            parts[:, : self.k, None] != parts[:, None, :]
        )
        return decided & ~close.flatten(1).any(1)
