"""Chapter 8. Attention: a softmax that decides where to look.

Each position asks a question (query), and every position offers a label (key) and a message
(value). Dot products score how well a label fits the question, softmax turns the scores into
shares, and the answer is the average message by those shares:

    S = Q Kᵀ / √d        scores, (T, U)
    P = softmax(S)       one distribution over the U positions for each of the T questions
    Y = P V              the answers

The head of a language model is the same figure: one question, the hidden state; one label per word.
Without the √d, scores of d terms grow like √d, softmax saturates, and its gradient dies.
"""

import math
from typing import NamedTuple

import numpy as np

from lmhead.reference.arrays import Array, ArrayLike, floats
from lmhead.reference.softmax import softmax, softmax_backward

__all__ = ["AttentionGrads", "attention", "attention_backward", "attention_weights", "causal_mask"]


def causal_mask(length: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which positions may be seen: mask[t, u] = (u <= t), never a later one.

    >>> causal_mask(3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """
    return np.tril(np.ones((length, length), dtype=np.bool_))


def attention_weights(query: ArrayLike, key: ArrayLike, mask: ArrayLike | None = None) -> Array:
    """Shares of attention: P = softmax(Q Kᵀ / √d). Shapes: (..., T, d), (..., U, d) to (..., T, U).

    `mask` (..., T, U) is true where looking is allowed; elsewhere the score is -inf and the share
    is 0. A question that may look nowhere gets shares of 0, as in torch.

    >>> attention_weights([[1.0], [1.0]], [[0.0], [math.log(3)]], causal_mask(2))
    array([[1.  , 0.  ],
           [0.25, 0.75]])
    """
    query, key = floats(query), floats(key)
    scores = query @ np.swapaxes(key, -1, -2) / math.sqrt(query.shape[-1])
    if mask is None:
        return softmax(scores)
    allowed = np.broadcast_to(np.asarray(mask, dtype=np.bool_), scores.shape)
    somewhere = allowed.any(axis=-1, keepdims=True)
    shares = softmax(np.where(allowed | ~somewhere, scores, -np.inf))
    return np.where(somewhere, shares, 0.0)


def attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, mask: ArrayLike | None = None
) -> Array:
    """The answers: Y = softmax(Q Kᵀ / √d) V. Shapes: value (..., U, e), answer (..., T, e).

    >>> attention([[1.0], [1.0]], [[0.0], [math.log(3)]], [[10.0], [20.0]], causal_mask(2))
    array([[10. ],
           [17.5]])
    """
    return attention_weights(query, key, mask) @ floats(value)


class AttentionGrads(NamedTuple):
    """∂loss/∂Q, ∂loss/∂K and ∂loss/∂V."""

    query: Array
    key: Array
    value: Array


def attention_backward(
    grad_y: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    mask: ArrayLike | None = None,
) -> AttentionGrads:
    """Gradients, the chain rule from the end.

        ∂V = Pᵀ ∂Y                      a message hears from all that looked at it, by their shares
        ∂P = ∂Y Vᵀ
        ∂S = P ⊙ (∂P - Σ_u ∂P P)        the softmax of chapter 2; masked pairs have P = 0, so ∂S = 0
        ∂Q = ∂S K / √d,   ∂K = ∂Sᵀ Q / √d

    >>> grads = attention_backward([[1.0]], [[1.0]], [[0.0], [0.0]], [[10.0], [20.0]])
    >>> grads.value.T, grads.key.T
    (array([[0.5, 0.5]]), array([[-2.5,  2.5]]))
    """
    grad_y, query, key, value = floats(grad_y), floats(query), floats(key), floats(value)
    p = attention_weights(query, key, mask)
    grad_scores = softmax_backward(grad_y @ np.swapaxes(value, -1, -2), p)
    grad_scores = grad_scores / math.sqrt(query.shape[-1])
    return AttentionGrads(
        query=grad_scores @ key,
        key=np.swapaxes(grad_scores, -1, -2) @ query,
        value=np.swapaxes(p, -1, -2) @ grad_y,
    )
