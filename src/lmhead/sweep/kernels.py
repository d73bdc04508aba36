"""The steps on a tile of logits: in the compiled core where it serves, else as torch operations.

A tile `z` is (words, tokens), see `plan`. Everything that follows a token is a vector over tokens.
Masked words have z = -inf; `FLOOR` stands for -inf where 0 · -inf would make a NaN: exp(FLOOR) is
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
    from lmhead.sweep.loss import RowLoss

FLOOR = -1.0e4


class Softmax(NamedTuple):
    """The running softmax of each token: maximum m, s = Σ exp(z - m), t = Σ exp(z - m)(z - m).

    The sums are in float64: a long tail of small terms would be lost in float32.
    """

    m: Tensor
    s: Tensor
    t: Tensor | None

    @classmethod
    def start(cls, tokens: int, *, entropy: bool, like: Tensor) -> Softmax:
        """Before the first tile."""
        m = like.new_full((tokens,), -math.inf)
        s, t = torch.zeros(2, tokens, dtype=torch.float64, device=like.device)
        return cls(m, s, t if entropy else None)

    @property
    def lse(self) -> Tensor:
        """Log Σ exp z in float64, so that lse - z loses nothing for a word with p near 1."""
        return self.m.double() + self.s.log()

    @property
    def entropy(self) -> Tensor:
        """Log s - t / s in float64: no cancellation of large numbers."""
        assert self.t is not None
        return self.s.log() - self.t / self.s


class HeapWatcher(Protocol):
    """A watcher that keeps the largest logits: see `exact.TopK`."""

    values: Tensor
    ids: Tensor
    sizes: Tensor

    def see(self, lo: int, z: Tensor) -> None:
        """Take in a tile."""


class CountWatcher(Protocol):
    """A watcher that counts logits above given ones: see `exact.Rank`."""

    mine: Tensor
    slack: Tensor
    per_norm: Tensor
    counts: Tensor

    def norms(self, lo: int, hi: int) -> Tensor:
        """|w| of a tile's words."""

    def see(self, lo: int, z: Tensor) -> None:
        """Take in a tile."""

    def settle(self, which: Tensor, word: Tensor, token: Tensor) -> None:
        """Decide what the tile could not."""


def absorb_(
    z: Tensor,
    lo: int,
    bias: Tensor | None,
    pointwise: Pointwise,
    running: Softmax,
    scratch: tuple[Tensor, Tensor],
    top: HeapWatcher | None,
    rank: CountWatcher | None,
) -> None:
    """From the linear layer to the logits in place, into the running softmax and the watchers."""
    core = native.for_tile(z)
    if core is None:
        finish_(z, bias, pointwise)
        update_softmax_(z, running, scratch)
        for watcher in (top, rank):
            if watcher is not None:
                watcher.see(lo, z)
        return
    close = core.softmax(
        z,
        None if bias is None else bias.reshape(-1).detach(),
        native.map_tuple(pointwise),
        *running,
        lo,
        *((None,) * 3 if top is None else (top.values, top.ids, top.sizes)),
        *((None,) * 3 if rank is None else (rank.mine, rank.slack, rank.per_norm)),
        *((None,) * 2 if rank is None else (rank.norms(lo, lo + z.shape[0]), rank.counts)),
        native.threads(),
    )
    if close:
        assert rank is not None
        which, word, token = torch.tensor(close).unbind(1)
        rank.settle(which, word + lo, token)


