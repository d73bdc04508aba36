"""Chapter 15. Constraints: words that must, may or must not come; and guidance.

A bias pushes a word up or down whatever the model says; a bias of -inf forbids it. All rules here
come down to that, each with its own idea of when. Logits (V,) or (..., V) in and out. Where a rule
looks at the context, it is a list of ids, one list per row as in chapter 14. `length` is how many
ids the context has, one number or one per row (...).

A row where a rule leaves nothing to choose is a `ValueError`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmhead.reference.arrays import Array, ArrayLike, Ids, ids_below
from lmhead.reference.decoding import choosable
from lmhead.reference.penalties import each_row, something_left
from lmhead.reference.softmax import log_softmax

__all__ = [
    "allowed_filter",
    "bad_words_filter",
    "begin_suppress_filter",
    "forced_tokens",
    "guidance",
    "logit_bias",
    "min_length_filter",
    "sequence_bias",
    "suppress_filter",
]


def logit_bias(logits: ArrayLike, bias: Mapping[int, float]) -> Array:
    """Bias: z[v] + bias[v]. -inf forbids a word.

    >>> logit_bias([1.0, 2.0, 3.0], {0: 5.0, 2: -np.inf})
    array([  6.,   2., -inf])
    """
    z = choosable(logits)
    added = np.zeros(z.shape[-1])
    added[ids_below(z.shape[-1], list(bias), name="bias")] = _biases(bias.values())
    return something_left(z + added)


def sequence_bias(
    logits: ArrayLike, context: Sequence[Any], bias: Mapping[tuple[int, ...], float]
) -> Array:
    """Bias of sequences: z[v] + Σ bias[(a, b, ..., v)], over those whose a, b, ... end the context.

    A sequence of one word has nothing before it, so it always counts.

    >>> sequence_bias([0.0, 0.0, 0.0], [1, 0], {(2,): 1.0, (0, 2): 2.0, (0, 0, 1): 9.0})
    array([0., 0., 3.])
    """
    _biases(bias.values())

    def of_row(z: Array, ids: list[int]) -> Array:
        added = np.zeros_like(z)
        for sequence, value in bias.items():
            *before, v = ids_below(len(z), _not_empty(sequence), name="bias").tolist()
            if ids[len(ids) - len(before) :] == before and len(before) <= len(ids):
                added[v] += value
        return z + added

    return each_row(of_row, logits, context)


def bad_words_filter(
    logits: ArrayLike,
    context: Sequence[Any],
    bad_words_ids: Sequence[Sequence[int]],
    *,
    eos_token_id: Sequence[int] = (),
) -> Array:
    """Bad words: `sequence_bias` with -inf, so that no listed sequence is ever completed.

    An end-of-text word alone in a sequence is no bad word: a text must be able to end.

    >>> bad_words_filter([0.0, 0.0, 0.0], [1, 0], [[0, 2], [1, 1]])
    array([  0.,   0., -inf])
    """
    bad = [tuple(words) for words in bad_words_ids]
    ends = [(v,) for v in eos_token_id]
    return sequence_bias(logits, context, {words: -np.inf for words in bad if words not in ends})


def allowed_filter(logits: ArrayLike, ids: Sequence[int]) -> Array:
    """Allowed ids: cut all others.

    >>> allowed_filter([1.0, 2.0, 3.0], [0, 2])
    array([  1., -inf,   3.])
    """
    z = choosable(logits)
    return something_left(np.where(_is_one_of(ids, z.shape[-1]), z, -np.inf))


def suppress_filter(logits: ArrayLike, ids: Sequence[int]) -> Array:
    """Suppressed ids: cut them.

    >>> suppress_filter([1.0, 2.0, 3.0], [0, 2])
    array([-inf,   2., -inf])
    """
    z = choosable(logits)
    return something_left(np.where(_is_one_of(ids, z.shape[-1]), -np.inf, z))


def begin_suppress_filter(
    logits: ArrayLike, ids: Sequence[int], length: ArrayLike, begin_index: ArrayLike
) -> Array:
    """Suppressed at the beginning: cut the ids where the context has exactly begin_index ids.

    begin_index is the length of the prompt: the first new word must not be one of these.

    >>> begin_suppress_filter([[1.0, 2.0], [1.0, 2.0]], [1], length=[3, 4], begin_index=3)
    array([[  1., -inf],
           [  1.,   2.]])
    """
    z = choosable(logits)
    now = _per_row(length, z, "length") == _per_row(begin_index, z, "begin_index")
    return something_left(np.where(now & _is_one_of(ids, z.shape[-1]), -np.inf, z))


def min_length_filter(
    logits: ArrayLike, length: ArrayLike, min_length: int, eos_token_id: Sequence[int]
) -> Array:
    """Minimum length: cut the end-of-text words where length < min_length.

    For a minimum of new words, give as length the number of new words.

    >>> min_length_filter([1.0, 2.0, 3.0], length=4, min_length=5, eos_token_id=[2])
    array([  1.,   2., -inf])
    """
    z = choosable(logits)
    early = _per_row(length, z, "length") < min_length
    return something_left(np.where(early & _is_one_of(eos_token_id, z.shape[-1]), -np.inf, z))


def forced_tokens(
    logits: ArrayLike, length: ArrayLike, forced: Mapping[int, int | Sequence[int]]
) -> Array:
    """Forced words: where the context has n ids and n is in `forced`, only forced[n] may come.

    They get the logit 0, even one that was cut; all others are cut. Several ids share the chance.
    Hugging Face's forced first word is {1: bos}, its forced last word {max_length - 1: eos}.

    >>> forced_tokens([1.0, 2.0, 3.0], 4, {4: 1})
    array([-inf,   0., -inf])
    >>> forced_tokens([1.0, 2.0, 3.0], 5, {4: 1})
    array([1., 2., 3.])
    """
    z = choosable(logits)
    lengths = _per_row(length, z, "length")
    for n, ids in forced.items():
        must = _is_one_of(np.atleast_1d(np.asarray(ids)).tolist(), z.shape[-1])
        z = np.where(lengths == n, np.where(must, 0.0, -np.inf), z)
    return something_left(z.copy())


def guidance(logits: ArrayLike, unconditional: ArrayLike, scale: float) -> Array:
    """Classifier-free guidance: u + scale · (c - u), with c and u log-softmaxes of the two rows.

    c comes from the model that has read the prompt, u from the one that has not. A scale of 1 gives
    c; above 1, what the prompt made likelier becomes likelier still. Shapes: both (..., V).

    A word that c forbids stays forbidden. One that only u forbids would get +inf if scale > 1: that
    is a `ValueError`.

    >>> c, u = np.log([0.5, 0.5]), np.log([0.8, 0.2])
    >>> guidance(c, u, 2.0).round(3)  # log(0.5² / 0.8), log(0.5² / 0.2)
    array([-1.163,  0.223])
    """
    c, u = log_softmax(choosable(logits)), log_softmax(choosable(unconditional))
    if c.shape != u.shape:
        raise ValueError(f"unconditional must have shape {c.shape}; got {u.shape}")
    if not np.isfinite(scale):
        raise ValueError(f"scale must be finite; got {scale}")
    if scale == 1:
        return c
    forbidden = np.isneginf(c)
    c0, u0 = np.where(forbidden, 0.0, c), np.where(forbidden, 0.0, u)
    # Written without c - u, which would be inf - inf where u forbids.
    guided = scale * c0 + (1.0 - scale) * u0
    return something_left(np.where(forbidden, -np.inf, guided))


def _biases(values: Any) -> Array:
    array = np.asarray(list(values), dtype=np.float64)
    if not (array < np.inf).all():
        raise ValueError(f"bias must be numbers below +inf; got {array[~(array < np.inf)][0]}")
    return array


def _not_empty(sequence: Sequence[int]) -> list[int]:
    if len(sequence) == 0:
        raise ValueError("bias must be of sequences of at least one id; got an empty one")
    return list(sequence)


def _is_one_of(ids: Sequence[int], vocab_size: int) -> NDArray[np.bool_]:
    """Whether a word is one of the ids (V,)."""
    listed = np.zeros(vocab_size, dtype=np.bool_)
    listed[ids_below(vocab_size, np.asarray(ids, dtype=None if len(ids) else np.int64))] = True
    return listed


def _per_row(x: ArrayLike, z: Array, name: str) -> Ids:
    """An integer, or one per row (...), as (..., 1)."""
    array = np.asarray(x)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be integers; got {array.dtype}")
    return np.broadcast_to(array, z.shape[:-1])[..., None].astype(np.int64)
