"""Chapter 10. Decoding: from logits to one word.

Greedy takes the best word. Sampling draws a word from p, so that the same question may get
different answers. Filters first strike out words that should not be drawn at all; a word struck out
gets the logit -inf, and softmax shares its probability among those that stay.

Nothing here holds a random generator. Randomness comes in as uniform numbers, so every function is
a plain function, and the same numbers give the same word.

Where there is nothing to choose by (a NaN in the row, or every word masked) there is no right word,
and a `ValueError` says so. Picking word 0 in silence would be a lie.
"""

import numpy as np
from numpy.typing import NDArray

from lmhead.reference.arrays import Array, ArrayLike, Ids, floats
from lmhead.reference.queries import argmax, descending_order
from lmhead.reference.softmax import softmax

__all__ = [
    "greedy",
    "gumbel",
    "min_p_filter",
    "sample_gumbel",
    "sample_inverse_cdf",
    "top_k_filter",
    "top_p_filter",
]


def greedy(logits: ArrayLike) -> Ids:
    """The best word: argmax_v z[v], ties to the lowest id.

    It equals argmax_v p[v]: p[v] = e^z[v] / Σ, where e^z grows with z and Σ is the same for all.
    So greedy decoding needs no softmax. Nor does any temperature change it.

    >>> print(greedy([1.0, 3.0, 2.0]), greedy(softmax([1.0, 3.0, 2.0], temperature=0.1)))
    1 1
    """
    return argmax(choosable(logits))


def sample_inverse_cdf(p: ArrayLike, u: ArrayLike) -> Ids:
    """A draw from p: the first v with p[0] + ... + p[v] > u, where u is uniform in [0, 1).

    Lay the probabilities end to end on a line of length 1, and throw a dart. A word of probability
    0 has no length, so it is never hit, not even by u = 0. Shapes: p (..., V), u (...).

    >>> print([int(sample_inverse_cdf([0.0, 0.5, 0.2, 0.3], u)) for u in (0.0, 0.49, 0.5, 0.99)])
    [1, 1, 2, 3]
    """
    ends = floats(p).cumsum(axis=-1)
    length = ends[..., -1]  # 1, but for a rounding error
    if not (np.isfinite(length) & (length > 0)).all():
        raise ValueError("p must be finite and have a sum above 0 in every row; one has not")
    dart = floats(u) * length
    return np.asarray((ends > dart[..., None]).argmax(axis=-1), dtype=np.int64)


def gumbel(u: ArrayLike) -> Array:
    """Gumbel noise: g = -log(-log u), where u is uniform in (0, 1).

    >>> gumbel([np.exp(-1), 0.9]).round(4) + 0
    array([0.    , 2.2504])
    """
    return -np.log(-np.log(floats(u)))


def sample_gumbel(logits: ArrayLike, u: ArrayLike) -> Ids:
    """A draw from softmax(z): argmax_v (z[v] + g[v]), one noise g = -log(-log u[v]) per word.

    The winner of this noisy race is word v with probability exactly softmax(z)[v], though no
    softmax was computed. Shapes: z (..., V), u (..., V).

    >>> print(sample_gumbel([1.0, 3.0, 2.0], [0.5, 0.5, 0.5]))  # equal luck: the best word
    1
    >>> print(sample_gumbel([1.0, 3.0, 2.0], [0.5, 0.5, 0.9]))
    2
    """
    return argmax(choosable(logits) + gumbel(u))


def top_k_filter(logits: ArrayLike, k: int, *, min_tokens_to_keep: int = 1) -> Array:
    """Top-k: keep the k best words, exactly k even if some tie (the lowest ids stay).

    Every filter keeps its `min_tokens_to_keep` best words, come what may; here, k or that many.

    >>> top_k_filter([1.0, 3.0, 2.0, 2.0], k=2)
    array([-inf,   3.,   2., -inf])
    """
    z = choosable(logits)
    if k < 1:
        raise ValueError(f"k must be at least 1; got {k}")
    return np.where(among_best(z, max(k, min_tokens_to_keep)), z, -np.inf)


def top_p_filter(logits: ArrayLike, top_p: float, *, min_tokens_to_keep: int = 1) -> Array:
    """Top-p (nucleus): best words first, keep them until their probabilities reach top_p.

    A word stays if the words before it sum to less than top_p. The best word always stays.

    >>> z = np.log([0.5, 0.25, 0.125, 0.125])
    >>> [int(np.isfinite(top_p_filter(z, top_p)).sum()) for top_p in (0.0, 0.5, 0.51, 0.75, 1.0)]
    [1, 1, 2, 2, 4]
    """
    z = choosable(logits)
    if not 0.0 <= top_p <= 1.0:
        raise ValueError(f"top_p must be in [0, 1]; got {top_p}")
    if top_p == 1.0:  # all of it, though rounding may reach 1 before the last word
        return z.copy()
    order = descending_order(z)
    p = np.take_along_axis(softmax(z), order, axis=-1)
    before = np.zeros_like(p)
    before[..., 1:] = p.cumsum(axis=-1)[..., :-1]
    stays = np.zeros(z.shape, dtype=np.bool_)
    np.put_along_axis(stays, order, before < top_p, axis=-1)
    return np.where(stays | among_best(z, min_tokens_to_keep), z, -np.inf)


def min_p_filter(logits: ArrayLike, min_p: float, *, min_tokens_to_keep: int = 1) -> Array:
    """Min-p: keep the words with p[v] >= min_p · max p.

    Where the model is sure, few words stay; where it is not, many. Since p[v] / max p is
    e^(z[v] - max z), this needs the maximum but not the sum.

    >>> min_p_filter(np.log([0.5, 0.25, 0.125, 0.125]), 0.3).round(3)
    array([-0.693, -1.386,   -inf,   -inf])
    """
    z = choosable(logits)
    if not 0.0 <= min_p <= 1.0:
        raise ValueError(f"min_p must be in [0, 1]; got {min_p}")
    best: Array = z.max(axis=-1, keepdims=True)
    stays = np.exp(z - best) >= min_p
    return np.where(stays | among_best(z, min_tokens_to_keep), z, -np.inf)


def among_best(z: Array, count: int) -> NDArray[np.bool_]:
    """Whether a word is one of the `count` best of its row: `min_tokens_to_keep` of all filters.

    >>> among_best(np.array([1.0, 3.0, 2.0, 2.0]), 2)
    array([False,  True,  True, False])
    """
    if count < 1:
        raise ValueError(f"min_tokens_to_keep must be at least 1; got {count}")
    rank = np.argsort(descending_order(z), axis=-1)
    return np.asarray(rank < count)


def choosable(logits: ArrayLike) -> Array:
    """The logits, once every row has a largest one that is a number; else a `ValueError`.

    >>> choosable([[0.0, 1.0], [-np.inf, -np.inf]])
    Traceback (most recent call last):
    ...
    ValueError: logits must have a finite maximum; got -inf in row 1
    """
    z = floats(logits)
    best = np.atleast_1d(z.max(axis=-1)).reshape(-1)
    if not np.isfinite(best).all():
        row = int(np.flatnonzero(~np.isfinite(best))[0])
        raise ValueError(f"logits must have a finite maximum; got {best[row]} in row {row}")
    return z
