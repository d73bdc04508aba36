"""Chapter 4. Cross-entropy: how surprised the model is by the right word, and the gradient p - y.

The loss of one row is the surprise -log p[y] at the target y. Every variant in use (smoothing,
class weights, targets that are themselves probabilities) only changes how much each word's
surprise counts, so one formula holds them all:

    row = Σ_v c[v] · (-log p[v])  +  z_loss · lse²

`target_weights` says what c is; plain cross-entropy has c = one_hot(y). The gradient is as short:

    ∂row/∂z[v] = (Σ_u c[u]) · p[v] - c[v]  +  2 · z_loss · lse · p[v]

For c = one_hot(y) that is p - y: what the model believes minus what is true.
"""

from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from lmhead.reference.arrays import Array, ArrayLike, floats, one_hot
from lmhead.reference.linear import LinearGrads
from lmhead.reference.output_layer import head_logits, head_logits_backward
from lmhead.reference.softmax import log_softmax, logsumexp, softmax

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "cross_entropy",
    "cross_entropy_backward",
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    "target_weights",
]


def target_weights(
    logits: ArrayLike,
    targets: ArrayLike,
    *,
    class_weight: ArrayLike | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Array:
    """The weights: c[v] = w[v] · ((1 - ε) t[v] + ε / V).

    They say how much the surprise of each word counts. t is one_hot(target) for ids, and the target
    itself for probabilities; w is `class_weight`; ε is `label_smoothing`, a share of the truth
    spread evenly over all words, so that the model is never asked to be certain. Rows whose id is
    `ignore_index` get c = 0.

    Masked words (logit -inf) get no share of ε: a word that cannot be said must cost nothing.

    >>> target_weights(np.zeros(4), 2, label_smoothing=0.2)
    array([0.05, 0.05, 0.85, 0.05])
    >>> target_weights([0, 0, 0, -np.inf], 2, label_smoothing=0.2)
    array([0.05, 0.05, 0.85, 0.  ])
    """
    z, targets = floats(logits), np.asarray(targets)
    vocab_size = z.shape[-1]
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1]; got {label_smoothing}")
    kept = _kept(z, targets, ignore_index)
    if np.issubdtype(targets.dtype, np.floating):
        truth = floats(targets)
    else:
        truth = one_hot(np.where(kept, targets, 0), vocab_size)
    even = np.where(np.isneginf(z), 0.0, 1.0 / vocab_size)
    c = (1.0 - label_smoothing) * truth + label_smoothing * even
    if class_weight is not None:
        c = c * floats(class_weight)
    return c * kept[..., None]


