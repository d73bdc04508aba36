"""Chapter 2. Softmax: from scores to probabilities, and back.

Logits are scores: any real numbers. Softmax turns them into a distribution:

    p[i] = e^z[i] / Σ_j e^z[j]

Every p[i] is positive, they sum to 1, a larger score gets a larger probability, and adding the
same number to all scores changes nothing. The last fact is what lets a computer do it safely.

A logit of -inf is legal: that word is *masked*, it has probability 0. A row in which every word is
masked has no distribution; its softmax is NaN, as in torch.
"""

import numpy as np

from lmhead.reference.arrays import Array, ArrayLike, floats

__all__ = [
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "logsumexp_backward",
    "normalize",
    "normalize_backward",
    "softmax",
    "softmax_backward",
    "softmax_jacobian",
    "softmax_naive",
]


def normalize(x: ArrayLike) -> Array:
    """Plain normalisation: y[i] = x[i] / Σ_j x[j], for numbers that are not negative.

    Softmax of the same numbers is sharper, since it compares differences, not ratios:

    >>> normalize([1, 2, 3]).round(3)
    array([0.167, 0.333, 0.5  ])
    >>> softmax([1, 2, 3]).round(3)
    array([0.09 , 0.245, 0.665])
    """
    x = floats(x)
    total: Array = x.sum(axis=-1, keepdims=True)
    return x / total


def normalize_backward(grad_y: ArrayLike, x: ArrayLike) -> Array:
    """Its gradient: ∂x[i] = (∂y[i] - Σ_j ∂y[j] y[j]) / Σ_j x[j].

    >>> normalize_backward([1.0, 0.0], [1.0, 3.0])
    array([ 0.1875, -0.0625])
    """
    grad_y, y = floats(grad_y), normalize(x)
    average: Array = (grad_y * y).sum(axis=-1, keepdims=True)
    total: Array = floats(x).sum(axis=-1, keepdims=True)
    return (grad_y - average) / total


def softmax_naive(z: ArrayLike) -> Array:
    """The formula as written: p[i] = e^z[i] / Σ_j e^z[j]. Do not use it: e^1000 is infinite.

    >>> with np.errstate(all="ignore"):
    ...     softmax_naive([1000, 1001, 1002])
    array([nan, nan, nan])
    """
    e = np.exp(floats(z))
    total: Array = e.sum(axis=-1, keepdims=True)
    return e / total


