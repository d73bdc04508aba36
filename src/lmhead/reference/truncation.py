"""Chapter 12. Truncation: more ways to choose which words may be drawn.

Chapter 10 has top-k, top-p and min-p. Here are the others: temperature, which cuts nothing but
decides how even the odds are; filters by entropy (top-h, typical, eta), by a plain floor (epsilon),
by the spread of the logits (top-n-sigma); and XTC, which strikes out the *best* words.

Logits (..., V) in, logits (..., V) out; a word cut gets -inf, and a word cut before stays cut and
counts as probability 0. Ties go to the lowest id. Where there is nothing to choose by, a
`ValueError` says so, as in chapter 10.
"""

import numpy as np

from lmhead.reference.arrays import Array, ArrayLike, floats
from lmhead.reference.decoding import among_best, choosable, top_k_filter
from lmhead.reference.queries import descending_order, entropy
from lmhead.reference.softmax import log_softmax, softmax

__all__ = [
    "dynamic_temperature",
    "epsilon_filter",
    "eta_filter",
    "temperature_scale",
    "top_h_filter",
    "top_n_sigma_filter",
    "typical_filter",
    "xtc_filter",
]


def temperature_scale(logits: ArrayLike, temperature: ArrayLike) -> Array:
    """Temperature: z / T. One T for all, or one per row (...).

    T < 1 sharpens, T > 1 flattens. T = 0 is the limit: only the best word stays, its logit as it
    was.

    >>> temperature_scale([1.0, 3.0, -np.inf], 0.5)
    array([  2.,   6., -inf])
    >>> temperature_scale([1.0, 3.0, 3.0], 0)
    array([-inf,   3., -inf])
    """
    z = choosable(logits)
    t = floats(temperature)
    if not (np.isfinite(t) & (t >= 0)).all():
        raise ValueError(f"temperature must be finite and at least 0; got {t}")
    t = np.broadcast_to(t, z.shape[:-1])[..., None]
    return np.where(t > 0, z / np.where(t > 0, t, 1.0), top_k_filter(z, 1))


def dynamic_temperature(
    logits: ArrayLike, temperature: float, dynatemp_range: float, dynatemp_exponent: float = 1.0
) -> Array:
    """Dynamic temperature: z / T(H), where T grows with the entropy H of the row.

        T(H) = low + (high - low) · (H / log n)^exponent
        low = max(0, temperature - range),   high = temperature + range

    n is the number of words not cut yet, so H / log n is in [0, 1]: 0 for a certain row, which gets
    the low temperature, 1 for an even one, which gets the high. A row of one word is left alone.
    Without a range this is `temperature_scale`. As in llama.cpp, except that a word some filter set
    to -inf never counts in n.

    >>> dynamic_temperature([1.0, 1.0, -np.inf], 1.0, 0.5)  # even: T = 1.5
    array([0.66666667, 0.66666667,       -inf])
    >>> dynamic_temperature([0.0, 900.0], 1.0, 0.5)  # certain: T = 0.5
    array([   0., 1800.])
    """
    z = choosable(logits)
    if not 0 <= dynatemp_range < np.inf:
        raise ValueError(f"dynatemp_range must be finite and at least 0; got {dynatemp_range}")
    if not 0 < dynatemp_exponent < np.inf:
        raise ValueError(f"dynatemp_exponent must be finite and above 0; got {dynatemp_exponent}")
    if dynatemp_range == 0:
        return temperature_scale(z, temperature)
    low, high = max(0.0, temperature - dynatemp_range), temperature + dynatemp_range
    n = np.isfinite(z).sum(axis=-1)
    evenness = entropy(z) / np.log(np.maximum(n, 2))
    t = low + (high - low) * evenness**dynatemp_exponent
    return temperature_scale(z, np.where(n > 1, t, 1.0))


