"""Tensors of NumPy long doubles with gradients: the reference for results in float64.

Where both sides of a comparison are float64, a difference does not say which of them is off. Long
doubles have 11 bits more on x86-64. `LongDouble` has the methods of torch's tensors that the
programs in `differential` use, and `gradients` differentiates backwards through them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.longdouble]
Pull = Callable[[Array], Array]


def array(x: Any) -> Array:
    """Return a tensor, a `LongDouble` or a number as an array of long doubles."""
    if isinstance(x, LongDouble):
        return x.value
    if isinstance(x, Tensor):
        x = x.detach().double().numpy()
    return np.asarray(x).astype(np.longdouble)


def available() -> bool:
    """Return whether long doubles of this machine are more precise than float64."""
    return bool(np.finfo(np.longdouble).eps < 2**-60)


class LongDouble:
    """An array and what it was computed from: (operand, gradient of the operand) pairs."""

    def __init__(self, value: Any, edges: Sequence[tuple[LongDouble, Pull]] = ()) -> None:
        self.value = array(value)
        self.edges = tuple(edges)

    # Arithmetic: numbers and tensors are constants.

    def __add__(self, other: Any) -> LongDouble:
        return _pointwise(self.value + array(other), (self, lambda g: g), (other, lambda g: g))

    def __sub__(self, other: Any) -> LongDouble:
        return _pointwise(self.value - array(other), (self, lambda g: g), (other, lambda g: -g))

    def __mul__(self, other: Any) -> LongDouble:
        a, b = self.value, array(other)
        return _pointwise(a * b, (self, lambda g: g * b), (other, lambda g: g * a))

    def __truediv__(self, other: Any) -> LongDouble:
        a, b = self.value, array(other)
        return _pointwise(a / b, (self, lambda g: g / b), (other, lambda g: -g * a / b**2))

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> LongDouble:
        return self * -1

    def __matmul__(self, other: LongDouble) -> LongDouble:
        a, b = self.value, other.value
        return LongDouble(a @ b, [(self, lambda g: g @ b.T), (other, lambda g: a.T @ g)])

    @property
    def T(self) -> LongDouble:  # noqa: N802
        """The transpose of a matrix."""
        return LongDouble(self.value.T, [(self, lambda g: g.T)])

    # Comparisons give masks as torch's.

    def __gt__(self, other: float) -> Tensor:
        return torch.from_numpy(self.value > other)

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return torch.from_numpy(self.value == other)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any, kwargs: Any = None) -> Any:
        """Apply torch.where(mask, a, b)."""
        if func is not torch.where or kwargs:
            return NotImplemented
        mask, a, b = args
        kept = mask.numpy()
        value = np.where(kept, array(a), array(b))
        return _pointwise(value, (a, lambda g: g * kept), (b, lambda g: g * ~kept))

    # Pointwise functions.

    def _map(self, value: Array, slope: Array) -> LongDouble:
        return LongDouble(value, [(self, lambda g: g * slope)])

    def neg(self) -> LongDouble:
        """Return -x."""
        return -self

    def abs(self) -> LongDouble:
        """Return |x|."""
        return self._map(np.abs(self.value), np.sign(self.value))

    def exp(self) -> LongDouble:
        """Return e^x."""
        value = np.exp(self.value)
        return self._map(value, value)

    def tanh(self) -> LongDouble:
        """Return tanh x."""
        value = np.tanh(self.value)
        return self._map(value, 1 - value**2)

    def sigmoid(self) -> LongDouble:
        """Return 1 / (1 + e^-x)."""
        small = np.exp(-np.abs(self.value))  # never overflows
        value = np.where(self.value >= 0, 1, small) / (1 + small)
        return self._map(value, small / (1 + small) ** 2)

    def clamp(self, low: float, high: float) -> LongDouble:
        """Return the nearest value in [low, high]."""
        inside = (self.value >= low) & (self.value <= high)
        return self._map(self.value.clip(low, high), inside.astype(np.longdouble))

    def masked_fill(self, mask: Tensor, value: float) -> LongDouble:
        """Return `value` where the mask is set."""
        kept = ~np.broadcast_to(mask.numpy(), self.value.shape)
        filled = np.where(kept, self.value, np.longdouble(value))
        return LongDouble(filled, [(self, lambda g: np.where(kept, g, 0))])

    def logaddexp(self, other: LongDouble) -> LongDouble:
        """Return log(e^a + e^b)."""
        a, b = self.value, other.value
        value = np.logaddexp(a, b)
        of_a, of_b = np.exp(a - value), np.exp(b - value)
        return _pointwise(value, (self, lambda g: g * of_a), (other, lambda g: g * of_b))

    # Functions of rows.

    def _probabilities(self) -> tuple[Array, Array]:
        largest = self.value.max(-1, keepdims=True)
        lse = largest + np.log(np.exp(self.value - largest).sum(-1, keepdims=True))
        return lse, np.exp(self.value - lse)

    def logsumexp(self, dim: int, keepdim: bool = False) -> LongDouble:
        """Return log Σ e^x of each row."""
        lse, p = self._probabilities()
        made = LongDouble(lse, [(self, lambda g: g * p)])
        return made if keepdim else made.squeeze(dim)

    def log_softmax(self, dim: int) -> LongDouble:
        """Return x - log Σ e^x."""
        lse, p = self._probabilities()
        pull: Pull = lambda g: g - p * g.sum(dim, keepdims=True)  # noqa: E731
        return LongDouble(self.value - lse, [(self, pull)])

    def softmax(self, dim: int) -> LongDouble:
        """Return e^x / Σ e^x."""
        p = self._probabilities()[1]
        return LongDouble(p, [(self, lambda g: p * (g - (g * p).sum(dim, keepdims=True)))])

    def sum(self, dim: int) -> LongDouble:
        """Return the sum of each row."""
        made = self.value.sum(dim, keepdims=True)
        total = LongDouble(made, [(self, lambda g: np.broadcast_to(g, self.value.shape))])
        return total.squeeze(dim)

    def mean(self, dim: int) -> LongDouble:
        """Return the mean of each row."""
        return self.sum(dim) / int(self.value.shape[dim])

    def amax(self, dim: int) -> LongDouble:
        """Return the largest entry of each row; equal ones share its gradient."""
        value = self.value.max(dim, keepdims=True)
        share = array(self.value == value)
        share = share / share.sum(dim, keepdims=True)
        return LongDouble(value, [(self, lambda g: g * share)]).squeeze(dim)

    def norm(self, dim: int) -> LongDouble:
        """Return the length of each row; its gradient is 0 where that is 0."""
        value = np.sqrt((self.value**2).sum(dim, keepdims=True))
        unit = self.value / np.where(value == 0, 1, value)
        return LongDouble(value, [(self, lambda g: g * unit)]).squeeze(dim)

    def gather(self, dim: int, index: Tensor) -> LongDouble:
        """Return the entries at given ids of each row."""
        ids = index.numpy()

        def pull(g: Array) -> Array:
            made = np.zeros_like(self.value)
            np.put_along_axis(made, ids, g, dim)  # one id per row
            return made

        return LongDouble(np.take_along_axis(self.value, ids, dim), [(self, pull)])

    def squeeze(self, dim: int) -> LongDouble:
        """Remove a dimension of size 1."""
        return LongDouble(self.value.squeeze(dim), [(self, lambda g: np.expand_dims(g, dim))])


def _pointwise(value: Array, *operands: tuple[Any, Pull]) -> LongDouble:
    """Join operands that were broadcast against each other; those without a gradient drop out."""

    def summed(pull: Pull, shape: tuple[int, ...]) -> Pull:
        def back(g: Array) -> Array:
            found = np.broadcast_to(pull(g), value.shape)
            found = found.sum(tuple(range(value.ndim - len(shape))))
            wide = tuple(i for i, n in enumerate(shape) if n == 1 and found.shape[i] != 1)
            return np.asarray(found.sum(wide, keepdims=True))

        return back

    edges = [(x, summed(pull, x.value.shape)) for x, pull in operands if isinstance(x, LongDouble)]
    return LongDouble(value, edges)


def gradients(outputs: Sequence[LongDouble], leaves: Sequence[LongDouble]) -> list[Array]:
    """Return the gradients of the sum of all outputs; 0 for a leaf that is not behind them."""
    order: list[LongDouble] = []
    seen: set[int] = set()

    def visit(node: LongDouble) -> None:
        if id(node) not in seen:
            seen.add(id(node))
            for operand, _ in node.edges:
                visit(operand)
            order.append(node)

    for output in outputs:
        visit(output)
    found = {id(node): np.zeros_like(node.value) for node in (*order, *leaves)}
    for output in outputs:
        found[id(output)] = found[id(output)] + 1
    for node in reversed(order):
        for operand, pull in node.edges:
            found[id(operand)] = found[id(operand)] + pull(found[id(node)])
    return [found[id(leaf)] for leaf in leaves]
