"""Recording pointwise operations: which torch functions, and how their arguments are stored.

A number, a vector over the vocabulary or a factor per row goes into the head's own scores where
these can represent it (`Scores.times` and the like), so that the compiled sweep still applies.
Everything else becomes a `Call` of the same torch function, made later on a few rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.lazy.assignment import assign
from lmhead.lazy.logits import LazyLogits, derived, like_strided
from lmhead.lazy.program import Call, Env, Leaf, Node, Operand, Steps, tile
from lmhead.parallel.sharded_scores import ShardedScores
from lmhead.sweep import SweptScores, accumulation_dtype

_NAMES = [
    "abs", "absolute", "acos", "acosh", "add", "addcdiv", "addcmul", "arccos", "arcsin", "arctan",
    "arctanh", "arcsinh", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and", "bitwise_not",
    "bitwise_or", "bitwise_xor", "ceil", "clamp", "clamp_max", "clamp_min", "clip", "copysign",
    "cos", "cosh", "deg2rad", "digamma", "div", "divide", "entr", "eq", "erf", "erfc", "erfinv",
    "exp", "exp2", "expit", "expm1", "fix", "float_power", "floor", "floor_divide", "fmax", "fmin",
    "fmod", "frac", "ge", "greater", "greater_equal", "gt", "heaviside", "hypot", "isclose",
    "isfinite", "isinf", "isnan", "isneginf", "isposinf", "ldexp", "le", "lerp", "less",
    "less_equal", "lgamma", "log", "log10", "log1p", "log2", "log_ndtr", "logaddexp", "logaddexp2",
    "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "lt", "masked_fill",
    "maximum", "minimum", "mul", "multiply", "mvlgamma", "nan_to_num", "ndtr", "ne", "neg",
    "negative", "nextafter", "not_equal", "pow", "rad2deg", "reciprocal", "relu", "remainder",
    "round", "rsqrt", "rsub", "sgn", "sigmoid", "sign", "sin", "sinc", "sinh", "softplus", "sqrt",
    "square", "sub", "subtract", "tan", "tanh", "true_divide", "trunc", "where", "xlogy", "__abs__",
    "__add__", "__and__", "__eq__", "__floordiv__", "__ge__", "__gt__", "__invert__", "__le__",
    "__lt__", "__mod__", "__mul__", "__ne__", "__neg__", "__or__", "__pow__", "__radd__",
    "__rand__", "__rdiv__", "__rfloordiv__", "__rmod__", "__rmul__", "__ror__", "__rpow__",
    "__rsub__", "__rtruediv__", "__rxor__", "__sub__", "__truediv__", "__xor__",
]  # fmt: skip
_IN_F = [
    "celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu",
    "logsigmoid", "mish", "relu", "relu6", "selu", "silu", "softplus", "softshrink", "softsign",
    "tanhshrink", "threshold",
]  # fmt: skip

POINTWISE: set[Any] = {
    getattr(module, name)
    for module in (torch, Tensor, torch.special)
    for name in _NAMES
    if hasattr(module, name)
}
POINTWISE |= {getattr(F, name) for name in _IN_F}

# Operator symbols, for messages.
OPERATOR_SYMBOLS = {
    "__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">=", "__eq__": "==", "__ne__": "!=",
    "__add__": "+", "__radd__": "+", "__sub__": "-", "__rsub__": "-", "__mul__": "*",
    "__rmul__": "*", "__truediv__": "/", "__rtruediv__": "/", "__pow__": "**", "__rpow__": "**",
    "__matmul__": "@", "__rmatmul__": "@", "__mod__": "%", "__floordiv__": "//",
    "__setitem__": "[...] =", "__getitem__": "[...]",
}  # fmt: skip


def sign(func: Callable[..., Any]) -> str:
    """Return a function's name as a user writes it."""
    name = getattr(func, "__name__", str(func))
    return OPERATOR_SYMBOLS.get(name, f"{name}()")


class NotRecorded(Exception):  # noqa: N818
    """The result could not be recorded; the caller builds the tensor."""


