"""Chapter 5. Questions one asks of a row of logits, and the gradients of those that have one.

How likely is this word? Which rank does it have? How undecided is the model? Which words lead?
How far is one model from another? Shapes: logits (..., V); answers (...), or (..., K) for K words.

Two conventions hold throughout. 0 · log 0 = 0, so masked words (logit -inf) are harmless. And words
are *ordered* by logit, largest first, ties to the lowest id; argmax, top-k and rank all read from
that one order. A row with a NaN, or with nothing but masked words, has no best word: its ids and
ranks are -1, which is no word.
"""

import numpy as np
from numpy.typing import NDArray

from lmhead.reference.arrays import Array, ArrayLike, Ids, floats, ids_below
from lmhead.reference.softmax import log_softmax, softmax

__all__ = [
    "argmax",
    "descending_order",
    "entropy",
    "entropy_backward",
    "kl",
    "kl_backward",
    "log_prob",
    "log_prob_backward",
    "log_sum_sq",
    "log_sum_sq_backward",
    "mean_logit",
    "mean_logit_backward",
    "rank",
    "top_k",
]


def log_prob(logits: ArrayLike, ids: ArrayLike) -> Array:
    """Log-probability: log p[id] = z[id] - lse. ids are (...), or (..., K) for K words a row.

    >>> print(log_prob([1, 2, 3], 2).round(4))
    -0.4076
    >>> log_prob([1, 2, 3], [2, 0]).round(4)
    array([-0.4076, -2.4076])
    """
    return _take(log_softmax(logits), ids)


def log_prob_backward(grad: ArrayLike, logits: ArrayLike, ids: ArrayLike) -> Array:
    """Its gradient: ∂z = Σ_k ∂[k] · (one_hot(ids[k]) - p).

    Push the asked words up, and let every word pay by its p. Masked words get 0.

    >>> log_prob_backward(1.0, [1, 2, 3], 2).round(3)  # minus the gradient of cross-entropy
    array([-0.09 , -0.245,  0.335])
    """
    z, grad = floats(logits), floats(grad)
    columns = _as_columns(z, ids)
    grads = grad.reshape(columns.shape)
    pushed = np.zeros_like(z)
    for k in range(columns.shape[-1]):  # a loop, since the same id may be asked twice
        column = columns[..., k : k + 1]
        so_far = np.take_along_axis(pushed, column, axis=-1)
        np.put_along_axis(pushed, column, so_far + grads[..., k : k + 1], axis=-1)
    paid = grads.sum(axis=-1, keepdims=True) * softmax(z)
    return np.where(np.isneginf(z), 0.0, pushed - paid)


def entropy(logits: ArrayLike) -> Array:
    """Entropy: H = -Σ_v p[v] log p[v], in nats.

    0 when one word is certain, log V when all are alike.

    >>> print(entropy([0, 0, 0, 0]).round(4), np.log(4).round(4))
    1.3863 1.3863
    >>> print(entropy([0, 0, -np.inf, -np.inf]).round(4))
    0.6931
    """
    log_p = log_softmax(logits)
    return floats(-(np.exp(log_p) * _zero_if_masked(log_p)).sum(axis=-1))


def entropy_backward(grad: ArrayLike, logits: ArrayLike) -> Array:
    """Its gradient: ∂z[v] = -∂ · p[v] · (log p[v] + H).

    To gain entropy, raise the words that are more surprising than average.

    >>> (entropy_backward(1.0, [0, 0, 0]) + 0).round(4)  # already at the top of the hill
    array([0., 0., 0.])
    >>> entropy_backward(1.0, [1, 2, 3]).round(4)
    array([ 0.1418,  0.1408, -0.2826])
    """
    log_p = log_softmax(logits)
    h = entropy(logits)[..., None]
    return -floats(grad)[..., None] * np.exp(log_p) * (_zero_if_masked(log_p) + h)


def log_sum_sq(logits: ArrayLike) -> Array:
    """Collision: log Σ_v p[v]², the log of the chance that two draws agree.

    0 when one word is certain, -log V when all are alike. Minus it is the Rényi entropy of order 2.

    >>> print(log_sum_sq([0, 0, 0, 0]).round(4))
    -1.3863
    """
    return floats(np.log(np.square(softmax(logits)).sum(axis=-1)))


def log_sum_sq_backward(grad: ArrayLike, logits: ArrayLike) -> Array:
    """Its gradient: ∂z[v] = 2 ∂ (p[v]² / Σ p² - p[v]).

    >>> (log_sum_sq_backward(1.0, [1, 2, 3]) + 0).round(4)
    array([-0.1483, -0.2548,  0.4031])
    """
    p = softmax(logits)
    share = np.square(p) / np.square(p).sum(axis=-1, keepdims=True)
    return floats(2 * floats(grad)[..., None] * (share - p))


def mean_logit(logits: ArrayLike) -> Array:
    """The mean of a row's logits, masked words (-inf) left out.

    >>> print(mean_logit([1.0, 2.0, -np.inf]))
    1.5
    """
    z = floats(logits)
    allowed = ~np.isneginf(z)
    return floats(np.where(allowed, z, 0.0).sum(axis=-1) / allowed.sum(axis=-1))


def mean_logit_backward(grad: ArrayLike, logits: ArrayLike) -> Array:
    """Its gradient: ∂ / n for each of the n words that are not masked.

    >>> mean_logit_backward(1.0, [1.0, 2.0, -np.inf])
    array([0.5, 0.5, 0. ])
    """
    allowed = ~np.isneginf(floats(logits))
    return floats(floats(grad)[..., None] * allowed / allowed.sum(axis=-1, keepdims=True))