def top_h_filter(logits: ArrayLike, top_h: float, *, top_n: int = 100) -> Array:
    """Top-h: best words first, keep them while their part of the entropy is at most top_h · H.

        keep v if Σ_{w up to and with v} -p[w] log p[w] <= top_h · H,   H = -Σ_w p[w] log p[w]

    p is the softmax over the `top_n` best words alone; all others are cut. The best word always
    stays, a word whose p is rounded to 0 never, and top_h = 1 keeps every other one of the top_n.
    As `TopHLogitsWarper` of Hugging Face, where top_n is 100.

    >>> p = [0.5, 0.25, 0.125, 0.125]  # the parts of H in bits: 0.5, 0.5, 0.375, 0.375
    >>> [int(np.isfinite(top_h_filter(np.log(p), h)).sum()) for h in (0.1, 0.58, 0.79, 1.0)]
    [1, 2, 3, 4]
    """
    z = choosable(logits)
    if not 0.0 < top_h <= 1.0:
        raise ValueError(f"top_h must be in (0, 1]; got {top_h}")
    top = top_k_filter(z, top_n)
    order = descending_order(top)
    log_p = np.take_along_axis(log_softmax(top), order, axis=-1)
    p = np.exp(log_p)
    part = -p * np.where(p > 0, log_p, 0.0)
    total: Array = part.sum(axis=-1, keepdims=True)
    stays = (part.cumsum(axis=-1) <= top_h * total) | (top_h == 1.0)
    stays &= p > 0
    stays[..., 0] = True
    return np.where(_back_to_ids(stays, order), z, -np.inf)


def typical_filter(logits: ArrayLike, typical_p: float, *, min_tokens_to_keep: int = 1) -> Array:
    """Typical: keep the words whose surprise is nearest to the expected one, up to typical_p.

    Surprise is -log p[v]; expected is its mean, the entropy H. Words in the order of
    |-log p[v] - H|, smallest first: a word stays if those before it sum to less than typical_p. So
    the best word may go. `min_tokens_to_keep` counts in the same order.

    As `TypicalLogitsWarper` of Hugging Face, but of words equally near, the lowest ids stay where
    Hugging Face keeps them all.

    >>> z = np.log([0.9, 0.04, 0.03, 0.03])  # H = 0.434; surprises 0.105, 3.219, 3.507, 3.507
    >>> np.flatnonzero(np.isfinite(typical_filter(z, 0.8)))
    array([0])
    >>> z = np.log([0.4, 0.2, 0.2, 0.2])  # H = 1.332; surprises 0.916, 1.609, 1.609, 1.609
    >>> np.flatnonzero(np.isfinite(typical_filter(z, 0.5)))
    array([1, 2, 3])
    """
    z = choosable(logits)
    if not 0.0 < typical_p <= 1.0:
        raise ValueError(f"typical_p must be in (0, 1]; got {typical_p}")
    if typical_p == 1.0:  # all of it, though rounding may reach 1 before the last word
        return z.copy()
    log_p = log_softmax(z)
    distance = np.abs(-log_p - entropy(z)[..., None])
    order = descending_order(-distance)
    p = np.take_along_axis(np.exp(log_p), order, axis=-1)
    before = np.zeros_like(p)
    before[..., 1:] = p.cumsum(axis=-1)[..., :-1]
    stays = _back_to_ids(before < typical_p, order)
    return np.where(stays | among_best(-distance, min_tokens_to_keep), z, -np.inf)


def epsilon_filter(logits: ArrayLike, epsilon: float, *, min_tokens_to_keep: int = 1) -> Array:
    """Epsilon: keep the words with p[v] >= epsilon.

    >>> epsilon_filter(np.log([0.5, 0.25, 0.125, 0.125]), 0.2).round(3)
    array([-0.693, -1.386,   -inf,   -inf])
    """
    z = choosable(logits)
    if not 0.0 <= epsilon < 1.0:
        raise ValueError(f"epsilon must be in [0, 1); got {epsilon}")
    stays = softmax(z) >= epsilon
    return np.where(stays | among_best(z, min_tokens_to_keep), z, -np.inf)


