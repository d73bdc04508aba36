"""`LazyLogits`: what `head(hidden)` returns. It has the manners of a tensor and computes nothing.

In:  hidden states (..., D), the rows of a weight (V, D), a bias, an elementwise map.
Out: answers, each from one sweep: a loss, log-probabilities, an argmax, a top-k, a sample.

Torch's functions find their way here through `spelling`. What cannot be streamed builds the tensor
and says so with a `PerformanceWarning`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from lmhead.logits.answering import Answering
from lmhead.logits.selection import select
from lmhead.logits.shaped import Shaped


class LazyLogits(Shaped, Answering):
    """Logits of shape (..., V) that are never built, unless something asks for all of them.

    Equivalent to: pointwise(hidden @ weight.T + bias)

    `kind` tells logits from their log_softmax and softmax, which are lazy too. `row_shift`, of
    shape (..., 1), has been subtracted from every row.
    """

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        if other is self:
            # torch.distributions asks `x == x` to find a NaN; one bool per row answers that.
            return ~self.logsumexp(-1, keepdim=True).isnan()
        raise TypeError(
            "LazyLogits cannot be compared with ==: it would build all logits. Compare answers "
            "(argmax, topk, logsumexp), or use .materialize()"
        )

    def __bool__(self) -> NoReturn:
        raise TypeError("the truth value of LazyLogits is not defined")

    def __getitem__(self, index: Any) -> Any:
        return select(self, index)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    # Arithmetic ----------------------------------------------------------------------------------

    def _combine(self, name: str, *args: Any) -> Any:
        """A function of `arithmetic`, or the tensor's own operation where that cannot stream."""
        from lmhead.logits import arithmetic

        ours, theirs = _ARITHMETIC[name]
        result = getattr(arithmetic, ours)(self, *args)
        if result is not NotImplemented:
            return result
        built = [a._build(name) if isinstance(a, LazyLogits) else a for a in args]
        return theirs(self._build(name), *built)

    def __mul__(self, other: Any) -> Any:
        return self._combine("*", other)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        return self._combine("+", other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._combine("+", other * -1)

    def __rsub__(self, other: Any) -> Any:
        return (self * -1.0) + other

    def __truediv__(self, other: Any) -> Any:
        return self._combine("/", other)

    def __neg__(self) -> Any:
        return self * -1.0

    multiply = mul = __mul__
    add = __add__
    subtract = sub = __sub__
    true_divide = divide = div = __truediv__
    neg = __neg__

    def tanh(self) -> Any:
        """Lazy: soft-capping is (logits / cap).tanh() * cap."""
        return self._combine("tanh")

    def masked_fill(self, mask: Tensor, value: Any) -> Any:
        """Lazy for words masked in all rows: mask (V,), value -inf."""
        return self._combine("masked_fill", mask, value)

    def clamp(self, min: Any = None, max: Any = None) -> Any:
        """Lazy where it changes nothing but -inf."""
        return self._combine("clamp", min, max)

    # All else that a tensor can ------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name, None)
        if name.startswith("_") or not callable(method):
            raise AttributeError(f"'LazyLogits' object has no attribute {name!r}")
        return lambda *args, **kwargs: method(self._build(f"{name}()"), *args, **kwargs)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        from lmhead.logits.spelling import call

        return call(func, args, kwargs or {})


def _operator(name: str) -> Callable[..., Any]:
    def build(self: LazyLogits, *args: Any) -> Any:
        return getattr(self._build(name), name)(*args)

    return build


# Operators that have no lazy meaning build the tensor, as methods without one do.
for _name in (
    "lt",
    "le",
    "gt",
    "ge",
    "pow",
    "rpow",
    "mod",
    "floordiv",
    "rtruediv",
    "abs",
    "matmul",
):
    setattr(LazyLogits, f"__{_name}__", _operator(f"__{_name}__"))


_ARITHMETIC: dict[str, tuple[str, Callable[..., Any]]] = {
    "*": ("times", torch.mul),
    "+": ("plus", torch.add),
    "/": ("divided", torch.div),
    "tanh": ("tanh", torch.tanh),
    "masked_fill": ("mask_words", torch.masked_fill),
    "clamp": ("clamp", torch.clamp),
}