def descending_order(logits: ArrayLike) -> Ids:
    """All ids of a row, best first: by logit, then by lowest id.

    >>> descending_order([1.0, 3.0, -np.inf, 3.0])
    array([1, 3, 0, 2])
    """
    z = floats(logits)
    not_nan = ~np.isnan(z)
    # lexsort reads its last key first, and keeps the order of ids where all keys tie.
    return np.lexsort((-np.where(not_nan, z, 0.0), not_nan), axis=-1).astype(np.int64)


def argmax(logits: ArrayLike) -> Ids:
    """The id of the largest logit, the lowest one if several tie.

    No softmax needed: e^z grows with z, so the largest logit is the largest probability.

    >>> print(argmax([1, 3, 3]), argmax(softmax([1, 3, 3])))
    1 1
    >>> print(argmax([0.0, np.nan]), argmax([-np.inf, -np.inf]))
    -1 -1
    """
    z = floats(logits)
    return np.where(_has_order(z), z.argmax(axis=-1), -1).astype(np.int64)


def top_k(logits: ArrayLike, k: int) -> tuple[Array, Ids]:
    """The k best logits and their ids, best first.

    >>> top_k([1.0, 3.0, 2.0, 3.0], k=3)
    (array([3., 3., 2.]), array([1, 3, 2]))
    """
    z = floats(logits)
    if not 0 <= k <= z.shape[-1]:
        raise ValueError(f"k must be in [0, {z.shape[-1]}]; got {k}")
    ids = descending_order(z)[..., :k]
    values = np.take_along_axis(z, ids, axis=-1)
    return values, np.where(_has_order(z)[..., None], ids, -1)


def rank(logits: ArrayLike, ids: ArrayLike) -> Ids:
    """How many words come before this one; 0 is the argmax. ids (...) or (..., K).

    >>> rank([1.0, 3.0, 2.0, 3.0], [1, 3, 2, 0])
    array([0, 1, 2, 3])
    """
    # The order lists the id at each rank; its inverse is the rank of each id.
    ranks = np.argsort(descending_order(logits), axis=-1)
    z = floats(logits)
    picked = np.take_along_axis(ranks, _as_columns(z, ids), axis=-1)
    picked = np.where(_has_order(z)[..., None], picked, -1)
    return picked.reshape(np.shape(ids)).astype(np.int64)


def _has_order(z: Array) -> NDArray[np.bool_]:
    """Whether a row has a best word: its maximum is a number."""
    return np.asarray(np.isfinite(z.max(axis=-1)))


def kl(logits_p: ArrayLike, logits_q: ArrayLike) -> Array:
    """KL divergence of q from p: KL(p‖q) = Σ_v p[v] (log p[v] - log q[v]), in nats.

    What it costs to believe q when p is true: 0 if they are equal, never negative. A word that p
    allows and q forbids costs +inf; a word that p forbids costs nothing.

    >>> print(kl([1, 2, 3], [11, 12, 13]).round(4) + 0)  # a shift is no difference
    0.0
    >>> print(kl([0, 0], [0, 1]).round(4))
    0.1201
    >>> print(kl([0, 0], [0, -np.inf]), kl([0, -np.inf], [0, 0]).round(4))
    inf 0.6931
    """
    p, gap = _kl_parts(logits_p, logits_q)
    return floats((p * gap).sum(axis=-1))


def kl_backward(grad: ArrayLike, logits_p: ArrayLike, logits_q: ArrayLike) -> tuple[Array, Array]:
    """Its gradients: ∂z_p[v] = ∂ · p[v] (log p[v] - log q[v] - KL),   ∂z_q = ∂ · (q - p).

    The second is p - y again: to follow p, q is trained as if p were soft targets. Words masked on
    a side get 0 on that side. Meant for a finite KL.

    >>> grad_p, grad_q = kl_backward(1.0, [0, 0], [0, 1])
    >>> grad_p.round(4), grad_q.round(4)
    (array([ 0.25, -0.25]), array([-0.2311,  0.2311]))
    """
    grad = floats(grad)[..., None]
    p, gap = _kl_parts(logits_p, logits_q)
    grad_p = grad * p * (gap - (p * gap).sum(axis=-1, keepdims=True))
    grad_q = grad * (softmax(logits_q) - p)
    return grad_p, np.where(np.isneginf(floats(logits_q)), 0.0, grad_q)


def _kl_parts(logits_p: ArrayLike, logits_q: ArrayLike) -> tuple[Array, Array]:
    """p, and log p - log q with 0 for words that p forbids."""
    log_p, log_q = log_softmax(logits_p), log_softmax(logits_q)
    forbidden = np.isneginf(log_p)
    return np.exp(log_p), np.where(forbidden, 0.0, log_p) - np.where(forbidden, 0.0, log_q)


def _zero_if_masked(log_p: Array) -> Array:
    """The log p, but 0 where p = 0, so that p · log p is 0 there."""
    return np.where(np.isneginf(log_p), 0.0, log_p)


def _as_columns(rows: Array, ids: ArrayLike) -> Ids:
    """The ids, (...) or (..., K), as (..., K), checked against rows (..., V)."""
    ids = ids_below(rows.shape[-1], ids)
    lead = rows.shape[:-1]
    if ids.shape == lead:
        return ids[..., None]
    if ids.shape[:-1] == lead:
        return ids
    raise ValueError(f"ids must have shape {lead} or {(*lead, 'K')}; got {ids.shape}")


def _take(rows: Array, ids: ArrayLike) -> Array:
    return np.take_along_axis(rows, _as_columns(rows, ids), axis=-1).reshape(np.shape(ids))
