"""Chapter 3. The output layer, or head, of a language model: one logit per word.

The linear layer of chapter 1, with two options that real models use:

    x = hidden Wᵀ + b            the dot products
    z = softcap(scale · x)       the logits

`scale` makes all logits smaller or larger (Cohere, Granite, MuP models); `softcap` bends them so
that none leaves (-cap, cap) (Gemma 2).
"""

import numpy as np

from lmhead.reference.arrays import Array, ArrayLike, floats
from lmhead.reference.linear import LinearGrads, linear, linear_backward

__all__ = ["head_logits", "head_logits_backward", "softcap", "softcap_backward"]


def softcap(z: ArrayLike, cap: float) -> Array:
    """Soft-capping: cap · tanh(z / cap), nearly z when small, never beyond ±cap.

    A masked word stays masked, softcap(-inf) = -inf; tanh alone would lift it to -cap, and with it
    words that must never be chosen.

    >>> softcap([0.1, 10, 1000, -np.inf], cap=30).round(3)
    array([ 0.1  ,  9.645, 30.   ,   -inf])
    """
    _check_cap(cap)
    z = floats(z)
    return np.where(np.isneginf(z), -np.inf, cap * np.tanh(z / cap))


def softcap_backward(grad: ArrayLike, z: ArrayLike, cap: float) -> Array:
    """Its slope: 1 - tanh²(z / cap), which is 0 for a masked word.

    >>> softcap_backward([1, 1, 1], [0, 30, -np.inf], cap=30).round(3)
    array([1.  , 0.42, 0.  ])
    """
    _check_cap(cap)
    t = np.tanh(floats(z) / cap)
    return floats(grad) * (1.0 - t * t)


_softcap, _softcap_backward = softcap, softcap_backward  # below, `softcap` is the option


def head_logits(
    hidden: ArrayLike,
    weight: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Array:
    """Logits: z = softcap(scale · (hidden Wᵀ + b)).

    Shapes: hidden (..., D), weight (V, D), bias (V,), z (..., V).

    >>> head_logits([1.0, 2.0], [[1, 0], [0, 1], [1, 1]], scale=10, softcap=20).round(3)
    array([ 9.242, 15.232, 18.103])
    """
    z = _scaled(linear(hidden, weight, bias), scale)
    return z if softcap is None else _softcap(z, softcap)


def head_logits_backward(
    grad_logits: ArrayLike,
    hidden: ArrayLike,
    weight: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> LinearGrads:
    """The chain rule, last step first: ∂x = scale · softcap'(scale · x) · ∂z, then chapter 1.

    >>> grads = head_logits_backward([0.0, 1.0], [1, 2], np.ones((2, 2)), scale=10)
    >>> grads.x, grads.bias
    (array([10., 10.]), array([ 0., 10.]))
    """
    grad = floats(grad_logits)
    if softcap is not None:
        grad = _softcap_backward(grad, _scaled(linear(hidden, weight, bias), scale), softcap)
    return linear_backward(scale * grad, hidden, weight)


def _scaled(x: Array, scale: float) -> Array:
    """scale · x; a masked word (-inf) stays masked whatever the sign of the scale."""
    masked = np.isneginf(x)
    return np.where(masked, -np.inf, scale * np.where(masked, 0.0, x))


def _check_cap(cap: float) -> None:
    if not cap > 0:
        raise ValueError(f"softcap must be above 0; got {cap}")
