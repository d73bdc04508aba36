"""Chapter 9. Feed-forward: two linear layers and an activation, at each position on its own.

    a = x W₁ᵀ + b₁           (D to 4D, usually)
    y = f(a) W₂ᵀ + b₂        (4D back to D)

Attention moves messages between positions; this is where each position thinks about what it got.
"""

from collections.abc import Callable
from typing import NamedTuple

from lmhead.reference.arrays import Array, ArrayLike
from lmhead.reference.linear import (
    gelu,
    gelu_backward,
    linear,
    linear_backward,
    relu,
    relu_backward,
    sigmoid,
    sigmoid_backward,
)

__all__ = ["FeedForwardGrads", "feed_forward", "feed_forward_backward"]

Activation = tuple[Callable[[ArrayLike], Array], Callable[[ArrayLike, ArrayLike], Array]]

_ACTIVATIONS: dict[str, Activation] = {
    "relu": (relu, relu_backward),
    "gelu": (gelu, gelu_backward),
    "sigmoid": (sigmoid, sigmoid_backward),
}


def feed_forward(
    x: ArrayLike,
    up: ArrayLike,
    down: ArrayLike,
    *,
    up_bias: ArrayLike | None = None,
    down_bias: ArrayLike | None = None,
    activation: str = "gelu",
) -> Array:
    """The block: y = f(x W₁ᵀ + b₁) W₂ᵀ + b₂. Shapes: x (..., D), up (H, D), down (D, H).

    >>> feed_forward([1.0, -3.0], up=[[1, 0], [0, 1]], down=[[1, 1], [1, -1]], activation="relu")
    array([1., 1.])
    """
    f, _ = _functions(activation)
    return linear(f(linear(x, up, up_bias)), down, down_bias)


class FeedForwardGrads(NamedTuple):
    """∂loss/∂x, and the gradients of the four parameters."""

    x: Array
    up: Array
    up_bias: Array
    down: Array
    down_bias: Array


def feed_forward_backward(
    grad_y: ArrayLike,
    x: ArrayLike,
    up: ArrayLike,
    down: ArrayLike,
    *,
    up_bias: ArrayLike | None = None,
    activation: str = "gelu",
) -> FeedForwardGrads:
    """Gradients: back through W₂, the activation and W₁, each by its own rule from chapter 1.

    >>> grads = feed_forward_backward(
    ...     [1.0, 0.0], [1.0, -3.0], up=[[1, 0], [0, 1]], down=[[1, 1], [1, -1]], activation="relu"
    ... )
    >>> grads.x  # the second unit is asleep, so nothing comes back through it
    array([1., 0.])
    """
    f, f_backward = _functions(activation)
    a = linear(x, up, up_bias)
    second = linear_backward(grad_y, f(a), down)
    first = linear_backward(f_backward(second.x, a), x, up)
    return FeedForwardGrads(
        x=first.x, up=first.weight, up_bias=first.bias, down=second.weight, down_bias=second.bias
    )


def _functions(activation: str) -> Activation:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {sorted(_ACTIVATIONS)}; got {activation!r}")
    return _ACTIVATIONS[activation]