def softmax(z: ArrayLike, *, temperature: float = 1.0) -> Array:
    """Stable softmax: p[i] = e^(z[i]/T - m) / Σ_j e^(z[j]/T - m), with m = max_j z[j]/T.

    Subtracting m changes nothing, since e^-m cancels, but now the largest exponent is 0: nothing
    overflows, and the sum is at least 1.

    >>> softmax([1000, 1001, 1002]).round(4)
    array([0.09  , 0.2447, 0.6652])

    T < 1 sharpens towards the largest logit, T > 1 flattens towards uniform:

    >>> softmax([1, 2, 3], temperature=0.5).round(3)
    array([0.016, 0.117, 0.867])
    >>> softmax([1, 2, 3], temperature=100).round(3)
    array([0.33 , 0.333, 0.337])
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0; got {temperature}")
    shifted, _ = _minus_max(floats(z) / temperature)
    e = np.exp(shifted)
    total: Array = e.sum(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # 0 / 0 = NaN for a row of only -inf
        return e / total


def softmax_jacobian(p: ArrayLike) -> Array:
    """All slopes at once: J[i, j] = ∂p[i]/∂z[j] = p[i] (δ[i, j] - p[j]), or J = diag(p) - p pᵀ.

    Raising one logit raises its own probability and lowers all others; every row and every column
    sums to 0, because the probabilities always sum to 1.

    >>> softmax_jacobian([0.5, 0.3, 0.2])
    array([[ 0.25, -0.15, -0.1 ],
           [-0.15,  0.21, -0.06],
           [-0.1 , -0.06,  0.16]])
    """
    p = floats(p)
    return p[..., :, None] * (np.eye(p.shape[-1]) - p[..., None, :])


def softmax_backward(grad_p: ArrayLike, p: ArrayLike, *, temperature: float = 1.0) -> Array:
    """The gradient, without building J: ∂z = J ∂p = p ⊙ (∂p - Σ_j ∂p[j] p[j]) / T.

    A word gains only if its own gradient is above the average gradient under p. (Some texts print
    a further factor 1 - p[i]. It is wrong: it mixes the diagonal of J into a formula that already
    has it.)

    >>> p = softmax([1.0, 2.0, 3.0])
    >>> g = np.array([1.0, 0.0, 0.0])
    >>> softmax_backward(g, p).round(4)
    array([ 0.0819, -0.022 , -0.0599])
    >>> np.allclose(softmax_backward(g, p), softmax_jacobian(p) @ g)
    True
    """
    grad_p, p = floats(grad_p), floats(p)
    average: Array = (grad_p * p).sum(axis=-1, keepdims=True)
    return p * (grad_p - average) / temperature


def logsumexp(z: ArrayLike) -> Array:
    """Log of the denominator: lse = log Σ_j e^z[j] = m + log Σ_j e^(z[j] - m), with m = max z.

    A soft maximum: at least max z, at most max z + log V. Shape (..., V) becomes (...).

    >>> print(logsumexp([1000, 1001, 1002]).round(4))
    1002.4076
    >>> print(logsumexp([-np.inf, -np.inf]))
    -inf
    """
    shifted, m = _minus_max(floats(z))
    return _log_sum(shifted)[..., 0] + m[..., 0]


def logsumexp_backward(grad: ArrayLike, z: ArrayLike) -> Array:
    """The slope of the soft maximum is the softmax: ∂z = ∂lse · p.

    >>> logsumexp_backward(1.0, [1, 2, 3]).round(3)
    array([0.09 , 0.245, 0.665])
    """
    return floats(grad)[..., None] * softmax(z)


def log_softmax(z: ArrayLike) -> Array:
    """Log-probabilities: log p[i] = z[i] - lse = (z[i] - m) - log Σ_j e^(z[j] - m).

    Never log(softmax(z)): a tiny p would be rounded to 0, and log 0 is -inf. And m is taken off
    first, since z[i] - lse would lose the digits that two large numbers share.

    >>> log_softmax([0, 1000])
    array([-1000.,     0.])
    """
    shifted, _ = _minus_max(floats(z))
    with np.errstate(invalid="ignore"):  # -inf - -inf = NaN for a row of only -inf
        return shifted - _log_sum(shifted)


def log_softmax_backward(grad_log_p: ArrayLike, log_p: ArrayLike) -> Array:
    """Its gradient: ∂z[i] = ∂logp[i] - p[i] Σ_j ∂logp[j].

    With ∂logp = -one_hot(y), the gradient of -log p[y], this is p - y: see chapter 4.

    >>> log_softmax_backward([0, 0, -1], log_softmax([1, 2, 3])).round(3)
    array([ 0.09 ,  0.245, -0.335])
    """
    grad_log_p = floats(grad_log_p)
    total: Array = grad_log_p.sum(axis=-1, keepdims=True)
    return grad_log_p - np.exp(floats(log_p)) * total


def _minus_max(z: Array) -> tuple[Array, Array]:
    """The row less its maximum m, and m (..., 1). A row of only -inf is left as it is."""
    m: Array = z.max(axis=-1, keepdims=True)
    m = np.where(np.isfinite(m), m, 0.0)
    return z - m, m


def _log_sum(shifted: Array) -> Array:
    """The log Σ_j e^shifted[j], which is in [0, log V]; -inf for a row of only -inf."""
    total: Array = np.exp(shifted).sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return np.log(total)
