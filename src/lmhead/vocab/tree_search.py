"""Find the best tokens of a tree by best-first search: exact, without reading every token.

A subtree's probability bounds that of each of its tokens. Forks are opened in the order of their
probability, and once k tokens are found, a subtree with less than the k-th of them is never opened.
In a trained distribution few subtrees have most of the mass: tens of tens of thousands of forks are
opened.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from lmhead.sweep import kernels
from lmhead.vocab.tree_paths import Forks

# Forks opened per row in the first round; each round may open half as many more, so that a flat
# distribution, where every fork has to be opened, takes few rounds.
_FIRST = 8
_GROWTH = 1.5


@torch.no_grad()
def best_tokens(forks: Forks, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k tokens of largest log-probability, (N, k) each: values in float64, ids.

    Descending, lowest id first among equals, as in a stable sort of all tokens. If a decision
    that was read is NaN, the ids of that row are -1 and its values NaN.
    """
    forks = forks.detach()
    hidden = hidden.detach().contiguous()
    if not forks.tree.forks:
        values = (0 * hidden.double().sum(1, keepdim=True)).expand(-1, k)
        return values, torch.where(values.isnan(), -1, 0)
    core = kernels.for_pairs(hidden, forks.weight)
    bias = forks.bias
    plain = bias is None or (bias.dtype == forks.weight.dtype and kernels.readable(bias))
    if core is not None and plain:
        return _in_core(core, forks, hidden, k)
    return _in_rounds(forks, hidden, k)


def _in_core(core: ModuleType, forks: Forks, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Search with a heap of open forks per row, one fork at a time."""
    n, tree = len(hidden), forks.tree
    values = torch.empty(n, k, dtype=torch.float64)
    ids, opened = torch.empty(n, k, dtype=torch.int64), torch.empty(n, dtype=torch.int64)
    bias = None if forks.bias is None else forks.bias.contiguous().detach()
    arrays = (hidden.detach(), forks.weight.detach(), bias)
    tables = (tree.tables.start, tree.tables.child, tree.vocab)
    core.tree_best(*arrays, *tables, values, ids, opened, kernels.threads())
    return values, ids


def _in_rounds(forks: Forks, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Search several forks of every row at a time, the most probable open ones."""
    n, vocab = len(hidden), forks.tree.vocab
    values = torch.full((n, k), -math.inf, dtype=torch.float64, device=hidden.device)
    ids = torch.full((n, k), vocab, device=hidden.device)
    broken = torch.zeros(n, dtype=torch.bool, device=hidden.device)
    row = torch.arange(n, device=hidden.device)
    fork, mass = torch.zeros_like(row), torch.zeros(n, dtype=torch.float64, device=hidden.device)
    width = float(max(_FIRST, k))
    while len(row):
        opened = _rank_in_row(row, mass) < int(width)
        width = min(_GROWTH * width, vocab)
        opened_row, opened_mass = row[opened], mass[opened]
        decided = forks.decide(hidden, opened_row, fork[opened])
        row_below = opened_row[decided.owner]
        mass_below = opened_mass[decided.owner] + decided.log_p
        broken[row_below[mass_below.isnan()]] = True
        is_token = decided.child < vocab
        values, ids = _merge(
            values, ids, *(t[is_token] for t in (row_below, mass_below, decided.child))
        )
        row = torch.cat([row[~opened], row_below[~is_token]])
        fork = torch.cat([fork[~opened], decided.child[~is_token] - vocab])
        mass = torch.cat([mass[~opened], mass_below[~is_token]])
        # A subtree that ties with the k-th token may hold one with a lower id. While fewer than k
        # are found, tokens of probability 0 count as well.
        full = ids[:, -1] < vocab
        open = ((mass >= values[row, -1]) | ~full[row]) & ~broken[row]
        row, fork, mass = row[open], fork[open], mass[open]
    values[broken], ids[broken] = math.nan, -1
    return values, ids


def _rank_in_row(row: Tensor, mass: Tensor) -> Tensor:
    """Return the number of entries of the same row with more mass: (M,)."""
    order = mass.argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    sorted_row = row[order]
    first = torch.searchsorted(sorted_row, sorted_row)
    rank = torch.empty_like(row)
    rank[order] = torch.arange(len(row), device=row.device) - first
    return rank


def _merge(
    values: Tensor, ids: Tensor, row: Tensor, mass: Tensor, token: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the k best of (N, k) found tokens and of new ones, (M,) each; ties: lowest id."""
    n, k = values.shape
    if len(row) == 0:
        return values, ids
    old_rows = torch.arange(n, device=row.device).repeat_interleave(k)
    rows = torch.cat([old_rows, row])
    masses = torch.cat([values.reshape(-1), mass])
    tokens = torch.cat([ids.reshape(-1), token])
    order = tokens.argsort(stable=True)
    order = order[masses[order].argsort(descending=True, stable=True)]
    order = order[rows[order].argsort(stable=True)]
    sorted_rows = rows[order]
    begin = torch.searchsorted(sorted_rows, torch.arange(n, device=row.device))
    kept = order[begin[:, None] + torch.arange(k, device=row.device)]
    return masses[kept], tokens[kept]
