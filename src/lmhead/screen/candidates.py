"""Approximate logits with proven bounds for all tokens, and the k best tokens from them.

One pass over the copy makes `Candidates`. Everything after that reads a few rows: `reaching` finds
the tokens whose upper bound reaches a limit, `refined` adds the low nibbles of "4+4", `exact` takes
the float64 dot products that decide.

`decide` scores the k tokens with the best approximate logits exactly. The least of them is a limit:
what cannot reach it, by its upper bound, is not among the best k. What is left is scored exactly
too, and the k best of that are the answer.

Tokens are compared by z = map(x) in float64, and skipped by a bound on x. The map increases with x,
but two different x may round to the same z in float64 (tanh is 1 for large x), and then the lowest
id wins. So a token may be skipped only if its x is below the limit by more than such roundings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from lmhead.screen import screen_kernels
from lmhead.screen.quantized_weight import BLOCK, QuantizedWeight
from lmhead.screen.states import States
from lmhead.sweep import Pointwise, Source, kernels

_U = 2.0**-53


def is_increasing(p: Pointwise) -> bool:
    """Return whether the map increases with x, by a slope that float64 can represent."""
    factors = [p.scale, p.outer] if p.bounded else [p.scale]
    shifts = [p.shift, p.outer_shift]
    return all(2.0**-100 < f < 2.0**100 for f in factors) and all(abs(s) < 1e30 for s in shifts)


def lowest_linear(p: Pointwise, z: Tensor) -> Tensor:
    """Return a limit t, (...): a token with a linear value below t has a logit below z, (...).

    The map must be increasing: `is_increasing(p)`.
    """
    if p.is_identity:
        return z
    if not p.bounded:
        t = (z - p.shift) / p.scale
        # Two roundings here, two on either side of the comparison: wider gaps stay gaps.
        return t - 16 * _U * (t.abs() + abs(p.shift) / p.scale) - 2.0**-1000 / p.scale
    # tanh is taken to be right to 8 units in the last place; its argument is rounded twice.
    y = (z - p.outer_shift) / p.outer
    y = y - 64 * _U * (1 + abs(p.shift) + abs(p.outer_shift) / p.outer)
    argument = y.clamp(max=1 - 4 * _U).atanh()  # NaN below -1: no token may be skipped
    t = (argument - p.shift) / p.scale
    t = t - 2.0**-40 * (t.abs() + (1 + abs(p.shift)) / p.scale)
    return torch.where(t.isnan(), -math.inf, t)


def logit_bounds(p: Pointwise, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Convert bounds on x, in float64, to bounds on z, in float64."""
    if p.is_identity:
        return lower, upper
    lower, upper = p(lower), p(upper)
    size = abs(p.outer) + abs(p.outer_shift) if p.bounded else abs(p.shift)
    slack = 64 * _U * (1 + abs(p.shift)) if p.bounded else 8 * _U
    return (
        lower - slack * (lower.abs().nan_to_num(posinf=0.0) + size) - 2.0**-900,
        upper + slack * (upper.abs().nan_to_num(posinf=0.0) + size) + 2.0**-900,
    )