def loss_(
    z: Tensor,
    bias: Tensor | None,
    pointwise: Pointwise,
    targets: Tensor,
    weights: RowLoss,
    mix: Tensor | None,
) -> float:
    """The loss of a tile with all words of its tokens, and its gradient with respect to the linear
    layer in place of it; on the compiled core alone.
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
    """hidden[rows[i]] · weight[ids[i]] in float64, each sum in the same order: (M,)."""
    out = torch.empty(rows.shape, dtype=torch.float64, device=hidden.device)
    core = native.for_pairs(hidden, weight)
    if core is not None:
        products = core.pairs_f32 if hidden.dtype == torch.float32 else core.pairs_bf16
        hidden, weight = native.bits(hidden), native.bits(weight)
        products(hidden, weight, rows.contiguous(), ids.contiguous(), out, native.threads())
        return out
    block = max(1, max_bytes // (32 * weight.shape[1]))
    for i in range(0, len(rows), block):
        some = slice(i, i + block)
        out[some] = weight[ids[some]].double().mul_(hidden[rows[some]].double()).sum(-1)
    return out


def row_norms(weight: Tensor) -> Tensor:
    """|w| of each row (M, D), in float64: (M,)."""
    if native.for_pairs(weight, weight) is None:
        norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64)
        return norms
    rows = torch.arange(len(weight), device=weight.device)
    return pair_products(weight, weight, rows, rows, 0).sqrt_()


def finish_(z: Tensor, bias: Tensor | None, pointwise: Pointwise) -> Tensor:
    """From the linear layer to the logits: bias and map, in place."""
    if bias is not None:
        z.add_(bias)
    return pointwise.apply_(z)


def update_softmax_(z: Tensor, running: Softmax, scratch: tuple[Tensor, Tensor]) -> Tensor:
    """Take a tile into the running softmax. Returns exp(z - m) in scratch."""
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
    """The new origin, and the factor exp(old - new) of what was summed from the old one."""
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
    """p · a times the slope of the map, in place of z; sets `columns` to its sums over tokens and
    adds its sums over words to `rows`.
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
    """The largest t such that entries below t add up to at most `share` of the sum: by selection,
    without a sort.
    """
    limit = share * float(mass.double().sum())
    if native.core is not None and mass.dtype == torch.float32 and mass.device.type == "cpu":
        return float(native.core.tail_threshold(mass, limit))
    low, high = 0.0, float(mass.max())
    for _ in range(50):  # bisection; the entries between low and high hardly matter after that
        middle = (low + high) / 2
        fits = float(torch.where(mass < middle, mass, 0.0).double().sum()) <= limit
        low, high = (middle, high) if fits else (low, middle)
    return low


def scatter_add_(into: Tensor, ids: Tensor, rows: Tensor) -> None:
    """into[ids] += rows, for distinct ids."""
    if native.core is not None and into.dtype == torch.float32 and into.device.type == "cpu":
        native.core.scatter_add(into, ids, rows, native.threads())
    else:
        into.index_add_(0, ids, rows)


def subtract_(z: Tensor, row: Tensor) -> Tensor:
    """z - row in place, for a float64 row: in two parts, so that small differences are exact."""
    high, low = split(row, z.dtype)
    z.sub_(high)
    return z if z.dtype == row.dtype else z.sub_(low)


def split(row: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A float64 row as the sum of two of another type."""
    high = row.to(dtype)
    # An infinite row has no second part, and the difference of infinities is a NaN.
    return high, (row - high).to(dtype).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def finite(x: Tensor) -> Tensor:
    """0 in place of -inf: the origin of a token that has met only masked words."""
    return torch.where(x == -math.inf, 0.0, x)


class Coefficients(NamedTuple):
    """dL/dz_v = p_v (a + b log p_v + c log q_v) + mix_v · mixed + weight_v soft_v · softened.

    a, b, c, mixed, softened: one number per token, or None for 0.
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
    """The gradient with respect to the linear layer, in place of the logits of a tile.

    Args:
        z: (words, tokens), overwritten.
        lse: (tokens,) in float64.
        k: the coefficients of the gradient, from `backward.coefficients`.
        pointwise: its slope is the last factor.
        log_q: (words, tokens), the other distribution, for `k.c`.
        mix: (words,), 0 for masked words, for `k.mixed`.
        soft: (words, tokens), already times the class weight, for `k.softened`.
        picks: word, token, value: single entries to add.
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
        if k.c is not None:
            assert log_q is not None
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
        word, token, value = picks
        grad.index_put_((word, token), value, accumulate=True)
    if slope is not None:
        return grad.mul_(slope)
    return grad if pointwise.scale == 1.0 else grad.mul_(pointwise.scale)
