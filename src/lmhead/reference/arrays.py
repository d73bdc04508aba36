"""Shared by all chapters: array types and argument checks.

The textbook computes in float64 throughout. Lists are welcome, so that an example can be typed.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Array", "ArrayLike", "Ids", "floats", "ids_below", "one_hot"]

Array: TypeAlias = NDArray[np.float64]
"""Numbers."""

Ids: TypeAlias = NDArray[np.int64]
"""Word ids: 0, 1, ..., V - 1."""


def floats(x: ArrayLike) -> Array:
    """Return `x` as a float64 array.

    >>> floats([1, 2, 3])
    array([1., 2., 3.])
    """
    return np.asarray(x, dtype=np.float64)


def ids_below(vocab_size: int, ids: ArrayLike, *, name: str = "ids") -> Ids:
    """Return `ids` as an integer array; `ValueError` if one is not in [0, `vocab_size`).

    NumPy would read -1 as "the last word". Here it is a mistake.

    >>> ids_below(3, [2, 0])
    array([2, 0])
    >>> ids_below(3, [2, -1])
    Traceback (most recent call last):
    ...
    ValueError: ids must be in [0, 3); got -1 at index 1
    """
    array = np.asarray(ids)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be integers; got {array.dtype}")
    out = (array < 0) | (array >= vocab_size)
    if out.any():
        first = int(np.flatnonzero(out)[0])
        value = array.reshape(-1)[first]
        raise ValueError(f"{name} must be in [0, {vocab_size}); got {value} at index {first}")
    return array.astype(np.int64)


def one_hot(ids: ArrayLike, vocab_size: int) -> Array:
    """y[n, v] = 1 if v = ids[n] else 0. Shape (...) becomes (..., V).

    All the probability on one word: the distribution of a model that knows the answer.

    >>> one_hot([2, 0], 3)
    array([[0., 0., 1.],
           [1., 0., 0.]])
    """
    ids = ids_below(vocab_size, ids)
    y = np.zeros((*ids.shape, vocab_size))
    np.put_along_axis(y, ids[..., None], 1.0, axis=-1)
    return y
