"""Chapter 19. How far two distributions are apart: forward and reverse KL, Jensen-Shannon, total
variation. A student that imitates a teacher makes one of them small.

p is the teacher, q the student; shapes: logits (..., V), answers (...). 0 · log 0 = 0 throughout.
"""

import numpy as np

from lmhead.reference.arrays import Array, ArrayLike, floats
from lmhead.reference.queries import descending_order
from lmhead.reference.softmax import log_softmax

__all__ = ["divergence", "divergence_backward", "merge_tail"]


def divergence(
    logits_p: ArrayLike, logits_q: ArrayLike, kind: str = "kl", beta: float = 0.5
) -> Array:
    """Distance of two distributions, of one of four kinds, in nats (tvd: in probability).

        kl            Σ p log(p/q): what it costs to believe q when p is true
        reverse_kl    Σ q log(q/p): the other way round; forgives q a word that it ignores
        jsd           β KL(p‖m) + (1-β) KL(q‖m), m = β p + (1-β) q: never infinite
        tvd           Σ |p - q| / 2: the largest difference in the probability of any set of words

    >>> p, q = [0, 0], [0, 1]
    >>> [float(divergence(p, q, kind).round(4)) for kind in ("kl", "reverse_kl", "jsd", "tvd")]
    [0.1201, 0.1109, 0.0285, 0.2311]
    """
    log_p, log_q = log_softmax(logits_p), log_softmax(logits_q)
    a_p, a_q, share = _terms(log_p, log_q, kind, beta)
    sums = a_p.sum(axis=-1), a_q.sum(axis=-1)
    return floats(share[0] * sums[0] + share[1] * sums[1])


def divergence_backward(
    grad: ArrayLike, logits_p: ArrayLike, logits_q: ArrayLike, kind: str = "kl", beta: float = 0.5
) -> tuple[Array, Array]:
    """Its gradients: ∂z_p = ∂ · (A_p - p Σ A_p) and ∂z_q = ∂ · (A_q - q Σ A_q), with A = p ∂D/∂p.

        kind          A_p                A_q
        kl            p log(p/q)         -p
        reverse_kl    -q                 q log(q/p)
        jsd           β p log(p/m)       (1-β) q log(q/m)
        tvd           p sign(p-q) / 2    q sign(q-p) / 2

    >>> divergence_backward(1.0, [0, 0], [0, 1], "kl")[1].round(4)  # q - p
    array([-0.2311,  0.2311])
    """
    log_p, log_q = log_softmax(logits_p), log_softmax(logits_q)
    a_p, a_q, _ = _terms(log_p, log_q, kind, beta)
    grad = floats(grad)[..., None]
    return (
        grad * (a_p - np.exp(log_p) * a_p.sum(axis=-1, keepdims=True)),
        grad * (a_q - np.exp(log_q) * a_q.sum(axis=-1, keepdims=True)),
    )


def merge_tail(logits_p: ArrayLike, logits_q: ArrayLike, k: int) -> tuple[Array, Array]:
    """Log-probabilities of the k best words of p, and of all others together: (..., k + 1) each.

    >>> log_p, log_q = merge_tail([0, 1, 2], [2, 1, 0], k=1)
    >>> np.exp(log_p).round(3), np.exp(log_q).round(3)
    (array([0.665, 0.335]), array([0.09, 0.91]))
    """
    order = descending_order(logits_p)

    def merged(logits: ArrayLike) -> Array:
        p = np.take_along_axis(np.exp(log_softmax(logits)), order, axis=-1)
        both = np.concatenate([p[..., :k], p[..., k:].sum(axis=-1, keepdims=True)], axis=-1)
        with np.errstate(divide="ignore"):
            return floats(np.log(both))

    return merged(logits_p), merged(logits_q)


def _terms(
    log_p: Array, log_q: Array, kind: str, beta: float
) -> tuple[Array, Array, tuple[int, int]]:
    """A_p, A_q, and how often the sum of each is part of the divergence."""
    p, q = np.exp(log_p), np.exp(log_q)
    if kind == "kl":
        return _weighted_gap(p, log_p, log_q), -p, (1, 0)
    if kind == "reverse_kl":
        return -q, _weighted_gap(q, log_q, log_p), (0, 1)
    if kind == "tvd":
        return p * np.sign(p - q) / 2, q * np.sign(q - p) / 2, (1, 1)
    log_m = np.logaddexp(log_p + np.log(beta), log_q + np.log1p(-beta))
    a_p = beta * _weighted_gap(p, log_p, log_m)
    return a_p, (1 - beta) * _weighted_gap(q, log_q, log_m), (1, 1)


def _weighted_gap(p: Array, log_p: Array, log_q: Array) -> Array:
    """p (log p - log q), 0 where p is 0."""
    none = np.isneginf(log_p)
    return floats(p * (np.where(none, 0.0, log_p) - np.where(none, 0.0, log_q)))
