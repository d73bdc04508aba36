"""From bounds to the k best tokens of each row.

The k tokens with the best approximate logits are scored exactly. The least of them is a limit: what
cannot reach it, by its upper bound, is not among the best k. What is left is scored exactly too,
and the k best of that are the answer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lmhead.screen.candidates import Candidates, Pairs


class Found(NamedTuple):
    """What the bounds decided of B rows."""

    decided: Tensor  # (B,) bool
    values: Tensor  # (decided, k) float64
    ids: Tensor  # (decided, k)
    rescored: Tensor  # (B,)
    bytes_read: int


def decide(found: Candidates, k: int) -> Found:
    """Return the k best tokens of each row, for the rows that the bounds decide."""
    rows, vocab = found.rows, found.copy.vocab
    most = max(256, 4 * k, vocab // 8)
    if (one := found.at_once(k, most)) is not None:
        _check_sound(one.sound)
        decided = torch.tensor([one.decided])
        some = slice(None) if one.decided else slice(0)
        scored = torch.tensor([one.scored])
        return Found(decided, one.values[some], one.ids[some], scored, found.bytes_read)
    pivots = found.best(k)
    x, z = found.exact(pivots)
    least = z.view(rows, k).amin(1)
    limit = found.limits(least)
    pairs = found.reaching(limit)
    first = pivots
    if found.copy.low is not None and len(pairs.ids) > len(pivots.ids):
        pairs, limit, pivots, x, z = _second_pass(found, pairs, limit, k)
    # Where masked tokens come among the best k, nothing can be passed over.
    few = pairs.counts <= most
    decided = few & (pairs.counts >= k) & (least > -math.inf)
    if not bool(decided.all()):
        pairs = pairs.keep(decided[pairs.rows])
    if not (bool(decided.all()) and torch.equal(pairs.ids, pivots.ids)):
        x, z = found.exact(pairs)
    _check_sound(found.holds(pairs, x))
    rescored = pairs.counts
    if first is not pivots:
        again = torch.isin(first.rows * vocab + first.ids, pairs.rows * vocab + pairs.ids)
        rescored = rescored + first.keep(~again).counts
    kept = Pairs(pairs.counts[decided], pairs.ids)
    values, ids = kept.largest(z, k) if len(kept.counts) else (z.view(0, k), pairs.ids.view(0, k))
    return Found(decided, values, ids, rescored, found.bytes_read)


def _second_pass(
    found: Candidates, pairs: Pairs, limit: Tensor, k: int
) -> tuple[Pairs, Tensor, Pairs, Tensor, Tensor]:
    """Repeat with the low nibbles: better pivots, a higher limit, fewer tokens."""
    approx, radius = found.refined(pairs)
    pivots = pairs.best(approx, k)
    x, z = found.exact(pivots)
    limit = torch.maximum(limit, found.limits(z.view(-1, k).amin(1)))
    # A NaN is kept.
    kept = pairs.keep(~(approx + radius < limit[pairs.rows]))
    return kept, limit, pivots, x, z


def _check_sound(sound: bool) -> None:
    """Raise if a token scored exactly is outside its bounds (a copy of another weight)."""
    if not sound:
        raise RuntimeError(
            "a logit lies outside its bounds: the copy does not belong to the weight as it is now; "
            "make another ScreenedHead"
        )
