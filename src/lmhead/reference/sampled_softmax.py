"""Chapter 18. Sampled losses: learn from the target and a few random words.

The loss of a softmax has a sum over all words. Draw K words from a distribution q instead, the
negatives, and correct every score by how often its word is expected among them:

    s(w) = z(w) - log(K q(w))

A word that is drawn ten times as often has ten times as many chances to be pushed down: without the
correction the model would learn p / q instead of p.

    sampled softmax     loss = -log( e^s(y) / (e^s(y) + Σ_j e^s(w_j)) )
                        a softmax over the few; negatives that happen to be y are left out
    noise contrastive   loss = -log σ(s(y)) - Σ_j log σ(-s(w_j))
                        which word is data, which is noise? K + 1 yes-or-no questions

Both gradients are p - y once more, over the K + 1 words that were scored.
"""

from typing import NamedTuple

import numpy as np

from lmhead.reference.arrays import Array, ArrayLike, Ids, floats, ids_below
from lmhead.reference.linear import sigmoid
from lmhead.reference.softmax import log_softmax

__all__ = [
    "SampledGrads",
    "log_uniform",
    "noise_contrastive",
    "noise_contrastive_backward",
    "sampled_softmax",
    "sampled_softmax_backward",
]


class SampledGrads(NamedTuple):
    """∂loss/∂h (N, D) and ∂loss/∂W (V, D)."""

    hidden: Array
    weight: Array


def log_uniform(vocab_size: int) -> Array:
    """q(r) = log((r + 2) / (r + 1)) / log(V + 1): Zipf's law with a sum that is known.

    Words are numbered by frequency. The sum telescopes: log(2/1) + log(3/2) + … = log(V + 1).

    >>> log_uniform(3).round(4)
    array([0.5   , 0.2925, 0.2075])
    """
    rank = np.arange(vocab_size)
    return floats(np.log((rank + 2) / (rank + 1)) / np.log(vocab_size + 1))


def sampled_softmax(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    negatives: ArrayLike,
    q: ArrayLike,
    *,
    remove_hits: bool = True,
) -> Array:
    """The loss of each row: (N, D), (V, D), (N,), (K,) and (V,) give (N,).

    >>> sampled_softmax([[0.0]], [[1.0], [1.0], [1.0]], [0], [1, 2], np.full(3, 1 / 3)).round(4)
    array([1.0986])
    """
    scores, _ = _scores(hidden, weight, targets, negatives, q, remove_hits)
    loss: Array = -log_softmax(scores)[:, 0]
    return loss


def sampled_softmax_backward(
    grad: ArrayLike,
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    negatives: ArrayLike,
    q: ArrayLike,
    *,
    remove_hits: bool = True,
) -> SampledGrads:
    """Gradients: ∂s = p - y over the words that were scored, y being the first of them.

    >>> grads = sampled_softmax_backward(
    ...     [1.0], [[1.0]], [[0.0], [0.0], [0.0], [0.0]], [0], [1, 2], np.full(4, 1 / 4)
    ... )
    >>> grads.weight[:, 0].round(4)  # the last word was not drawn
    array([-0.6667,  0.3333,  0.3333,  0.    ])
    """
    scores, words = _scores(hidden, weight, targets, negatives, q, remove_hits)
    grad_scores = np.exp(log_softmax(scores))
    grad_scores[:, 0] -= 1
    return _backward(floats(grad)[:, None] * grad_scores, hidden, weight, words)


def noise_contrastive(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    negatives: ArrayLike,
    q: ArrayLike,
    *,
    remove_hits: bool = False,
) -> Array:
    """The loss of each row: (N, D), (V, D), (N,), (K,) and (V,) give (N,).

    >>> noise_contrastive([[0.0]], [[1.0], [1.0]], [0], [1, 1], [0.5, 0.5]).round(4)  # 3 coins
    array([2.0794])
    """
    scores, _ = _scores(hidden, weight, targets, negatives, q, remove_hits)
    # -log σ(a) = log(1 + e^-a)
    loss: Array = np.logaddexp(0, -scores[:, 0]) + np.logaddexp(0, scores[:, 1:]).sum(axis=1)
    return loss


def noise_contrastive_backward(
    grad: ArrayLike,
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    negatives: ArrayLike,
    q: ArrayLike,
    *,
    remove_hits: bool = False,
) -> SampledGrads:
    """Gradients: ∂s = σ(s) - y at each of the K + 1 questions.

    >>> grads = noise_contrastive_backward([1.0], [[1.0]], [[0.0], [0.0]], [0], [1], [0.5, 0.5])
    >>> grads.weight.round(4)
    array([[-0.3333],
           [ 0.6667]])
    """
    scores, words = _scores(hidden, weight, targets, negatives, q, remove_hits)
    grad_scores = np.where(scores == -np.inf, 0.0, sigmoid(scores))
    grad_scores[:, 0] -= 1
    return _backward(floats(grad)[:, None] * grad_scores, hidden, weight, words)


def _scores(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    negatives: ArrayLike,
    q: ArrayLike,
    remove_hits: bool,
) -> tuple[Array, Ids]:
    """s of the target and the negatives, (N, 1 + K), and which words they are."""
    hidden, weight, q = floats(hidden), floats(weight), floats(q)
    targets = ids_below(len(weight), targets, name="targets")
    negatives = ids_below(len(weight), negatives, name="negatives")
    others = np.broadcast_to(negatives, (len(targets), len(negatives)))
    words = np.concatenate([targets[:, None], others], axis=1)
    z = np.einsum("nd,nkd->nk", hidden, weight[words])
    scores: Array = z - np.log(len(negatives) * q)[words]
    if remove_hits:
        scores[:, 1:] = np.where(others == targets[:, None], -np.inf, scores[:, 1:])
    return scores, words


def _backward(grad_scores: Array, hidden: ArrayLike, weight: ArrayLike, words: Ids) -> SampledGrads:
    """From scores to what made them; a word that was scored often adds up."""
    hidden, weight = floats(hidden), floats(weight)
    grad_weight = np.zeros_like(weight)
    np.add.at(grad_weight, words, grad_scores[:, :, None] * hidden[:, None, :])
    return SampledGrads(np.einsum("nk,nkd->nd", grad_scores, weight[words]), grad_weight)