class Frame:
    """The common shape of several lazy logits and tensors, and where its vocabulary is."""

    def __init__(self, values: list[Any]) -> None:
        tensors = [v for v in values if isinstance(v, Tensor)]
        self.lazies = [v for v in tensors if isinstance(v, LazyLogits)]
        self.lazy = self.lazies[0]
        try:
            self.shape = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise NotRecorded from error
        from_end = {v.dim() - v._vdim for v in tensors if isinstance(v, LazyLogits)}
        if len(from_end) != 1:
            raise NotRecorded
        self.vdim = len(self.shape) - from_end.pop()
        self.vocab = self.shape[self.vdim]
        if any(v.shape[v._vdim] != self.vocab for v in tensors if isinstance(v, LazyLogits)):
            raise NotRecorded
        if any(t.device != self.lazy.device and t.dim() for t in tensors):
            raise NotRecorded
        self.lead = torch.Size(n for i, n in enumerate(self.shape) if i != self.vdim)

    @property
    def n_rows(self) -> int:
        """The number of rows."""
        return self.lead.numel()

    def place(self, value: Any) -> Any:
        """Return a value as part of a program over this shape."""
        if isinstance(value, LazyLogits):
            node = value.part
            if value.lead != self.lead:
                rows = torch.arange(node.n_rows).view(value.lead).expand(self.lead)
                node = node.take(rows.reshape(-1))
            return node
        if isinstance(value, Tensor):
            return Operand.of(self.canonical(value), self.lead)
        return value

    def canonical(self, t: Tensor) -> Tensor:
        """Return a tensor with all dimensions, the vocabulary last; a scalar as it is."""
        if t.dim() == 0:
            return t
        t = t.reshape((1,) * (len(self.shape) - t.dim()) + tuple(t.shape))
        return t.movedim(self.vdim, -1)

    def probe(self, value: Any) -> Any:
        """Return one entry of a value's dtype, for finding the dtype of a result."""
        if not isinstance(value, Tensor):
            return value
        return torch.ones((1,) * value.dim(), dtype=value.dtype, device=value.device)


