"""The steps on a tile of logits: in the compiled core where possible, else as torch operations.

A tile `z` is (tokens, rows), see `plan`. Everything that follows a row is a vector over rows.
Masked tokens have z = -inf; `FLOOR` replaces -inf where 0 · -inf would make a NaN: exp(FLOOR) is
0 in every type.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from lmhead.sweep import native
from lmhead.sweep.pointwise import Pointwise

if TYPE_CHECKING:
    from lmhead.scores.row_loss import RowLoss

FLOOR = -1.0e4


class Softmax(NamedTuple):
    """The running softmax of each row: maximum m, s = Σ exp(z - m), t = Σ exp(z - m)(z - m).

    The sums are in float64: a long tail of small terms would be lost in float32.
    """

    m: Tensor
    s: Tensor
    t: Tensor | None

    @classmethod
    def start(cls, n_rows: int, *, entropy: bool, like: Tensor) -> Softmax:
        """Return the state before the first tile."""
        m = like.new_full((n_rows,), -math.inf)
        s, t = torch.zeros(2, n_rows, dtype=torch.float64, device=like.device)
        return cls(m, s, t if entropy else None)

    @property
    def lse(self) -> Tensor:
        """Log Σ exp z in float64, so that lse - z loses nothing for a token with p near 1."""
        return self.m.double() + self.s.log()

    @property
    def entropy(self) -> Tensor:
        """Log s - t / s in float64: no cancellation of large numbers."""
        assert self.t is not None
        return self.s.log() - self.t / self.s


class TopTracker(Protocol):
    """A tracker that keeps the largest logits: see `exact_decisions.TopK`."""

    values: Tensor
    ids: Tensor
    sizes: Tensor

    def update(self, lo: int, z: Tensor) -> None:
        """Update with a tile."""


class RankTracker(Protocol):
    """A tracker that counts logits above given ones: see `exact_decisions.Rank`."""

    score: Tensor
    slack: Tensor
    per_norm: Tensor
    counts: Tensor

    def norms(self, lo: int, hi: int) -> Tensor:
        """Return |w| of a tile's tokens."""

    def update(self, lo: int, z: Tensor) -> None:
        """Update with a tile."""

    def compare_exact(self, which: Tensor, token: Tensor, row: Tensor) -> None:
        """Compare single logits in float64."""


def update_answers_(
    z: Tensor,
    lo: int,
    bias: Tensor | None,
    pointwise: Pointwise,
    running: Softmax,
    scratch: tuple[Tensor, Tensor],
    top: TopTracker | None,
    rank: RankTracker | None,
) -> None:
    """Turn a tile of the linear layer into logits in place; update the softmax and the trackers."""
    core = native.for_tile(z, bias)
    if core is None:
        finish_(z, bias, pointwise)
        update_softmax_(z, running, scratch)
        for tracker in (top, rank):
            if tracker is not None:
                tracker.update(lo, z)
        return
    close = core.softmax(
        z,
        None if bias is None else bias.reshape(-1).detach().contiguous(),
        native.map_tuple(pointwise),
        *running,
        lo,
        *((None,) * 3 if top is None else (top.values, top.ids, top.sizes)),
        *((None,) * 3 if rank is None else (rank.score, rank.slack, rank.per_norm)),
        *((None,) * 2 if rank is None else (rank.norms(lo, lo + z.shape[0]), rank.counts)),
        native.threads(),
    )
    if close and rank is not None:
        which, token, row = torch.tensor(close).unbind(1)
        rank.compare_exact(which, token + lo, row)


def loss_(
    z: Tensor,
    bias: Tensor | None,
    pointwise: Pointwise,
    targets: Tensor,
    weights: RowLoss,
    mix: Tensor | None,
) -> float:
    """Return the loss of a tile with all tokens of its rows; replace the tile by the gradient.

    The gradient is with respect to the linear layer. Needs the compiled core.
    """
    assert native.core is not None
    assert weights.softened is None
    loss: float = native.core.loss(
        z,
        None if bias is None else bias.detach().contiguous(),
        native.map_tuple(pointwise),
        targets,
        weights.lse,
        weights.picked,
        weights.mixed,
        weights.squared,
        None if mix is None else mix.contiguous(),
        native.threads(),
    )
    return loss


