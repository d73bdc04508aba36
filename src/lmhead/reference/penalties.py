"""Chapter 14. Penalties: what was said before counts against saying it again.

The context is the list of ids so far. Logits (V,) come with one such list; logits (..., V) with one
list per row, which may differ in length. To look at the last n ids only, give the last n ids; to
look at the output only, give the output.

An id of V or more in a context is ignored: the model reads words that the head cannot say. Words
cut before (-inf) stay cut. A row where nothing is left to choose is a `ValueError`, as in
chapter 10.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lmhead.reference.arrays import Array, ArrayLike
from lmhead.reference.decoding import choosable

__all__ = [
    "dry_penalty",
    "dry_repeats",
    "frequency_penalty",
    "no_repeat_ngram_filter",
    "presence_penalty",
    "repetition_penalty",
]


def repetition_penalty(logits: ArrayLike, context: Sequence[Any], penalty: float) -> Array:
    """Repetition: of each word in the context, z / penalty if z > 0, otherwise z · penalty.

    Above 1 it lowers the logit on either side of 0. How often a word was said does not matter.

    >>> repetition_penalty([2.0, -2.0, 2.0, -2.0], [0, 1, 1], 1.25)
    array([ 1.6, -2.5,  2. , -2. ])
    """
    if not 0 < penalty < np.inf:
        raise ValueError(f"penalty must be finite and above 0; got {penalty}")

    def of_row(z: Array, ids: list[int]) -> Array:
        lowered = np.where(z > 0, z / penalty, z * penalty)
        return np.where(_counts(ids, len(z)) > 0, lowered, z)

    return each_row(of_row, logits, context)


def frequency_penalty(logits: ArrayLike, context: Sequence[Any], penalty: float) -> Array:
    """Frequency: z[v] - penalty · (how often v is in the context).

    >>> frequency_penalty([2.0, -2.0, 2.0], [0, 1, 1], 0.5)
    array([ 1.5, -3. ,  2. ])
    """
    _check_finite(penalty)
    return each_row(lambda z, ids: z - penalty * _counts(ids, len(z)), logits, context)


def presence_penalty(logits: ArrayLike, context: Sequence[Any], penalty: float) -> Array:
    """Presence: z[v] - penalty if v is in the context.

    >>> presence_penalty([2.0, -2.0, 2.0], [0, 1, 1], 0.5)
    array([ 1.5, -2.5,  2. ])
    """
    _check_finite(penalty)
    return each_row(lambda z, ids: z - penalty * (_counts(ids, len(z)) > 0), logits, context)


def no_repeat_ngram_filter(logits: ArrayLike, context: Sequence[Any], ngram_size: int) -> Array:
    """No n-gram twice: cut v if the last n - 1 ids and then v occur in the context already.

    >>> no_repeat_ngram_filter([0.0, 0.0, 0.0, 0.0], [1, 2, 3, 1, 2], 3)  # 1 2 3 is there
    array([  0.,   0.,   0., -inf])
    """
    if ngram_size < 1:
        raise ValueError(f"ngram_size must be at least 1; got {ngram_size}")

    def of_row(z: Array, ids: list[int]) -> Array:
        starts = range(len(ids) - ngram_size + 1)
        ngrams = [ids[start : start + ngram_size] for start in starts]
        last = ids[len(ids) - ngram_size + 1 :] if ngrams else []
        banned = [ngram[-1] for ngram in ngrams if ngram[:-1] == last]
        return np.where(_counts(banned, len(z)) > 0, -np.inf, z)

    return each_row(of_row, logits, context)


def dry_penalty(
    logits: ArrayLike,
    context: Sequence[Any],
    *,
    multiplier: float,
    base: float = 1.75,
    allowed_length: int = 2,
    sequence_breakers: Sequence[Sequence[int]] = (),
) -> Array:
    """DRY, don't repeat yourself: z[v] - multiplier · base^(n[v] - allowed_length).

    n[v] is the length of the longest ending of the context that stood there before with v after it:
    see `dry_repeats`. Words with n[v] < allowed_length, or that never followed such an ending, are
    not punished, nor is a word that is by itself a sequence breaker.

    As in llama.cpp, which also stops the exponent at ⌊88.7228391 / log base⌋ (if base > 1.000001):
    where base^exponent would leave float32.

    >>> z = np.zeros(4)
    >>> dry_penalty(z, [1, 2, 3, 1, 2], multiplier=0.5)  # 1 2 was followed by 3
    array([ 0. ,  0. ,  0. , -0.5])
    >>> dry_penalty(z, [0, 1, 2, 3, 0, 1, 2], multiplier=0.5, base=2.0)  # 0 1 2: one longer
    array([ 0.,  0.,  0., -1.])
    """
    _check_finite(multiplier, "multiplier")
    if not 1 <= base < np.inf:
        raise ValueError(f"base must be finite and at least 1; got {base}")
    if allowed_length < 0:
        raise ValueError(f"allowed_length must be at least 0; got {allowed_length}")
    longest = int(88.7228391 / np.log(base)) if base > 1.000001 else 0
    unpunished = {sequence[0] for sequence in sequence_breakers if len(sequence) == 1}

    def of_row(z: Array, ids: list[int]) -> Array:
        z = z.copy()
        for v, n in dry_repeats(ids, sequence_breakers).items():
            if n >= allowed_length and v < len(z) and v not in unpunished:
                exponent = n - allowed_length
                z[v] -= multiplier * base ** (min(exponent, longest) if longest else exponent)
        return z

    return each_row(of_row, logits, context)


def dry_repeats(
    context: Sequence[int], sequence_breakers: Sequence[Sequence[int]] = ()
) -> dict[int, int]:
    """How long a repeat each word would prolong: {v: n[v]}, for one context.

    At position j < L - 1 of c_0 ... c_(L-1), let n_j be the largest n such that the n ids up to and
    with c_j are also the last n of the context (the two may overlap). The word c_(j+1) would
    prolong that repeat, so n[v] is the largest n_j with c_(j+1) = v.

    No n is above the number of ids after the last sequence breaker, so a repeat never
    reaches across one. To find it, go back from the end to the first position where a breaker
    starts that is complete in the context; of several that start there, take the longest.

    >>> dry_repeats([7, 1, 2, 5, 2, 6, 7, 1, 2])  # endings: 7 1 2, then 5; 2, then 6
    {1: 0, 2: 0, 5: 3, 6: 1, 7: 0}
    >>> dry_repeats([7, 1, 2, 5, 2, 6, 7, 1, 2], [[1]])  # only the 2 after the breaker counts
    {1: 0, 2: 0, 5: 1, 6: 1, 7: 0}
    """
    ids = list(context)
    if any(len(sequence) == 0 for sequence in sequence_breakers):
        raise ValueError("sequence_breakers must not be empty sequences; one is")
    limit = len(ids)
    for start in reversed(range(len(ids))):
        lengths = [len(s) for s in sequence_breakers if ids[start : start + len(s)] == list(s)]
        if lengths:
            limit = len(ids) - start - max(lengths)
            break
    repeats: dict[int, int] = {}
    for j in range(len(ids) - 1):
        n = 0
        while n < min(limit, j + 1) and ids[j - n] == ids[-1 - n]:
            n += 1
        follower = ids[j + 1]
        repeats[follower] = max(n, repeats.get(follower, 0))
    return dict(sorted(repeats.items()))


def each_row(
    of_row: Callable[[Array, list[int]], Array], logits: ArrayLike, context: Sequence[Any]
) -> Array:
    """Apply of_row(z, ids) to each row and its list of ids; check that a word is left.

    >>> each_row(lambda z, ids: z + len(ids), [[0.0, 1.0], [2.0, 3.0]], [[5], [5, 5, 5]])
    array([[1., 2.],
           [5., 6.]])
    """
    z = choosable(logits)
    contexts = list(context)
    if z.ndim > 1:
        if len(contexts) != len(z) or not all(np.iterable(row) for row in contexts):
            got = f"{len(contexts)} for logits {z.shape}"
            raise ValueError(f"context must have one list of ids per row; got {got}")
        rows = [each_row(of_row, row, ids) for row, ids in zip(z, contexts, strict=True)]
        return np.stack(rows) if rows else z.copy()
    ids = np.asarray(contexts, dtype=np.int64) if not contexts else np.asarray(contexts)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"context must be a list of integers; got {context!r}")
    if (ids < 0).any():
        raise ValueError(f"context must have no negative ids; got {ids.min()}")
    return something_left(of_row(z, [int(v) for v in ids]))


def something_left(z: Array) -> Array:
    """The logits, if some word is left in every row, and no NaN or +inf came up."""
    best = np.atleast_1d(z.max(axis=-1)).reshape(-1)
    if not np.isfinite(best).all():
        row = int(np.flatnonzero(~np.isfinite(best))[0])
        raise ValueError(f"a word must be left to choose; the maximum is {best[row]} in row {row}")
    return z


def _counts(ids: list[int], vocab_size: int) -> Array:
    """How often each word is in the list (V,); ids of V or more are ignored."""
    known = [v for v in ids if v < vocab_size]
    return np.bincount(np.asarray(known, dtype=np.int64), minlength=vocab_size).astype(np.float64)


def _check_finite(value: float, name: str = "penalty") -> None:
    if not np.isfinite(value):
        raise ValueError(f"{name} must be finite; got {value}")
