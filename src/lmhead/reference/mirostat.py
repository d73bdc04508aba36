"""Chapter 13. Mirostat: a filter that steers itself towards a wanted surprise.

The surprise of a drawn word is -log2 p[v], in bits. Mirostat wants it to be τ on average. From word
to word it carries one number μ, the most surprise it allows, which starts at 2 τ. Each step it cuts
the words by μ, a word is drawn from those left, and μ moves against the error:

    μ <- μ - η · (surprise - τ)

Both versions are those of llama.cpp. The surprise is that of the cut and renormalised distribution.

>>> mu = 2 * 1.5  # τ = 1.5
>>> z = np.log2([0.5, 0.25, 0.125, 0.0625, 0.0625]) * np.log(2)
>>> cut = mirostat_2_filter(z, mu)  # at most 3 bits: three words stay
>>> print(np.isfinite(cut), mirostat_update(mu, cut, 0, tau=1.5, eta=0.1).round(3))
[ True  True  True False False] 3.069
"""

import numpy as np

from lmhead.reference.arrays import Array, ArrayLike, Ids, floats
from lmhead.reference.decoding import among_best, choosable
from lmhead.reference.queries import descending_order, log_prob
from lmhead.reference.softmax import log_softmax

__all__ = ["mirostat_1_filter", "mirostat_2_filter", "mirostat_k", "mirostat_update"]


def mirostat_1_filter(logits: ArrayLike, mu: ArrayLike, *, m: int = 100) -> Array:
    """Mirostat 1: top-k with the k of `mirostat_k`. mu is one number, or one per row (...).

    >>> mirostat_1_filter(np.log([1.0, 1 / 2, 1 / 3, 1 / 4]), 1.5).round(3)
    array([ 0.   , -0.693,   -inf,   -inf])
    """
    z = choosable(logits)
    rank = np.argsort(descending_order(z), axis=-1)
    return np.where(rank < mirostat_k(z, mu, m=m)[..., None], z, -np.inf)


def mirostat_k(logits: ArrayLike, mu: ArrayLike, *, m: int = 100) -> Ids:
    """How many words mirostat 1 keeps: k = ⌊((ŝ - 1) 2^μ / (1 - V^(1 - ŝ)))^(1/ŝ)⌋, 1 at least.

    It takes the words to follow Zipf's law, p of the i-th best ~ i^-s, and estimates s from the m
    best ones p_1 >= p_2 >= ..., as a line through the logs:

        ŝ = Σ_i t_i b_i / Σ_i t_i²,   t_i = log((i+1)/i),   b_i = log(p_i/p_{i+1}),   i = 1 .. m-1

    V is the whole vocabulary, words cut before it included; in ŝ only words not cut take part.
    Where ŝ = 1, (ŝ - 1) / (1 - V^(1 - ŝ)) has the limit 1 / log V. Where ŝ = 0, all words left are
    equal: k is all of them if 2^μ > V - 1, otherwise 1. k is V at most.

    >>> print(mirostat_k(np.log([1.0, 1 / 2, 1 / 3, 1 / 4]), 1.5))  # ŝ = 1: 2^1.5 / log 4 = 2.04
    2
    >>> print(mirostat_k([0.0, 0.0, 0.0], 1.1), mirostat_k([0.0, 0.0, 0.0], 0.9))
    3 1
    """
    z = choosable(logits)
    if m < 2:
        raise ValueError(f"m must be at least 2; got {m}")
    mu = np.broadcast_to(floats(mu), z.shape[:-1])
    if not np.isfinite(mu).all():
        raise ValueError(f"mu must be finite; got {mu}")
    rows = z.reshape(-1, z.shape[-1])
    k = [_k_of_row(row, float(mu_row), m) for row, mu_row in zip(rows, mu.reshape(-1), strict=True)]
    return np.asarray(k, dtype=np.int64).reshape(z.shape[:-1])


def _k_of_row(z: Array, mu: float, m: int) -> int:
    V = len(z)
    best_first = np.sort(z[np.isfinite(z)])[::-1][:m]
    if len(best_first) < 2 or V < 2:
        return 1
    i = np.arange(1, len(best_first))
    t, b = np.log((i + 1) / i), best_first[:-1] - best_first[1:]
    s = float((t * b).sum() / (t**2).sum())
    # In logs, since 2^μ and the power 1/ŝ may be too large for a number.
    s_log_k = _log_ratio(s - 1.0, float(np.log(V))) + mu * float(np.log(2))
    if s == 0:
        return V if s_log_k > 0 else 1
    log_k = min(s_log_k / s, float(np.log(V)) + 1.0)  # e V words are all words
    return min(max(int(np.exp(log_k)), 1), V)


def _log_ratio(e: float, log_v: float) -> float:
    """The log of e / (1 - V^-e)."""
    if e == 0:
        return float(-np.log(log_v))
    return float(np.log(e / -np.expm1(-e * log_v)))


def mirostat_2_filter(logits: ArrayLike, mu: ArrayLike) -> Array:
    """Mirostat 2: keep the words with surprise -log2 p[v] <= μ; the best word always stays.

    mu is one number, or one per row (...).

    >>> mirostat_2_filter(np.log([0.5, 0.3, 0.2]), 1.8).round(3)  # surprises 1, 1.74, 2.32
    array([-0.693, -1.204,   -inf])
    """
    z = choosable(logits)
    mu = np.broadcast_to(floats(mu), z.shape[:-1])[..., None]
    if not np.isfinite(mu).all():
        raise ValueError(f"mu must be finite; got {mu}")
    surprise = -log_softmax(z) / np.log(2)
    return np.where((surprise <= mu) | among_best(z, 1), z, -np.inf)


def mirostat_update(
    mu: ArrayLike, cut_logits: ArrayLike, token: ArrayLike, *, tau: float, eta: float
) -> Array:
    """The next μ: μ - η · (-log2 q[token] - τ), with q = softmax of the logits after the cut.

    Shapes: mu (...), cut_logits (..., V), token (...).

    >>> print(mirostat_update(10.0, [0.0, 0.0, -np.inf], 1, tau=5.0, eta=0.1))  # 1 bit, not 5
    10.4
    """
    z = choosable(cut_logits)
    surprise = -log_prob(z, token) / np.log(2)
    if not np.isfinite(surprise).all():
        raise ValueError("token must be a word that was not cut; one was")
    return floats(floats(mu) - eta * (surprise - tau))
