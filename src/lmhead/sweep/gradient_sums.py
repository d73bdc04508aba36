"""Sums of the gradients of several answers, kept in one tensor each.

The gradient of a weight is as large as the weight. Where many answers about the same logits are
differentiated one after another, `GradientSums` lets each pass add to the sum of the passes before
it, instead of making a gradient of its own that is added afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from lmhead.sweep.wide_gradients import to_dtype_of, unwrap


class GradientSums:
    """The sums so far of the gradients of some tensors.

    Attributes:
        totals: one per tensor, None where there is none yet; empty before the first gradients.
    """

    def __init__(self) -> None:
        self.totals: list[Tensor | None] = []
        # Tensors made for a sum: a gradient from autograd may share its memory with another tensor.
        self._own: list[Tensor | None] = []

    def add(self, grads: Sequence[Tensor | None], continued: Collection[int] = ()) -> None:
        """Add gradients, one per tensor; those that are `continued` contain the sum so far."""
        self._resize(len(grads))
        for i, grad in enumerate(grads):
            total, own = self.totals[i], self._own[i]
            if grad is None:
                continue
            if total is None:
                self.totals[i] = grad
            elif i in continued:
                self.totals[i] = self._own[i] = grad
            elif total is own:
                total.add_(grad)
            elif grad is own:
                self.totals[i] = grad.add_(total)
            else:
                self.totals[i] = self._own[i] = total + grad

    def take(self, other: GradientSums) -> None:
        """Add the sums of another, which has none afterwards."""
        if self.totals:
            self.add(other.totals)
        else:
            self.totals, self._own = other.totals, other._own
        other.totals, other._own = [], []

    def buffer(self, i: int, t: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """Return where to add up the i-th gradient, and whether the sum so far is in it."""
        total = self.totals[i]
        if total is not None and total is self._own[i]:
            return (total, True) if total.dtype == dtype else (_empty(t, dtype), False)
        made = self._own[i] = _empty(t, dtype)
        return made, False

    def _resize(self, n: int) -> None:
        if not self.totals:
            self.totals, self._own = [None] * n, [None] * n


class Adding:
    """A context in which a backward pass adds to sums.

    Args:
        sums: the sums.
        tensors: for each of the sums, the tensors whose gradients it holds.
    """

    def __init__(self, sums: Sequence[GradientSums], tensors: Sequence[Sequence[Tensor]]) -> None:
        self._sums, self._tensors = sums, tensors
        self._continued: list[set[int]] = [set() for _ in sums]
        self._places: dict[int, tuple[int, int]] = {}
        for n, (sum_, group) in enumerate(zip(sums, tensors, strict=True)):
            sum_._resize(len(group))
            self._places.update({id(t): (n, i) for i, t in enumerate(group)})

    def __enter__(self) -> None:
        """Let `buffer` find the sums."""
        self._before, _STATE.adding = _STATE.adding, self

    def __exit__(self, *_: object) -> None:
        """Restore the previous context."""
        _STATE.adding = self._before

    def buffer(self, t: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """Return what the function `buffer` returns; each sum is returned once."""
        place = self._places.pop(id(t), None)
        if place is None:
            return _empty(t, dtype), False
        n, i = place
        made, held = self._sums[n].buffer(i, t, dtype)
        if held:
            self._continued[n].add(i)
        return made, held

    def put(self, grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of all tensors to their sums; `grads` lists them sum by sum."""
        remaining = iter(grads)
        for total, group, continued in zip(self._sums, self._tensors, self._continued, strict=True):
            total.add([next(remaining) for _ in group], continued)


class _State(threading.local):
    adding: Adding | None = None


_STATE = _State()


def buffer(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """Return a tensor to add the gradient of t to, and whether a sum is in it already.

    If not, its entries are undefined. What the caller adds must be final: the tensor goes to
    autograd as the gradient of t, not scaled any more.
    """
    if _STATE.adding is None:
        return _empty(t, dtype), False
    return _STATE.adding.buffer(t, dtype)


def token_rows(weight: Tensor, ids: Tensor) -> Tensor:
    """Return weight[ids]; its gradient goes to the sum, not to zeros of the size of the weight."""
    if torch._C._are_functorch_transforms_active():
        return weight[ids]
    rows: Tensor = _TokenRows.apply(weight, ids)  # type: ignore[no-untyped-call]
    return rows


class _TokenRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(weight, ids)
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, ids = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward
            return torch.zeros_like(weight).index_add(0, ids, grad), None
        grad = unwrap(grad)
        total, held = buffer(weight, torch.promote_types(grad.dtype, torch.float32))
        if not held:
            total.zero_()
        total.index_add_(0, ids, grad.to(total.dtype))
        return to_dtype_of(total, weight), None


def _empty(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.new_empty(t.shape, dtype=dtype)