def record(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a pointwise function of lazy logits and other values."""
    inplace = kwargs.pop("inplace", False)
    frame = Frame([*args, *kwargs.values()])
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        probe = func(
            *(frame.probe(a) for a in args), **{k: frame.probe(v) for k, v in kwargs.items()}
        )
    if not isinstance(probe, Tensor):
        raise NotRecorded
    smooth = probe.dtype.is_floating_point or probe.dtype.is_complex
    with torch.set_grad_enabled(torch.is_grad_enabled() and smooth):
        node = _node(frame, func, args, kwargs, probe.dtype)
    if inplace:
        return assign(args[0], node)
    strides = None
    if not all(z.is_contiguous() for z in frame.lazies):
        strides = like_strided(func, *args, **kwargs)
    return derived(frame.lazy, node, frame.shape, probe.dtype, vdim=frame.vdim, strides=strides)


def _node(
    frame: Frame,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype,
) -> Node:
    """Return the program of a function's result."""
    name = getattr(func, "__name__", "")
    node = _absorbed(frame, name, args, dtype) if not kwargs else None
    if node is None and name.strip("_") in _COMPARE:
        node = _comparison(frame, func, args)
    if node is not None:
        return node
    placed = {k: frame.place(v) for k, v in kwargs.items()}
    return call(func, tuple(map(frame.place, args)), placed, frame.n_rows, frame.vocab)


def call(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    n_rows: int,
    width: int,
) -> Call:
    """Record a call, with the state of autocast."""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return Call(func, args, kwargs, n_rows, width, autocast)


_COMPARE = {"lt", "le", "gt", "ge", "eq", "ne", "less", "greater", "less_equal", "greater_equal",
            "not_equal"}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Comparison(Call):
    """A comparison of computed values with given ones, where rounding must not decide.

    A threshold is often one of the values itself: as `topk` returned it, decided in float64, or as
    `sort` did, which built the tensor. The k-th largest must not be below it because a product of
    another shape was rounded otherwise. So a head's logits close to the threshold are compared in
    float64, and the value that equals the threshold of its row up to rounding takes its place.
    """

    def compute(self, env: Env, first: int, last: int) -> Steps[Tensor]:
        """Compare rows [first, last)."""
        tiles = []
        for a in self.args:
            tiles.append((yield tile(a, env, first, last)))  # noqa: PERF401
        place = next(i for i, a in enumerate(self.args) if isinstance(a, Node))
        node, z, other = self.args[place], tiles[place].detach(), tiles[1 - place].detach()
        if z.device.type == "meta":
            return self.function(*tiles).expand(last - first, self.width)
        scores = node.scores(env) if isinstance(node, Leaf) else None
        if isinstance(scores, SweptScores | ShardedScores):
            z = tiles[place] = scores.select(slice(first, last)).with_exact_near(z, other)
        one_per_row = other.dim() == 0 or other.shape in ((1, 1), (len(z), 1))
        if one_per_row and z.numel() and z.is_floating_point() and other.is_floating_point():
            tiles[1 - place] = _among(z, other.expand(len(z), 1))
        return self.function(*tiles).expand(last - first, self.width)


def _among(z: Tensor, threshold: Tensor) -> Tensor:
    """Return thresholds (B, 1), each replaced by the equal value of its row (B, V).

    That is the nearest one, if it differs by no more than products of other shapes would.
    """
    apart = (z - threshold).abs().nan_to_num_(nan=math.inf, posinf=math.inf)
    distance, nearest = apart.min(1, keepdim=True)
    size = threshold.abs()
    largest = z.abs().masked_fill(z.isinf() | z.isnan(), 0.0).amax(1, keepdim=True)
    unit = torch.finfo(accumulation_dtype(z.dtype)).eps
    margin = torch.minimum(512 * unit * size, 8 * unit * (size + largest))
    equal = (distance <= margin) & distance.isfinite()
    return torch.where(equal, z.gather(1, nearest).to(threshold.dtype), threshold)


def _absorbed(frame: Frame, name: str, args: tuple[Any, ...], dtype: torch.dtype) -> Node | None:
    """Return the result as scores of the head itself, if these can represent the operation.

    Tensors are copied: one that is rewritten later, such as a sampler's mask, does not change it.
    """
    name = name.strip("_")
    lazy = [a for a in args if isinstance(a, LazyLogits)]
    if len(lazy) != 1 or not dtype.is_floating_point:
        return None
    (logits,) = lazy
    leaf = logits.part
    if not isinstance(leaf, Leaf) or logits.lead != frame.lead:
        return None
    first = isinstance(args[0], LazyLogits)
    others = [a for a in args if not isinstance(a, LazyLogits)]
    after = _step(frame, leaf, name, others, dtype, first=first)
    return None if after is None else after.cast(dtype)


def _comparison(frame: Frame, func: Callable[..., Any], args: tuple[Any, ...]) -> Node | None:
    """Return a comparison of computed values with a tensor; None for other comparisons."""
    numbers = [a.to(torch.uint8) if _is_mask(a) else a for a in args]  # 0 and 1
    parts = [_threshold(frame, frame.place(a)) for a in numbers]
    terms = _difference(parts[0]) if _number(parts[1]) == 0 else None
    parts = list(terms or parts)  # x - t > 0 is x > t
    nodes = [p for p in parts if isinstance(p, Node)]
    given = [p for p in parts if isinstance(p, Operand)]
    if len(nodes) != 1 or len(given) != 1:
        return None
    if not isinstance(nodes[0], Leaf) and given[0].width > 1:
        return None
    return Comparison(func, tuple(parts), {}, frame.n_rows, frame.vocab)


def _threshold(frame: Frame, part: Any) -> Any:
    """Return a number as a tensor if it has the digits of one of the values, as `item` gives them.

    A number that was written down, such as 0.5 or 0.1, has few binary digits, or more than float32.
    """
    number = _number(part)
    if number is None or not math.isfinite(number):
        return part
    dtype = accumulation_dtype(frame.lazy.dtype)
    stored = torch.tensor(number, dtype=dtype, device=frame.lazy.device)
    digits = math.frexp(number)[0] * 2**12
    if float(stored) != number or digits == int(digits):
        return part
    return Operand.of(stored, frame.lead)


def _difference(part: Any) -> tuple[Any, Any] | None:
    """Return x and t of x - t, of which one is a finite tensor with an entry per row."""
    if not isinstance(part, Call) or part.kwargs or len(part.args) != 2:
        return None
    name = part.name.strip("_")
    if name not in ("sub", "subtract", "rsub"):
        return None
    x, t = part.args if name != "rsub" else part.args[::-1]
    given = [a for a in (x, t) if isinstance(a, Operand)]
    if len(given) != 1 or given[0].width > 1 or torch._C._are_functorch_transforms_active():
        return None
    return (x, t) if bool(given[0].tensor.isfinite().all()) else None


def _is_mask(a: Any) -> bool:
    return isinstance(a, Tensor) and a.dtype == torch.bool and not isinstance(a, LazyLogits)


def _may_be_masked(leaf: Leaf) -> bool:
    """Whether a bias of -inf may mask tokens, which a head keeps masked whatever follows.

    A tensor does not: -(-inf) is inf, and tanh(-inf) is -1.
    """
    if leaf.root.node is not None or any(s in ("mask", "plus_bias") for s, _ in leaf.steps):
        return True
    bias = leaf.now.source.bias if isinstance(leaf.now, SweptScores) else None
    return bias is not None and bool((bias == -math.inf).any())


def _step(
    frame: Frame, leaf: Leaf, name: str, others: list[Any], dtype: torch.dtype, *, first: bool
) -> Leaf | None:
    if name in ("neg", "negative") and not others:
        return _times(frame, leaf, -1.0)
    if name == "tanh" and not others:
        return None if _may_be_masked(leaf) else leaf.stepped("tanh")
    if name == "masked_fill" and first and len(others) == 2:
        return _masked(frame, leaf, *others)
    if len(others) != 1:
        return None
    other = others[0]
    if name in ("mul", "multiply", "rmul"):
        return _times(frame, leaf, other)
    if name in ("div", "divide", "true_divide", "truediv") and first:
        if isinstance(other, Tensor) and other.is_complex():
            return None
        if isinstance(other, Tensor):
            return _times(frame, leaf, other.to(accumulation_dtype(dtype)).reciprocal())
        return _times(frame, leaf, 1.0 / other) if other else None
    if name in ("add", "radd"):
        return _plus(frame, leaf, other, dtype)
    if name in ("sub", "subtract") and first:
        return _plus(frame, leaf, -other, dtype)
    if name in ("sub", "subtract") or (name == "rsub" and first):
        negative = _times(frame, leaf, -1.0)
        return None if negative is None else _plus(frame, negative, other, dtype)
    return None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def _times(frame: Frame, leaf: Leaf, factor: Any) -> Leaf | None:
    number = _number(factor)
    if number is not None:
        if not math.isfinite(number) or (number <= 0 and _may_be_masked(leaf)):
            return None
        return leaf.stepped("times", number)
    if not isinstance(factor, Tensor) or factor.is_complex() or factor.dtype == torch.bool:
        return None
    if _may_be_masked(leaf) and bool((factor <= 0).any()):
        return None
    factor = factor if factor.is_floating_point() else factor.to(leaf.dtype)
    if factor.numel() == 1 and not factor.requires_grad and factor.device.type == "cpu":
        return leaf.stepped("times", float(factor)) if bool(factor.isfinite()) else None
    if factor.dim() == 0:
        return leaf.stepped("times_rows", factor.clone())
    rows = frame.canonical(factor)
    if rows.shape[-1] != 1 or frame.vocab == 1:
        return None
    return leaf.stepped("times_rows", rows.expand(*frame.lead, 1).reshape(-1, 1).clone())


def _plus(frame: Frame, leaf: Leaf, term: Any, dtype: torch.dtype) -> Leaf | None:
    number = _number(term)
    if number is not None:
        return leaf.stepped("plus", number)
    if not isinstance(term, Tensor) or not term.is_floating_point() or term.dim() == 0:
        return None
    vector = frame.canonical(term)
    if vector.shape[-1] != frame.vocab or vector.numel() != frame.vocab or frame.vocab == 1:
        return None
    # A vector of lower precision must not be divided by a scale in it.
    return leaf.stepped("plus_bias", vector.reshape(-1).to(accumulation_dtype(dtype), copy=True))


def _masked(frame: Frame, leaf: Leaf, mask: Any, value: Any) -> Leaf | None:
    if not isinstance(mask, Tensor) or mask.dim() == 0 or isinstance(mask, LazyLogits):
        return None
    if isinstance(value, Tensor):
        if value.dim() or value.requires_grad:
            return None
        value = float(value)
    tokens = frame.canonical(mask)
    if tokens.numel() != frame.vocab or tokens.shape[-1] != frame.vocab or value != -math.inf:
        return None
    return leaf.stepped("mask", tokens.reshape(-1).clone())