def eta_filter(logits: ArrayLike, epsilon: float, *, min_tokens_to_keep: int = 1) -> Array:
    """Eta: keep the words with p[v] >= η, where η = min(epsilon, √epsilon · e^-H).

    A floor as in epsilon, but lower where the entropy H is high: in an even row many words are
    rare, and none of them is wrong. Hugging Face calls this epsilon `eta_cutoff`.

    >>> z = np.log([0.7, 0.2, 0.1])  # H = 0.802, e^-H = 0.449
    >>> [int(np.isfinite(eta_filter(z, e)).sum()) for e in (0.04, 0.09, 0.25)]  # η 0.04, 0.09, 0.22
    [3, 3, 1]
    """
    z = choosable(logits)
    if not 0.0 <= epsilon < 1.0:
        raise ValueError(f"epsilon must be in [0, 1); got {epsilon}")
    eta = np.minimum(epsilon, np.sqrt(epsilon) * np.exp(-entropy(z)))[..., None]
    return np.where((softmax(z) >= eta) | among_best(z, min_tokens_to_keep), z, -np.inf)


def top_n_sigma_filter(logits: ArrayLike, n: float) -> Array:
    """Top-n-sigma: keep the words with z[v] >= max z - n · σ.

    σ = √(Σ (z[v] - mean)² / count), over the words not cut yet. It looks at logits, not at
    probabilities, so a temperature before or after it keeps the same words. (llama.cpp takes n <= 0
    to mean "off"; here n must be above 0.)

    >>> top_n_sigma_filter([0.0, 2.0, 4.0, -np.inf], 1.5)  # σ = √(8/3) = 1.63, the floor is 1.55
    array([-inf,   2.,   4., -inf])
    """
    z = choosable(logits)
    if not n > 0:
        raise ValueError(f"n must be above 0; got {n}")
    alive = np.isfinite(z)
    count = alive.sum(axis=-1, keepdims=True)
    mean = np.where(alive, z, 0.0).sum(axis=-1, keepdims=True) / count
    off = np.where(alive, z, mean) - mean
    sigma = np.sqrt((off**2).sum(axis=-1, keepdims=True) / count)
    best: Array = z.max(axis=-1, keepdims=True)
    return np.where(z >= best - n * sigma, z, -np.inf)


def xtc_filter(
    logits: ArrayLike,
    u: ArrayLike,
    *,
    probability: float,
    threshold: float,
    min_tokens_to_keep: int = 1,
) -> Array:
    """XTC, exclude top choices: of the words with p[v] >= threshold, keep only the last.

    It happens if the coin u (...), uniform in [0, 1), is below `probability`; otherwise all stays.
    The last is the least probable of them, of equal ones that with the highest id. Words under the
    threshold stay. Where fewer than two reach it nothing is cut, so no threshold above 1/2 cuts
    anything; nor is a row cut that would be left with fewer than `min_tokens_to_keep` words. As in
    llama.cpp.

    >>> z = np.log([0.4, 0.3, 0.2, 0.1])
    >>> xtc_filter(z, 0.49, probability=0.5, threshold=0.2).round(3)
    array([  -inf,   -inf, -1.609, -2.303])
    >>> np.isfinite(xtc_filter(z, 0.5, probability=0.5, threshold=0.2))
    array([ True,  True,  True,  True])
    """
    z = choosable(logits)
    for name, value in (("probability", probability), ("threshold", threshold)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} must be in [0, 1]; got {value}")
    if min_tokens_to_keep < 1:
        raise ValueError(f"min_tokens_to_keep must be at least 1; got {min_tokens_to_keep}")
    coin = np.broadcast_to(floats(u), z.shape[:-1])[..., None]
    if not ((coin >= 0) & (coin < 1)).all():
        raise ValueError(f"u must be in [0, 1); got {floats(u)}")
    if threshold > 0.5:
        return z.copy()
    order = descending_order(z)
    rank = np.argsort(order, axis=-1)
    # Words come best first, so those that reach the threshold are the first ones; masked ones never
    # count, not even with threshold 0.
    reach = ((softmax(z) >= threshold) & np.isfinite(z)).sum(axis=-1, keepdims=True)
    cut = rank < reach - 1
    left = (np.isfinite(z) & ~cut).sum(axis=-1, keepdims=True)
    happens = (coin < probability) & (left >= min_tokens_to_keep)
    return np.where(cut & happens, -np.inf, z)


def _back_to_ids(in_order: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Reorder values from the given order of the words to the order of their ids."""
    by_id = np.zeros_like(in_order)
    np.put_along_axis(by_id, order, in_order, axis=-1)
    return by_id