@dataclass
class Pairs:
    """Some tokens of some rows: row after row, ids ascending within a row."""

    counts: Tensor  # (B,)
    ids: Tensor  # (M,)

    @cached_property
    def rows(self) -> Tensor:
        """The row of each, (M,)."""
        if len(self.counts) == 1:
            return torch.zeros_like(self.ids)
        return torch.arange(len(self.counts)).repeat_interleave(self.counts)

    @cached_property
    def places(self) -> Tensor:
        """The place of each within its row, (M,)."""
        starts = self.counts.cumsum(0) - self.counts
        return torch.arange(len(self.ids)) - starts[self.rows]

    def keep(self, mask: Tensor) -> Pairs:
        """Return the pairs where mask (M,) is true."""
        counts = torch.zeros_like(self.counts).index_add_(0, self.rows, mask.long())
        return Pairs(counts, self.ids[mask])

    def table(self, values: Tensor, width: int, fill: float) -> Tensor:
        """Return one number per pair, (M,), as (B, width), padded at the end of each row."""
        if len(values) == len(self.counts) * width:
            return values.view(-1, width)
        out = values.new_full((len(self.counts), width), fill)
        out[self.rows, self.places] = values
        return out

    def best(self, values: Tensor, k: int) -> Pairs:
        """Return some k pairs of each row with the largest values; every row must have k."""
        width = int(self.counts.max())
        places = self.table(values, width, -math.inf).topk(k, dim=1).indices
        ids = self.table(self.ids, width, -1).gather(1, places).sort(dim=1).values
        return Pairs(torch.full_like(self.counts, k), ids.reshape(-1))

    def largest(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest of each row, ties to the lowest id: values and ids (B, k).

        Every row must have k.
        """
        width = int(self.counts.max())
        table = self.table(values, width, -math.inf)
        ids = self.table(self.ids, width, -1)
        table, order = table.sort(dim=1, descending=True, stable=True)
        return table[:, :k], ids.gather(1, order[:, :k])


class Decided(NamedTuple):
    """The best tokens of one row."""

    values: Tensor  # (1, k) float64, best first; meaningless unless decided
    ids: Tensor  # (1, k), the lowest first among equals
    scored: int  # tokens that were scored exactly
    decided: bool  # whether the bounds decide
    sound: bool  # whether every exact value lay within its bounds


class Candidates:
    """Approximate logits of B hidden states with bounds, from one pass over the copy.

    Attributes:
        approx: (B, V) float32. Token v's linear value, w_v · h + b_v, and its float64 dot product,
            lie in base + approx ± (e · e_v + n · n_v + |approx| · 2^-22 + 2^-120).
        states: base, e and n, one number per hidden state.
        block_top: (B, blocks), the largest of each block of approx.
    """

    def __init__(
        self,
        copy: QuantizedWeight,
        source: Source,
        bias: Tensor | None,
        allowed: Tensor | None = None,
    ) -> None:
        """Read the copy of the source's weight: see `screen_kernels.products`."""
        self.copy, self.source, self.bias = copy, source, bias
        self.pointwise: Pointwise = source.pointwise
        self._linear = Source(source.hiddens, source.weights, source.bias, Pointwise())
        self.states = States.of(copy, source.hiddens[0])
        self.approx, self.block_top, read = screen_kernels.products(
            copy, self.states, bias, allowed
        )
        self.bytes_read = copy.pass_bytes * read // copy.vocab
        self.bytes_read += 0 if bias is None else bias.nbytes

    @property
    def rows(self) -> int:
        """B."""
        return len(self.approx)

    def best(self, k: int) -> Pairs:
        """Return the k tokens of each row with the largest approximate logits, without a sort."""
        if k == 1:
            ids = self.block_top.argmax(1, keepdim=True) * BLOCK + torch.arange(BLOCK)
            place = self.approx.gather(1, ids.clamp_(max=self.copy.vocab - 1)).argmax(1)
            return Pairs(torch.ones_like(place), ids.gather(1, place[:, None])[:, 0])
        ids = screen_kernels.best(self.approx, self.block_top, k)
        return Pairs(torch.full((self.rows,), k), ids.view(-1))

    def decide_in_core(self, k: int, most: int) -> Decided | None:
        """Return the k best tokens of one row, from bounds to exact values in one call.

        At most `most` tokens are scored. None if the core cannot do it: `decide` has the steps.
        """
        copy, states = self.copy, self.states
        hidden, weight = self.source.hiddens[0], self.source.weights[0]
        core = kernels.for_pairs(hidden, weight)
        plain = self.rows == 1 and copy.low is None and self.pointwise.is_identity
        if core is None or not plain or k > self.block_top.shape[1]:
            return None
        values, ids = torch.empty(1, k, dtype=torch.float64), torch.empty(1, k, dtype=torch.int64)
        given, arrays = copy.arrays, kernels.arrays
        scored, decided, sound = core.screen_decide(
            *arrays(self.approx, self.block_top),
            *(given.first_e, given.n, given.block_e, given.block_n),
            *arrays(states.e, states.n, states.base),
            *(hidden.detach(), weight.detach(), self.bias),
            *(most, *arrays(values, ids), kernels.threads()),
        )
        self.bytes_read += copy.n.nbytes * 2 + scored * weight[0].nbytes
        return Decided(values, ids, scored, decided, sound)

    def exact(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Return float64 linear values and logits of some tokens, (M,) each, from the weight."""
        weight = self.source.weights[0]
        self.bytes_read += len(pairs.ids) * weight.shape[1] * weight.element_size()
        x = self._linear.pairs(pairs.rows, pairs.ids)
        return x, self.pointwise.apply_(x.clone())

    def limits(self, z: Tensor) -> Tensor:
        """Return limits (B,): a token whose bound on approx is below has a logit below z."""
        t = lowest_linear(self.pointwise, z)
        base = self.states.base
        return (t - base) - 4 * _U * (t.abs().nan_to_num(posinf=0.0) + base.abs())

    def reaching(self, limit: Tensor) -> Pairs:
        """Return the tokens whose upper bound reaches a limit of `limits`, (B,)."""
        self.bytes_read += self.copy.n.nbytes * 2
        given = (self.copy, self.approx, self.block_top, self.states.e, self.states.n, limit)
        return Pairs(*screen_kernels.select(*given))

    def holds(self, pairs: Pairs, x: Tensor) -> bool:
        """Return whether float64 linear values (M,) lie within their bounds."""
        return screen_kernels.within(self.refined(pairs), self.states.base, pairs.rows, x)

    def refined(self, pairs: Pairs) -> Tensor:
        """Return approx with all eight bits, and its error: (2, M) in float64."""
        if self.copy.low is not None:
            self.bytes_read += len(pairs.ids) * self.copy.low.shape[1]
        return screen_kernels.refine(self.copy, self.states, self.approx, pairs.rows, pairs.ids)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Return lower and upper bounds of all logits, (B, V) in float32, rounded outwards."""
        states, copy = self.states, self.copy
        lower, upper = torch.empty_like(self.approx), torch.empty_like(self.approx)
        for row in range(self.rows):
            a = self.approx[row].double()
            radius = states.e[row] * copy.first_e.double() + states.n[row] * copy.n.double()
            radius += a.abs().nan_to_num(posinf=0.0) * screen_kernels.SLACK + screen_kernels.FLOOR
            radius += 4 * _U * states.base[row].abs()
            a += states.base[row]
            low, high = logit_bounds(self.pointwise, a - radius, a + radius)
            torch.nextafter(low.float(), torch.tensor(-math.inf), out=lower[row])
            torch.nextafter(high.float(), torch.tensor(math.inf), out=upper[row])
            upper[row].masked_fill_(a == -math.inf, -math.inf)
        return lower, upper


class Found(NamedTuple):
    """The best tokens of the rows that the bounds decide, of B rows."""

    decided: Tensor  # (B,) bool
    values: Tensor  # (decided, k) float64
    ids: Tensor  # (decided, k)
    rescored: Tensor  # (B,)
    bytes_read: int


def decide(found: Candidates, k: int) -> Found:
    """Return the k best tokens of each row, for the rows that the bounds decide."""
    rows, vocab = found.rows, found.copy.vocab
    most = max(256, 4 * k, vocab // 8)
    if (one := found.decide_in_core(k, most)) is not None:
        check_sound(one.sound)
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
    # Where masked tokens are among the best k, no token can be skipped.
    few = pairs.counts <= most
    decided = few & (pairs.counts >= k) & (least > -math.inf)
    if not bool(decided.all()):
        pairs = pairs.keep(decided[pairs.rows])
    if not (bool(decided.all()) and torch.equal(pairs.ids, pivots.ids)):
        x, z = found.exact(pairs)
    check_sound(found.holds(pairs, x))
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


def check_sound(sound: bool) -> None:
    """Raise if a token scored exactly is outside its bounds (a copy of another weight)."""
    if not sound:
        raise RuntimeError(
            "a logit lies outside its bounds: the copy does not belong to the weight as it is now; "
            "make another ScreenedHead"
        )