def pair_products(
    hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor, max_bytes: int
) -> Tensor:
    """Return hidden[rows[i]] · weight[ids[i]] in float64, each sum in the same order: (M,)."""
    out = torch.empty(rows.shape, dtype=torch.float64, device=hidden.device)
    core = native.for_pairs(hidden, weight)
    if core is not None:
        rows, ids = rows.contiguous(), ids.contiguous()
        core.pairs(native.bits(hidden), native.bits(weight), rows, ids, out, native.threads())
        return out
    block = max(1, max_bytes // (32 * weight.shape[1]))
    for i in range(0, len(rows), block):
        some = slice(i, i + block)
        out[some] = weight[ids[some]].double().mul_(hidden[rows[some]].double()).sum(-1)
    return out


def row_norms(weight: Tensor) -> Tensor:
    """Return |w| of each row (M, D), in float64: (M,)."""
    if native.for_pairs(weight, weight) is None:
        norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64)
        return norms
    rows = torch.arange(len(weight), device=weight.device)
    return pair_products(weight, weight, rows, rows, 0).sqrt_()


def finish_(z: Tensor, bias: Tensor | None, pointwise: Pointwise) -> Tensor:
    """Turn the linear layer into logits in place: bias and map."""
    if bias is not None:
        z.add_(bias)
    return pointwise.apply_(z)


def update_softmax_(z: Tensor, running: Softmax, scratch: tuple[Tensor, Tensor]) -> Tensor:
    """Update the running softmax with a tile; return exp(z - m) in scratch."""
    new_m = torch.maximum(running.m, z.amax(0))
    shift, decay = _rebase(running.m, new_m)
    work = torch.sub(z, shift, out=scratch[0])
    if running.t is not None:
        centred = torch.clamp(work, min=FLOOR, out=scratch[1])
        # t counts from the old maximum; moving the origin by d adds d · s.
        moved = torch.where(running.s > 0, running.t + running.s * finite(running.m - shift), 0.0)
        running.t.copy_(moved).mul_(decay)
        work.exp_()
        running.t.add_(centred.mul_(work).sum(0))
    else:
        work.exp_()
    running.s.mul_(decay).add_(work.sum(0))
    running.m.copy_(new_m)
    return work


