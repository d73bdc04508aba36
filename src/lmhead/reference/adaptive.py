"""Chapter 17. Adaptive softmax: frequent words in full width, rare ones in clusters.

Most tokens of a text are a few thousand words. Give these, the shortlist, a softmax of their own,
with one more entry for each cluster of rarer words. A rare word takes two steps, first its cluster,
then the word among the words of the cluster, scored on a hidden state of fewer dimensions:

    log p(v) = log softmax(W₀ h + b₀)[v]                                     in the shortlist
    log p(v) = log softmax(W₀ h + b₀)[S + c] + log softmax(W_c P_c h + b_c)[v]   in cluster c

S words are in the shortlist. Words are numbered by frequency here: the shortlist first, then the
clusters. Each softmax sums to 1, so a cluster's words sum to the cluster's entry, and all words
to 1.

The gradient of a loss goes back through two softmaxes instead of one: the head's entry of a
cluster receives what all words of the cluster receive together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lmhead.reference.arrays import Array, ArrayLike, floats
from lmhead.reference.linear import linear, linear_backward
from lmhead.reference.softmax import log_softmax, log_softmax_backward

__all__ = ["AdaptiveGrads", "Cluster", "adaptive_log_probs", "adaptive_log_probs_backward"]


class Cluster(NamedTuple):
    """The parameters of a cluster: projection (D_c, D), weight (V_c, D_c), bias (V_c,) or None."""

    projection: ArrayLike
    weight: ArrayLike
    bias: ArrayLike | None = None


class AdaptiveGrads(NamedTuple):
    """Gradients with the shapes of what they belong to."""

    hidden: Array
    head_weight: Array
    head_bias: Array
    clusters: tuple[Cluster, ...]


def adaptive_log_probs(
    hidden: ArrayLike,
    head_weight: ArrayLike,
    clusters: Sequence[Cluster],
    head_bias: ArrayLike | None = None,
) -> Array:
    """Log p of all words: (N, D) gives (N, V).

    Shapes: hidden (N, D), head_weight (S + C, D), one row per cluster at the end.

    >>> clusters = [Cluster(projection=[[1.0, 0.0]], weight=[[1.0], [2.0]])]
    >>> log_p = adaptive_log_probs([[0.0, 0.0]], np.zeros((3, 2)), clusters)
    >>> np.exp(log_p).round(4)  # two words of the shortlist, and two that share a third
    array([[0.3333, 0.3333, 0.1667, 0.1667]])
    """
    hidden = floats(hidden)
    head = log_softmax(linear(hidden, floats(head_weight), head_bias))
    short = head.shape[1] - len(clusters)
    parts = [head[:, :short]]
    for c, (projection, weight, bias) in enumerate(clusters):
        inside = log_softmax(linear(hidden @ floats(projection).T, floats(weight), bias))
        parts.append(head[:, short + c, None] + inside)
    return np.concatenate(parts, axis=1)


def adaptive_log_probs_backward(
    grad: ArrayLike,
    hidden: ArrayLike,
    head_weight: ArrayLike,
    clusters: Sequence[Cluster],
    head_bias: ArrayLike | None = None,
) -> AdaptiveGrads:
    """Gradients, given those of the log-probabilities, (N, V).

    In the head, an entry of the shortlist receives its word's gradient, and a cluster's entry the
    sum over its words. In a cluster, a softmax and two linear layers are undone in turn.

    >>> clusters = [Cluster(projection=[[1.0, 0.0]], weight=[[1.0], [2.0]])]
    >>> grads = adaptive_log_probs_backward(
    ...     [[0.0, 0.0, 0.0, 1.0]], [[1.0, 1.0]], np.zeros((3, 2)), clusters
    ... )
    >>> grads.head_bias.round(4)  # y - p of the head: the word is in the cluster
    array([-0.3333, -0.3333,  0.6667])
    """
    grad, hidden, head_weight = floats(grad), floats(hidden), floats(head_weight)
    head_logits = linear(hidden, head_weight, head_bias)
    short = head_logits.shape[1] - len(clusters)
    grad_head = [grad[:, :short]]
    grad_hidden = np.zeros_like(hidden)
    grad_clusters = []
    start = short
    for projection, weight, bias in clusters:
        projection, weight = floats(projection), floats(weight)
        cluster_grad = grad[:, start : start + len(weight)]
        start += len(weight)
        grad_head.append(cluster_grad.sum(axis=1, keepdims=True))
        narrow = hidden @ projection.T
        grad_logits = log_softmax_backward(cluster_grad, log_softmax(linear(narrow, weight, bias)))
        inner = linear_backward(grad_logits, narrow, weight)
        outer = linear_backward(inner.x, hidden, projection)
        grad_hidden += outer.x
        grad_clusters.append(Cluster(outer.weight, inner.weight, inner.bias))
    grad_logits = log_softmax_backward(np.concatenate(grad_head, axis=1), log_softmax(head_logits))
    head = linear_backward(grad_logits, hidden, head_weight)
    return AdaptiveGrads(grad_hidden + head.x, head.weight, head.bias, tuple(grad_clusters))
