"""Torch's own spelling on lazy logits: which function means which question.

`F.cross_entropy(logits, targets)`, `logits / 30`, `torch.tanh(logits)`, `logits.argmax(-1)` and the
like arrive at `call`. What has no entry here builds the tensor, with a `PerformanceWarning`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from lmhead.logits.lazy import LazyLogits
from lmhead.sweep.eager import eager


def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)`, where some argument is a `LazyLogits`."""
    spelled = _SPELLED.get(func)
    if spelled is not None:
        result = spelled(*args, **kwargs)
        if result is not NotImplemented:
            return result
    name = getattr(func, "__name__", str(func))

    def build(x: Any) -> Any:
        return x._build(f"{name}()") if isinstance(x, LazyLogits) else x

    return func(*tree_map(build, args), **tree_map(build, kwargs))


@eager
def _cross_entropy(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """F.cross_entropy: logits (N, V) or (V,), targets ids or probabilities."""
    old_style = size_average is not None or reduce is not None
    if not isinstance(input, LazyLogits) or input._kind == "probs" or old_style:
        return NotImplemented
    if input.ndim > 2:
        raise ValueError(
            f"F.cross_entropy takes lazy logits of shape (N, V) or (V,); got {tuple(input.shape)}. "
            f"Use logits.view(-1, {input.shape[-1]}) and targets.view(-1)"
        )
    loss = input.cross_entropy(
        target,
        class_weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return loss.to(_loss_dtype(input))


def _nll_loss(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """F.nll_loss of lazy log-probabilities is the cross-entropy of their logits."""
    if not isinstance(input, LazyLogits) or input._kind != "log_probs":
        return NotImplemented
    return _cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction)


@eager
def _kl_div(
    input: Any,
    target: Any,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    """F.kl_div of two lazy distributions: KL(target ‖ input), summed over the words."""
    both = isinstance(input, LazyLogits) and isinstance(target, LazyLogits)
    if not both or input._kind != "log_probs" or reduction == "none":
        return NotImplemented
    if target._kind != ("log_probs" if log_target else "probs") or input.shape != target.shape:
        return NotImplemented
    if size_average is not None or reduce is not None:
        return NotImplemented
    rows = target._with(dtype=torch.float64).ask(kl_to=input).kl
    count = {"sum": 1, "batchmean": input.shape[0], "mean": input.numel()}[reduction]
    return (rows.sum() / count).to(_loss_dtype(input))


def _loss_dtype(logits: LazyLogits) -> torch.dtype:
    """The type of the logits; float32 under autocast, as torch does for losses."""
    device = logits.device.type
    return torch.float32 if torch.is_autocast_enabled(device) else logits.dtype


def _softmax(input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return input.softmax(-1 if dim is None else dim, dtype=dtype)


def _log_softmax(
    input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Any:
    return input.log_softmax(-1 if dim is None else dim, dtype=dtype)


def _subtract(left: Any, right: Any, *, alpha: float = 1) -> Any:
    if alpha != 1:
        return NotImplemented
    return left - right if isinstance(left, LazyLogits) else (right * -1.0) + left


def _add(left: Any, right: Any, *, alpha: float = 1) -> Any:
    if alpha != 1:
        return NotImplemented
    return left + right if isinstance(left, LazyLogits) else right + left


def _multiply(left: Any, right: Any) -> Any:
    return left * right if isinstance(left, LazyLogits) else right * left


def _divide(left: Any, right: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None or not isinstance(left, LazyLogits):
        return NotImplemented
    return left / right


def _broadcast(*tensors: Any) -> Any:
    tensors = tuple(tensors[0]) if len(tensors) == 1 else tensors
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
    return tuple(t.expand(shape) for t in tensors)


_SPELLED: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    F.kl_div: _kl_div,
    F.softmax: _softmax,
    F.log_softmax: _log_softmax,
    torch.broadcast_tensors: _broadcast,
}
for _function, _names in (
    (_add, ("add", "__add__", "__radd__")),
    (_subtract, ("sub", "subtract", "__sub__")),
    (_multiply, ("mul", "multiply", "__mul__", "__rmul__")),
    (_divide, ("div", "divide", "true_divide", "__truediv__")),
):
    for _name in _names:
        for _room in (torch, Tensor):
            if hasattr(_room, _name):
                _SPELLED[getattr(_room, _name)] = _function


def _method(name: str) -> Callable[..., Any]:
    def method(input: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, LazyLogits):
            return NotImplemented
        return getattr(input, name)(*args, **kwargs)

    return method


_METHODS = (
    *("argmax", "clamp", "exp", "flatten", "gather", "log", "log_softmax", "logsumexp"),
    *("masked_fill", "max", "multinomial", "neg", "numel", "permute", "reshape", "softmax"),
    *("squeeze", "tanh", "topk", "transpose", "unsqueeze"),
)
for _name in _METHODS:
    for _room in (torch, Tensor):
        _call = _method("__neg__" if _name == "neg" else _name)
        _SPELLED.setdefault(getattr(_room, _name), _call)