def cross_entropy(
    logits: ArrayLike,
    targets: ArrayLike,
    *,
    class_weight: ArrayLike | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_items: float | None = None,
) -> Array:
    """The loss: row = Σ_v c[v] · (-log p[v]) + z_loss · lse², then reduced.

    - `logits` (..., V); `targets` ids (...) or probabilities (..., V).
    - `z_loss` keeps lse, the normaliser, near 0, so that logits do not drift away together.
    - `reduction`: "none" gives the rows, 0 for ignored ones; "sum" their sum; "mean" divides the
      first part by Σ w[y] over kept rows (the number of kept rows without class weights; the
      number of rows for probabilities) and the z-loss by the number of kept rows. A mean over no
      rows is NaN.
    - `num_items` replaces both denominators of "mean": with gradient accumulation, pass the count
      of the whole batch to each part, and the parts add up.

    A target that is masked (logit -inf) costs +inf; a masked word that is no target costs nothing.

    >>> logits = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    >>> print(cross_entropy(logits, [2, 0]).round(4))
    1.4076
    >>> cross_entropy(logits, [2, 0], reduction="none").round(4)
    array([0.4076, 2.4076])
    >>> print(cross_entropy(logits, [2, -100]).round(4))
    0.4076
    >>> print(cross_entropy(logits[0], [0.0, 0.5, 0.5]).round(4))
    0.9076
    """
    _check_reduction(reduction, num_items)
    z, targets = floats(logits), np.asarray(targets)
    kept = _kept(z, targets, ignore_index)
    c = target_weights(
        z,
        targets,
        class_weight=class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    # 0 · log 0 = 0, and an ignored row is 0 whatever its logits are.
    silent = ((c == 0.0) & np.isneginf(z)) | ~kept[..., None]
    surprise = -np.where(silent, 0.0, log_softmax(z))
    rows = (c * surprise).sum(axis=-1)
    penalty = np.where(kept, z_loss * logsumexp(z) ** 2, 0.0) if z_loss else np.zeros_like(rows)

    if reduction == "none":
        return floats(rows + penalty)
    if reduction == "sum":
        return floats(rows.sum() + penalty.sum())
    weight, count = _denominators(targets, kept, class_weight, num_items)
    with np.errstate(invalid="ignore", divide="ignore"):  # a mean over nothing is 0 / 0 = NaN
        loss = rows.sum() / weight
        return floats(loss + penalty.sum() / count) if z_loss else floats(loss)


def cross_entropy_backward(
    logits: ArrayLike,
    targets: ArrayLike,
    *,
    class_weight: ArrayLike | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_items: float | None = None,
    grad_output: ArrayLike = 1.0,
) -> Array:
    """Its gradient: ∂row/∂z[v] = (Σ_u c[u]) · p[v] - c[v] + 2 · z_loss · lse · p[v].

    That is p - y in every disguise.
    `grad_output` is ∂/∂loss: one number, or one per row with reduction="none". Rows that are
    ignored and words that are masked get 0.

    >>> cross_entropy_backward([1.0, 2.0, 3.0], 2).round(3)  # p - y
    array([ 0.09 ,  0.245, -0.335])
    >>> cross_entropy_backward([1.0, 2.0, 3.0], 2, label_smoothing=0.3).round(3)
    array([-0.01 ,  0.145, -0.135])
    >>> cross_entropy_backward([1.0, 2.0, 3.0], -100)
    array([0., 0., 0.])
    """
    _check_reduction(reduction, num_items)
    z, targets = floats(logits), np.asarray(targets)
    kept = _kept(z, targets, ignore_index)
    c = target_weights(
        z,
        targets,
        class_weight=class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    p = softmax(z)
    grad = c.sum(axis=-1, keepdims=True) * p - c
    grad_penalty = 2.0 * z_loss * logsumexp(z)[..., None] * p if z_loss else np.zeros_like(p)

    if reduction == "mean":
        weight, count = _denominators(targets, kept, class_weight, num_items)
        with np.errstate(invalid="ignore", divide="ignore"):  # of ignored rows only: cut below
            grad, grad_penalty = grad / weight, grad_penalty / count
    upstream = np.broadcast_to(floats(grad_output), kept.shape)[..., None]
    touched = kept[..., None] & ~np.isneginf(z)
    return np.where(touched, upstream * (grad + grad_penalty), 0.0)


class CrossEntropyOptions(TypedDict, total=False):
    """The options of `cross_entropy`, for the two functions that pass them on."""

    class_weight: ArrayLike | None
    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    num_items: float | None


def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    **options: "Unpack[CrossEntropyOptions]",
) -> Array:
    """The whole last step: cross_entropy(head_logits(hidden, weight), targets).

    This is the definition that the streamed `lmhead.linear_cross_entropy` must meet without ever
    holding all logits.

    >>> print(linear_cross_entropy([[1.0, 2.0]], [[1, 0], [0, 1], [1, 1]], [2]).round(4))
    0.4076
    """
    z = head_logits(hidden, weight, bias=bias, softcap=softcap, scale=scale)
    return cross_entropy(z, targets, **options)


def linear_cross_entropy_backward(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    grad_output: ArrayLike = 1.0,
    **options: "Unpack[CrossEntropyOptions]",
) -> LinearGrads:
    """Its gradients: ∂hidden = (p - y) W and ∂W = (p - y)ᵀ hidden, in the plain case.

    The hidden state is pulled towards the row of the right word and away from the rows of the
    words believed instead; each row of W moves along the hidden states that met it.

    >>> grads = linear_cross_entropy_backward([[1.0, 2.0]], [[1, 0], [0, 1], [1, 1]], [2])
    >>> grads.x.round(3)
    array([[-0.245, -0.09 ]])
    >>> grads.weight.round(3)
    array([[ 0.09 ,  0.18 ],
           [ 0.245,  0.489],
           [-0.335, -0.67 ]])
    """
    z = head_logits(hidden, weight, bias=bias, softcap=softcap, scale=scale)
    grad_logits = cross_entropy_backward(z, targets, grad_output=grad_output, **options)
    return head_logits_backward(
        grad_logits, hidden, weight, bias=bias, softcap=softcap, scale=scale
    )


def _check_reduction(reduction: str, num_items: float | None) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none'; got {reduction!r}")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"num_items needs reduction='mean'; got reduction={reduction!r}")


def _kept(z: Array, targets: NDArray[Any], ignore_index: int) -> NDArray[np.bool_]:
    """Which rows count, after a look at the targets. Shape (...)."""
    if np.issubdtype(targets.dtype, np.floating):
        if targets.shape != z.shape:
            raise ValueError(f"targets must be ids or of shape {z.shape}; got {targets.shape}")
        return np.ones(z.shape[:-1], dtype=np.bool_)
    if targets.shape != z.shape[:-1]:
        raise ValueError(f"targets must have shape {z.shape[:-1]}; got {targets.shape}")
    kept = np.asarray(targets != ignore_index)
    wrong = kept & ((targets < 0) | (targets >= z.shape[-1]))
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"targets must be in [0, {z.shape[-1]}) or ignore_index; "
            f"got {targets.reshape(-1)[first]} at index {first}"
        )
    return kept


def _denominators(
    targets: NDArray[Any],
    kept: NDArray[np.bool_],
    class_weight: ArrayLike | None,
    num_items: float | None,
) -> tuple[Array, Array]:
    """What "mean" divides the cross-entropy by, and what it divides the z-loss by."""
    count = floats(kept.sum())
    if num_items is not None:
        return floats(num_items), floats(num_items)
    if class_weight is None or np.issubdtype(targets.dtype, np.floating):
        return count, count
    return floats(floats(class_weight)[targets[kept]].sum()), count
