"""Choose the cut-offs of an adaptive head: a model of its cost, and its minimum.

In:  token frequencies, most frequent first; the sizes.
Out: cut-offs: the ranks by frequency at which the shortlist and the clusters end.

The time of one training step for N tokens, in multiplications, is

    N · (S + C) · D                                  the head: S tokens, C clusters
    + Σ_c N · p_c · (V_c + D) · D_c                  cluster c sees its share p_c of the tokens
    + Σ_parts a · tokens · width                      reading the weight and writing its gradient
    + Σ_parts b                                      overhead of a call

The best cut of a given number of clusters is found by dynamic programming over places on a
logarithmic grid, among those whose shortlist covers most tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lmhead import checks
from lmhead.vocab.frequencies import check_frequencies, zipf

# Cost of an entry of a weight beside its products, and overhead of a call, in multiplications:
# about 10 bytes moved and 0.3 ms, at 5·10¹⁰ multiplications and 2·10¹⁰ bytes a second.
_PER_WEIGHT = 25.0
_PER_CALL = 1.5e7
# Number of possible cut-offs.
_GRID = 96
# Smallest useful width of a cluster.
_NARROWEST = 8


def check_cutoffs(cutoffs: Any, vocab_size: int) -> tuple[int, ...]:
    """Validate cut-offs: ascending, inside the vocabulary: [2000, 10000] for V = 50000."""
    if isinstance(cutoffs, str) or not isinstance(cutoffs, Sequence):
        raise TypeError(f"cutoffs must be a list of integers; got {type(cutoffs).__name__}")
    for i, cut in enumerate(cutoffs):
        checks.check_integer(f"cutoffs[{i}]", cut, low=1, high=vocab_size - 1)
    checked = tuple(cutoffs)
    if any(a >= b for a, b in pairwise(checked)):
        raise ValueError(f"cutoffs must be in ascending order, each once; got {list(checked)}")
    return checked


def widths(hidden_size: int, clusters: int, div_value: float) -> tuple[int, ...]:
    """Return D_c = D / div_value^(c + 1), at least 1, as in `nn.AdaptiveLogSoftmaxWithLoss`."""
    return tuple(max(1, int(hidden_size // div_value ** (c + 1))) for c in range(clusters))


def choose_cutoffs(
    vocab_size: int,
    hidden_size: int,
    *,
    frequencies: Any = None,
    div_value: float = 4.0,
    tokens: int = 1024,
    max_clusters: int = 4,
    coverage: float = 0.8,
) -> tuple[int, ...]:
    """Return the cut-offs with the least modelled time per training step.

    By time alone the shortlist would be a few dozen tokens, and most positions would be scored at
    a fraction of the width: `coverage` keeps the quality.

    Args:
        vocab_size: V.
        hidden_size: D.
        frequencies: (V,), in any order; Zipf's law if not given.
        div_value: ratio of the widths of successive clusters.
        tokens: N, of a training step.
        max_clusters: maximum number; widths under 8 are not used.
        coverage: minimum share of positions whose target is in the shortlist.

    >>> choose_cutoffs(33278, 256)
    (5761, 8932)
    >>> choose_cutoffs(100, 32)
    ()
    """
    checks.check_integer("vocab_size", vocab_size, low=1)
    checks.check_integer("hidden_size", hidden_size, low=1)
    checks.check_number("div_value", div_value, low=1.0)
    checks.check_integer("tokens", tokens, low=1)
    checks.check_integer("max_clusters", max_clusters, low=0)
    checks.check_number("coverage", coverage, low=0.0, high=1.0)
    if frequencies is None:
        shares = zipf(vocab_size)
    else:
        shares = check_frequencies(frequencies, vocab_size).sort(descending=True).values
    before = torch.cat([shares.new_zeros(1), shares.cumsum(0)])  # mass of the first v tokens
    places = _grid(vocab_size)
    best: tuple[float, tuple[int, ...]] = (_head_cost(vocab_size, 0, hidden_size, tokens), ())
    for n in range(1, max_clusters + 1):
        sizes = widths(hidden_size, n, div_value)
        if sizes[-1] < _NARROWEST or len(places) <= n:
            break
        best = min(best, _best_cut(before, places, sizes, hidden_size, tokens, coverage))
    return best[1]


def _grid(vocab_size: int) -> list[int]:
    """Return places from 1 to V on a logarithmic scale, V last."""
    steps = torch.logspace(0, 1, _GRID, base=vocab_size, dtype=torch.float64).round().long()
    return sorted({*steps.tolist(), vocab_size})


def _head_cost(vocab: int, clusters: int, hidden_size: int, tokens: int) -> float:
    return (vocab + clusters) * hidden_size * (tokens + _PER_WEIGHT) + _PER_CALL


def _cluster_cost(share: Any, vocab: Any, width: int, hidden_size: int, tokens: int) -> Any:
    products = tokens * share * (vocab + hidden_size) * width
    return products + _PER_WEIGHT * (vocab + hidden_size) * width + _PER_CALL


def _best_cut(
    before: Tensor,
    places: list[int],
    sizes: tuple[int, ...],
    hidden_size: int,
    tokens: int,
    coverage: float,
) -> tuple[float, tuple[int, ...]]:
    """Return the cheapest cut into a shortlist and len(sizes) clusters: its cost, the cut-offs."""
    ranks = torch.tensor(places)
    mass = before[ranks]
    # cost[i]: the cheapest way to cover the tokens from places[i] on; filled from the last cluster.
    cost = torch.full((len(places),), torch.inf, dtype=torch.float64)
    cost[-1] = 0.0
    following: list[Tensor] = []
    later = torch.ones(len(places), len(places), dtype=torch.bool).triu(1)
    for width in reversed(sizes):
        cluster_cost = _cluster_cost(
            mass - mass[:, None], ranks - ranks[:, None], width, hidden_size, tokens
        )
        total = torch.where(later, cluster_cost + cost, torch.inf)
        cost, stop = total.min(1)
        following.insert(0, stop)
    total = cost + torch.tensor(
        [_head_cost(p, len(sizes), hidden_size, tokens) for p in places], dtype=torch.float64
    )
    # V itself always covers enough, but leaves no token for a cluster: its cost is inf.
    i = int(torch.where(mass >= coverage, total, torch.inf).argmin())
    best_cost, cuts = float(total[i]), []
    for stop in following:
        cuts.append(places[i])
        i = int(stop[i])
    return best_cost, tuple(cuts)
