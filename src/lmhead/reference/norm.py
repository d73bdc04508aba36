"""Chapter 7. Layer norm, and the residual "Add & Norm" around every sublayer of a Transformer.

Layer norm standardises a vector: mean 0, variance 1, then a learned stretch γ and shift β.

    x̂ = (x - mean(x)) / √(var(x) + ε)
    y = γ ⊙ x̂ + β

Do not confuse it with softmax, which also runs over the last axis. Softmax makes a distribution:
positive numbers that sum to 1, to be read as probabilities. Layer norm makes numbers of a standard
size, of both signs, to be computed with. Softmax ignores a shift of its input; layer norm ignores a
shift *and* a stretch.

>>> layer_norm([1.0, 2.0, 3.0], eps=0.0).round(4)
array([-1.2247,  0.    ,  1.2247])
>>> layer_norm([10.0, 20.0, 30.0], eps=0.0).round(4)  # ten times the input: the same
array([-1.2247,  0.    ,  1.2247])
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lmhead.reference.arrays import Array, ArrayLike, floats

__all__ = [
    "LayerNormGrads",
    "layer_norm",
    "layer_norm_backward",
    "post_norm",
    "post_norm_backward",
    "pre_norm",
    "pre_norm_backward",
]

Sublayer = Callable[[Array], Array]
"""Any map from (..., D) to (..., D): attention, feed-forward."""

SublayerBackward = Callable[[Array, Array], Array]
"""Its backward: (∂loss/∂output, input) to ∂loss/∂input."""


def layer_norm(
    x: ArrayLike,
    gamma: ArrayLike = 1.0,
    beta: ArrayLike = 0.0,
    *,
    eps: float = 1e-5,
) -> Array:
    """Standardise, stretch, shift: y = γ ⊙ (x - mean) / √(var + ε) + β. Shapes: x (..., D).

    mean and var are over the last axis, one pair per vector; var divides by D. ε keeps a constant
    vector from dividing by 0.

    >>> layer_norm([1.0, 2.0, 3.0], gamma=[1, 1, 2], beta=[0, 0, 1], eps=0.0).round(4)
    array([-1.2247,  0.    ,  3.4495])
    >>> layer_norm([5.0, 5.0])
    array([0., 0.])
    """
    return floats(gamma) * _standardise(x, eps)[0] + floats(beta)


class LayerNormGrads(NamedTuple):
    """∂loss/∂x, ∂loss/∂γ and ∂loss/∂β."""

    x: Array
    gamma: Array
    beta: Array


def layer_norm_backward(
    grad_y: ArrayLike, x: ArrayLike, gamma: ArrayLike = 1.0, *, eps: float = 1e-5
) -> LayerNormGrads:
    """Gradients: ∂x = (g - mean(g) - x̂ · mean(g ⊙ x̂)) / √(var + ε), where g = γ ⊙ ∂y.

    Two things are taken out of g before it passes: its mean, and its part along x̂. A shift or a
    stretch of x would not change y, so no gradient may ask for one. ∂γ = Σ_n ∂y ⊙ x̂ and
    ∂β = Σ_n ∂y, sums over rows as for any parameter that all rows share.

    >>> grads = layer_norm_backward([1.0, 0.0, 0.0], [1.0, 2.0, 4.0])
    >>> grads.x.round(4)
    array([ 0.2291, -0.3436,  0.1145])
    >>> grads.beta
    array([1., 0., 0.])
    """
    grad_y = floats(grad_y)
    x_hat, spread = _standardise(x, eps)
    g = floats(gamma) * grad_y
    mean_g: Array = g.mean(axis=-1, keepdims=True)
    along: Array = (g * x_hat).mean(axis=-1, keepdims=True)
    size = grad_y.shape[-1]
    return LayerNormGrads(
        x=(g - mean_g - x_hat * along) / spread,
        gamma=(grad_y * x_hat).reshape(-1, size).sum(axis=0),
        beta=grad_y.reshape(-1, size).sum(axis=0),
    )


# Add & Norm. A sublayer's output is *added* to its input, so that it need only learn a correction,
# and so that the gradient has a straight way back. The norm comes after the sum, or before the
# sublayer.


def post_norm(
    x: ArrayLike,
    sublayer: Sublayer,
    gamma: ArrayLike = 1.0,
    beta: ArrayLike = 0.0,
    *,
    eps: float = 1e-5,
) -> Array:
    """Post-norm, the Transformer of 2017: y = layer_norm(x + sublayer(x)).

    >>> post_norm([1.0, 2.0, 3.0], lambda x: x, eps=0.0).round(4)
    array([-1.2247,  0.    ,  1.2247])
    """
    x = floats(x)
    return layer_norm(x + sublayer(x), gamma, beta, eps=eps)


def post_norm_backward(
    grad_y: ArrayLike,
    x: ArrayLike,
    sublayer: Sublayer,
    sublayer_backward: SublayerBackward,
    gamma: ArrayLike = 1.0,
    *,
    eps: float = 1e-5,
) -> LayerNormGrads:
    """Gradients: through the norm first, then both ways: ∂x = ∂s + sublayer'(∂s), s the sum.

    Every path back passes the norm: deep post-norm stacks need a careful start (warm-up).

    >>> doubled = post_norm_backward([1, 0, 0], [1.0, 2.0, 4.0], lambda x: x, lambda g, x: g)
    >>> (doubled.x / layer_norm_backward([1, 0, 0], [2.0, 4.0, 8.0]).x).round(4)
    array([2., 2., 2.])
    """
    x = floats(x)
    through = layer_norm_backward(grad_y, x + sublayer(x), gamma, eps=eps)
    return through._replace(x=through.x + sublayer_backward(through.x, x))


def pre_norm(
    x: ArrayLike,
    sublayer: Sublayer,
    gamma: ArrayLike = 1.0,
    beta: ArrayLike = 0.0,
    *,
    eps: float = 1e-5,
) -> Array:
    """Pre-norm, nearly every model since GPT-2: y = x + sublayer(layer_norm(x)).

    >>> pre_norm([1.0, 2.0, 3.0], lambda x: x, eps=0.0).round(4)
    array([-0.2247,  2.    ,  4.2247])
    """
    x = floats(x)
    return x + sublayer(layer_norm(x, gamma, beta, eps=eps))


def pre_norm_backward(
    grad_y: ArrayLike,
    x: ArrayLike,
    sublayer_backward: SublayerBackward,
    gamma: ArrayLike = 1.0,
    beta: ArrayLike = 0.0,
    *,
    eps: float = 1e-5,
) -> LayerNormGrads:
    """Gradients: ∂x = ∂y + layer_norm'(sublayer'(∂y)).

    ∂y itself arrives untouched, however deep the stack: that is why pre-norm trains so easily.

    >>> silent = pre_norm_backward([1, 0, 0], [1.0, 2.0, 4.0], lambda g, x: 0 * g)
    >>> silent.x
    array([1., 0., 0.])
    """
    grad_y = floats(grad_y)
    into_sublayer = sublayer_backward(grad_y, layer_norm(x, gamma, beta, eps=eps))
    through = layer_norm_backward(into_sublayer, x, gamma, eps=eps)
    return through._replace(x=grad_y + through.x)


def _standardise(x: ArrayLike, eps: float) -> tuple[Array, Array]:
    """The standardised x̂, and the spread √(var + ε) it was divided by."""
    x = floats(x)
    mean: Array = x.mean(axis=-1, keepdims=True)
    spread: Array = np.sqrt(x.var(axis=-1, keepdims=True) + eps)
    return (x - mean) / spread, spread
