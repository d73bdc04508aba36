"""Chapter 16. Philox: random numbers that can be looked up.

A common generator has a state and gives one number after another; who asks first gets other numbers
than who asks last. Philox has no state. It stirs a counter under a key, and the same counter and
key always give the same four words of 32 bits. So the noise of a word can be a function of
(seed, position, word) and nothing else: not of the batch, the order, or who computes it.

Philox 4x32-10 is by Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3".
"""

import numpy as np
from numpy.typing import NDArray

from lmhead.reference.arrays import Array, ArrayLike
from lmhead.reference.decoding import gumbel

__all__ = ["philox_4x32", "philox_gumbel", "philox_uniform"]

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))  # golden ratio, and √3 - 1


def philox_4x32(counter: ArrayLike, key: ArrayLike, *, rounds: int = 10) -> NDArray[np.uint64]:
    """Philox: counter (..., 4) and key (..., 2) of 32-bit words to four 32-bit words (..., 4).

    A round multiplies words 0 and 2 by a constant each, to 64 bits, and puts the halves crosswise:

        high_0, low_0 = M_0 · c_0,   high_1, low_1 = M_1 · c_2
        c <- (high_1 ^ c_1 ^ k_0,  low_1,  high_0 ^ c_3 ^ k_1,  low_0)

    and each next round adds a constant to each word of the key.

    >>> [f"{w:08x}" for w in philox_4x32([0, 0, 0, 0], [0, 0])]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    words, keys = _words(counter, 32, "counter"), _words(key, 32, "key")
    if words.shape[-1:] != (4,) or keys.shape[-1:] != (2,):
        shapes = f"{words.shape} and {keys.shape}"
        raise ValueError(f"counter must be (..., 4) and key (..., 2); got {shapes}")
    c0, c1, c2, c3, k0, k1 = np.broadcast_arrays(
        *(words[..., i] for i in range(4)), *(keys[..., i] for i in range(2))
    )
    for _ in range(rounds):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2  # below 2^64: nothing is lost
        c0, c1, c2, c3 = (
            (second >> _32) ^ c1 ^ k0,
            second & _LOW,
            (first >> _32) ^ c3 ^ k1,
            first & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1)


def philox_uniform(
    seed: ArrayLike, position: ArrayLike, ids: ArrayLike, *, stream: int = 0
) -> Array:
    """The number u in (0, 1) of each word: u = (⌊bits / 2^11⌋ + 1/2) / 2^53, from 64 bits.

        counter = (id // 2, position's low 32 bits, its high 32 bits, stream)
        key     = (seed's low 32 bits, its high 32 bits)

    One call of Philox serves two words: an even id takes output words 0 and 1 as the high and low
    half of its bits, an odd id 2 and 3. seed, position and ids are integers of shapes that
    broadcast. Streams are independent of each other.

    In float64 the largest of these numbers would be rounded to 1; it is 1 - 2^-53 instead.

    >>> philox_uniform(seed=7, position=0, ids=[0, 1, 2]).round(4)
    array([0.9546, 0.1142, 0.407 ])
    """
    seeds, positions = _words(seed, 64, "seed"), _words(position, 64, "position")
    words, streams = _words(ids, 33, "ids"), _words(stream, 32, "stream")
    parts = (words >> np.uint64(1), positions & _LOW, positions >> _32, streams)
    counter = np.stack(np.broadcast_arrays(*parts), axis=-1)
    key = np.stack([seeds & _LOW, seeds >> _32], axis=-1)
    out = philox_4x32(counter, key)
    odd = np.broadcast_to(words & np.uint64(1), out.shape[:-1]) == 1
    high = np.where(odd, out[..., 2], out[..., 0])
    low = np.where(odd, out[..., 3], out[..., 1])
    bits = (high << _32) | low
    u = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.minimum(u, 1.0 - 2.0**-53)


def philox_gumbel(
    seed: ArrayLike, position: ArrayLike, ids: ArrayLike, *, stream: int = 0
) -> Array:
    """The Gumbel noise of each word: g = -log(-log u), with the u of `philox_uniform`.

    >>> philox_gumbel(seed=7, position=0, ids=[0, 1, 2]).round(4)
    array([ 3.069 , -0.7747,  0.1064])
    """
    return gumbel(philox_uniform(seed, position, ids, stream=stream))


def _words(x: ArrayLike, bits: int, name: str) -> NDArray[np.uint64]:
    """`x` as unsigned integers, checked to fit in `bits` bits."""
    array = np.asarray(x)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be integers below 2**{bits}; got {array.dtype}")
    out = array < 0
    if bits < 64:
        out |= array >= 2**bits
    if out.any():
        value = array.reshape(-1)[np.flatnonzero(out)[0]]
        raise ValueError(f"{name} must be in [0, 2**{bits}); got {value}")
    return array.astype(np.uint64)
