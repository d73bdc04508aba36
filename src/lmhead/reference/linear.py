"""Chapter 1. The linear layer: y = x Wᵀ + b, its gradients, and what may follow it.

A linear layer holds one row of weights per output. Output v is the dot product of the input with
row v, plus a number of its own:

    y[n, v] = Σ_d x[n, d] · W[v, d] + b[v]

In a language model x is the hidden state, there is one row per word, and y[n, v] is the score of
word v: its *logit*.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lmhead.reference.arrays import Array, ArrayLike, floats

__all__ = [
    "LinearGrads",
    "bias_uniform",
    "gelu",
    "gelu_backward",
    "kaiming_uniform",
    "linear",
    "linear_backward",
    "relu",
    "relu_backward",
    "sigmoid",
    "sigmoid_backward",
]


def linear(x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None) -> Array:
    """The layer: y = x Wᵀ + b. Shapes: x (..., D), weight (V, D), bias (V,), y (..., V).

    >>> linear([1.0, 2.0], weight=[[1, 0], [0, 1], [1, 1]], bias=[0, 0, 10])
    array([ 1.,  2., 13.])
    """
    x, weight = floats(x), floats(weight)
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x must end in {weight.shape[-1]} features; got shape {x.shape}")
    y = x @ weight.T
    return y if bias is None else y + floats(bias)


class LinearGrads(NamedTuple):
    """∂loss/∂x, ∂loss/∂W and ∂loss/∂b, each shaped like its namesake."""

    x: Array
    weight: Array
    bias: Array


def linear_backward(grad_y: ArrayLike, x: ArrayLike, weight: ArrayLike) -> LinearGrads:
    """Its gradients: ∂x = ∂y W,   ∂W = ∂yᵀ x,   ∂b = Σ_n ∂y[n].

    Read them as: an input hears from every output, through the weight between them; a weight hears
    the product of its two ends; a bias hears its output alone. W and b serve every row n of a
    batch, so their gradients are sums over rows.

    >>> grads = linear_backward([[1, 0], [0, 2]], x=[[1, 2, 3], [4, 5, 6]], weight=np.ones((2, 3)))
    >>> grads.x
    array([[1., 1., 1.],
           [2., 2., 2.]])
    >>> grads.weight
    array([[ 1.,  2.,  3.],
           [ 8., 10., 12.]])
    >>> grads.bias
    array([1., 2.])
    """
    grad_y, x, weight = floats(grad_y), floats(x), floats(weight)
    grad_rows = grad_y.reshape(-1, weight.shape[0])
    x_rows = x.reshape(-1, weight.shape[1])
    return LinearGrads(
        x=grad_y @ weight,
        weight=grad_rows.T @ x_rows,
        bias=grad_rows.sum(axis=0),
    )


# Activations. A stack of linear layers is one linear layer; an activation between them makes it
# more. Each backward takes ∂loss/∂output and the *input*, and returns ∂loss/∂input.


def relu(x: ArrayLike) -> Array:
    """ReLU: max(x, 0).

    >>> relu([-2, 0, 3])
    array([0., 0., 3.])
    """
    return np.maximum(floats(x), 0.0)


def relu_backward(grad: ArrayLike, x: ArrayLike) -> Array:
    """Slope of ReLU: 1 if x > 0 else 0.

    >>> relu_backward([1, 1, 1], [-2, 0, 3])
    array([0., 0., 1.])
    """
    return floats(grad) * (floats(x) > 0)


def sigmoid(x: ArrayLike) -> Array:
    """Sigmoid: σ(x) = 1 / (1 + e^-x), computed so that e^|x| never overflows.

    It is the softmax of the two logits (x, 0): the probability of "yes".

    >>> sigmoid([-1000, 0, 1000])
    array([0. , 0.5, 1. ])
    """
    x = floats(x)
    small = np.exp(-np.abs(x))  # in (0, 1] whatever the sign
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def sigmoid_backward(grad: ArrayLike, x: ArrayLike) -> Array:
    """Slope of the sigmoid: σ(x) (1 - σ(x)).

    >>> sigmoid_backward([1.0], [0.0])
    array([0.25])
    """
    s = sigmoid(x)
    return floats(grad) * s * (1.0 - s)


def gelu(x: ArrayLike) -> Array:
    """GELU: x Φ(x), where Φ(x) = (1 + erf(x / √2)) / 2 is the normal distribution function.

    A smooth ReLU: x is kept with the probability that a normal draw is below it.

    >>> gelu([-10, 0, 1, 10]).round(4) + 0
    array([ 0.    ,  0.    ,  0.8413, 10.    ])
    """
    x = floats(x)
    return x * _normal_cdf(x)


def gelu_backward(grad: ArrayLike, x: ArrayLike) -> Array:
    """Slope of GELU: Φ(x) + x φ(x), where φ(x) = e^(-x²/2) / √(2π) is the normal density.

    >>> gelu_backward([1.0, 1.0], [0.0, 1.0]).round(4)
    array([0.5   , 1.0833])
    """
    x = floats(x)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return floats(grad) * (_normal_cdf(x) + x * density)


def _normal_cdf(x: Array) -> Array:
    erf = np.vectorize(math.erf, otypes=[np.float64])
    return floats(0.5 * (1.0 + erf(x / math.sqrt(2))))


# Initialisation. `uniform(low, high, size)` is any source of uniform numbers, for instance
# `np.random.default_rng(0).uniform`; handing it in keeps this page free of hidden state.

Uniform = Callable[[float, float, tuple[int, ...]], ArrayLike]


def kaiming_uniform(
    out_features: int, in_features: int, *, uniform: Uniform, a: float = math.sqrt(5)
) -> Array:
    """Initial weights: W[v, d] ~ U(-r, r) with r = √(2 / (1 + a²)) · √(3 / in_features).

    The aim is to keep the size of the numbers the same from layer to layer. With a = √5, which is
    what `torch.nn.Linear` passes, r is simply 1 / √in_features.

    >>> weight = kaiming_uniform(1000, 4, uniform=np.random.default_rng(0).uniform)
    >>> weight.shape, bool(np.abs(weight).max() <= 0.5)
    ((1000, 4), True)
    """
    bound = math.sqrt(2 / (1 + a * a)) * math.sqrt(3 / in_features)
    return floats(uniform(-bound, bound, (out_features, in_features)))


def bias_uniform(out_features: int, in_features: int, *, uniform: Uniform) -> Array:
    """Initial bias: b[v] ~ U(-r, r) with r = 1 / √in_features, again as `torch.nn.Linear`.

    >>> bias_uniform(3, 4, uniform=lambda low, high, size: np.full(size, high))
    array([0.5, 0.5, 0.5])
    """
    bound = 1 / math.sqrt(in_features)
    return floats(uniform(-bound, bound, (out_features,)))