def _rebase(old_m: Tensor, new_m: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new origin, and the factor exp(old - new) for sums from the old one."""
    shift = torch.where(new_m == -math.inf, 0.0, new_m)
    return shift, (old_m - shift).exp()


def softmax_gradient_(
    z: Tensor,
    lse: Tensor,
    a: Tensor,
    pointwise: Pointwise,
    columns: Tensor,
    rows: Tensor,
    scratch: tuple[Tensor, Tensor],
) -> Tensor:
    """Replace z by p · a times the slope of the map.

    Sets `columns` to its sums over rows and adds its sums over tokens to `rows`.
    """
    core = native.for_tile(z)
    if core is None:
        grad = gradient_(z, lse, Coefficients(a), pointwise, scratch=scratch)
        columns.copy_(grad.sum(1))
        rows.add_(grad.sum(0))
        return grad
    nothing = (None,) * 3
    where = native.map_tuple(pointwise)
    core.gradient(
        z, *split(lse, z.dtype), a, *nothing, where, *nothing, columns, rows, native.threads()
    )
    return z


def tail_threshold(mass: Tensor, share: float) -> float:
    """Return the largest t such that entries below t sum to at most `share` of the total.

    By selection, without a sort.
    """
    limit = share * float(mass.double().sum())
    if native.core is not None and mass.dtype == torch.float32 and native.readable(mass):
        return float(native.core.tail_threshold(mass, limit))
    low, high = 0.0, float(mass.max())
    for _ in range(50):  # bisection; the entries between low and high hardly matter after that
        middle = (low + high) / 2
        fits = float(torch.where(mass < middle, mass, 0.0).double().sum()) <= limit
        low, high = (middle, high) if fits else (low, middle)
    return low


def scatter_add_(into: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Compute into[ids] += rows, for distinct ids."""
    if native.core is not None and into.dtype == torch.float32 and native.readable(into, rows):
        native.core.scatter_add(into, ids, rows, native.threads())
    else:
        into.index_add_(0, ids, rows)


def subtract_(z: Tensor, row: Tensor) -> Tensor:
    """Compute z - row in place, for a float64 row, in two parts: small differences are exact."""
    high, low = split(row, z.dtype)
    z.sub_(high)
    return z if z.dtype == row.dtype else z.sub_(low)


def split(row: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a float64 row as the sum of two of another type."""
    high = row.to(dtype)
    # An infinite row has no second part, and the difference of infinities is a NaN.
    return high, (row - high).to(dtype).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def finite(x: Tensor) -> Tensor:
    """Return x with 0 in place of -inf: the origin of a row with only masked tokens so far."""
    return torch.where(x == -math.inf, 0.0, x)


class Coefficients(NamedTuple):
    """dL/dz_v = p_v (a + b log p_v + c log q_v) + mix_v · mixed + weight_v soft_v · softened.

    a, b, c, mixed, softened: one number per row, or None for 0.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    c: Tensor | None = None
    mixed: Tensor | None = None
    softened: Tensor | None = None


def gradient_(
    z: Tensor,
    lse: Tensor,
    k: Coefficients,
    pointwise: Pointwise,
    *,
    scratch: tuple[Tensor, Tensor],
    log_q: Tensor | None = None,
    mix: Tensor | None = None,
    soft: Tensor | None = None,
    picks: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Replace the logits of a tile by the gradient with respect to the linear layer.

    Args:
        z: (tokens, rows), overwritten.
        lse: (rows,) in float64.
        k: the coefficients of the gradient, from `backward.coefficients`.
        pointwise: its slope is the last factor.
        log_q: (tokens, rows), the other distribution, for `k.c`.
        mix: (tokens,), 0 for masked tokens, for `k.mixed`.
        soft: (tokens, rows), already times the class weight, for `k.softened`.
        picks: token, row, value: single entries to add.
        scratch: two tiles.
    """
    core = native.for_tile(z)
    if core is not None and log_q is None and soft is None and k.a is not None:
        high, low = split(lse, z.dtype)
        mixed = None if mix is None else k.mixed
        core.gradient(
            z,
            high,
            low,
            k.a.contiguous(),
            k.b,
            None if mixed is None else mix,
            mixed,
            native.map_tuple(pointwise),
            *((None,) * 3 if picks is None else picks),
            None,
            None,
            native.threads(),
        )
        return z
    slope = pointwise.slope(z, out=scratch[0]) if pointwise.bounded else None
    log_p = subtract_(z, lse)
    if k.b is not None or k.c is not None:
        factor = torch.clamp(log_p, min=FLOOR, out=scratch[1])
        factor.mul_(0.0 if k.b is None else k.b)
        if k.c is not None and log_q is not None:
            factor.addcmul_(log_q.clamp(min=FLOOR), k.c.expand_as(log_q))
        if k.a is not None:
            factor.add_(k.a)
        grad = log_p.exp_().mul_(factor)
    elif k.a is not None:
        grad = log_p.exp_().mul_(k.a)
    else:
        grad = log_p.zero_()
    if k.mixed is not None and mix is not None:
        grad.addr_(mix, k.mixed)
    if k.softened is not None and soft is not None:
        grad.addcmul_(soft, k.softened.expand_as(grad))
    if picks is not None:
        token, row, value = picks
        grad.index_put_((token, row), value, accumulate=True)
    if slope is not None:
        return grad.mul_(slope)
    return grad if pointwise.scale == 1.0 else grad.mul_(pointwise.scale)
