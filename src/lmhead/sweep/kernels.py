"""The steps on a tile of logits, as torch operations.

A tile `z` is (words, tokens), see `plan`. Everything that follows a token is a vector over tokens.
Masked words have z = -inf; `FLOOR` stands for -inf where 0 · -inf would make a NaN: exp(FLOOR) is
0 in every type.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lmhead.sweep.pointwise import Pointwise

FLOOR = -1.0e4


class Softmax(NamedTuple):
    """The running softmax of each token: maximum m, s = Σ exp(z - m), t = Σ exp(z - m)(z - m)."""

    m: Tensor
    s: Tensor
    t: Tensor | None

    @classmethod
    def start(cls, tokens: int, *, entropy: bool, like: Tensor) -> Softmax:
        """Before the first tile."""
        m = like.new_full((tokens,), -math.inf)
        return cls(m, like.new_zeros(tokens), like.new_zeros(tokens) if entropy else None)

    @property
    def lse(self) -> Tensor:
        """Log Σ exp z in float64, so that lse - z loses nothing for a word with p near 1."""
        return self.m.double() + self.s.double().log()

    @property
    def entropy(self) -> Tensor:
        """Log s - t / s in float64: no cancellation of large numbers."""
        assert self.t is not None
        return self.s.double().log() - self.t.double() / self.s.double()


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


def subtract_(z: Tensor, row: Tensor) -> Tensor:
    """Z - row in place, for a float64 row: in two parts, so that small differences are exact."""
    high = row.to(z.dtype)
    z.sub_(high)
    if z.dtype != row.dtype:
        z.sub_(finite(row - high.double()).to(z.dtype))
    return z


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
