"""Cross-entropy in every variant: the values of torch where torch has it, the slope everywhere."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from compare import Array, assert_close
from finite_differences import assert_gradient, autograd
from torch.nn import functional as F

from lmhead import reference as ref

NINF = -np.inf
N, V, D = 6, 5, 4
rng = np.random.default_rng(11)
LOGITS = rng.normal(size=(N, V)) * 3
IDS = np.array([0, 4, -100, 2, 2, -100])
PROBABILITIES = rng.dirichlet(np.ones(V), size=N)
WEIGHTS = np.array([0.5, 1.0, 2.0, 0.0, 3.0])
UPSTREAM = rng.normal(size=N)
HIDDEN, WEIGHT, BIAS = rng.normal(size=(N, D)), rng.normal(size=(V, D)), rng.normal(size=V)

TARGETS = {"ids": IDS, "probabilities": PROBABILITIES}


def _check(logits: Array, targets: Any, **options: Any) -> None:
    """The gradient of `cross_entropy` is `cross_entropy_backward`, for some upstream gradient."""
    upstream: Any = UPSTREAM if options.get("reduction") == "none" else 1.7

    def f(z: Array) -> Any:
        return (upstream * ref.cross_entropy(z, targets, **options)).sum()

    grad = ref.cross_entropy_backward(logits, targets, grad_output=upstream, **options)
    assert_gradient(grad, f, logits, what=f"{options}")


# Against torch: 2 kinds of targets x 3 reductions x 3 smoothings x with and without class weights


@pytest.mark.parametrize("kind", ["ids", "probabilities"])
@pytest.mark.parametrize(
    ("reduction", "smoothing", "class_weight"),
    list(product(["mean", "sum", "none"], [0.0, 0.1, 1.0], [None, WEIGHTS])),
)
def test_as_torch(kind: str, reduction: str, smoothing: float, class_weight: Array | None) -> None:
    targets = TARGETS[kind]
    upstream: Any = UPSTREAM if reduction == "none" else 1.7
    options: Any = {"reduction": reduction, "label_smoothing": smoothing}
    value, (grad,) = autograd(
        lambda z: F.cross_entropy(
            z,
            torch.tensor(targets),
            weight=None if class_weight is None else torch.tensor(class_weight),
            **options,
        ),
        LOGITS,
        upstream=upstream,
    )
    options["class_weight"] = class_weight
    assert_close(ref.cross_entropy(LOGITS, targets, **options), value, rtol=1e-13)
    ours = ref.cross_entropy_backward(LOGITS, targets, grad_output=upstream, **options)
    assert_close(ours, grad, atol=1e-14)
    _check(LOGITS, targets, **options)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    z = np.random.default_rng(0).normal(size=(*shape, V))
    ids = np.random.default_rng(1).integers(V, size=shape)
    rows = ref.cross_entropy(z, ids, reduction="none")
    assert np.shape(rows) == shape
    expected = F.cross_entropy(torch.tensor(z).reshape(-1, V), torch.tensor(ids).reshape(-1))
    assert_close(ref.cross_entropy(z, ids), expected, rtol=1e-13)


def test_another_ignore_index_even_an_id_of_the_vocabulary() -> None:
    ids = np.array([0, 4, 2, 2, 2, 1])
    value, (grad,) = autograd(
        lambda z: F.cross_entropy(z, torch.tensor(ids), ignore_index=2), LOGITS
    )
    assert_close(ref.cross_entropy(LOGITS, ids, ignore_index=2), value, rtol=1e-13)
    assert_close(ref.cross_entropy_backward(LOGITS, ids, ignore_index=2), grad, atol=1e-15)


# p - y


def test_the_gradient_is_p_minus_y() -> None:
    ids = np.array([0, 4, 1, 2, 2, 3])
    grad = ref.cross_entropy_backward(LOGITS, ids, reduction="sum")
    assert_close(grad, ref.softmax(LOGITS) - ref.one_hot(ids, V), atol=1e-16)
    assert_close(grad.sum(axis=-1), np.zeros(N), atol=1e-15)


def test_ids_are_one_hot_probabilities() -> None:
    ids = np.array([0, 4, 1, 2, 2, 3])
    for options in ({}, {"label_smoothing": 0.2}, {"z_loss": 0.1}, {"reduction": "sum"}):
        loose: Any = options
        one_hot = ref.one_hot(ids, V)
        assert_close(
            ref.cross_entropy(LOGITS, ids, **loose), ref.cross_entropy(LOGITS, one_hot, **loose)
        )


# What torch does not have


@pytest.mark.parametrize("kind", ["ids", "probabilities"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("class_weight", [None, WEIGHTS])
def test_z_loss(kind: str, reduction: str, class_weight: Array | None) -> None:
    targets = TARGETS[kind]
    options: Any = {"reduction": reduction, "class_weight": class_weight, "label_smoothing": 0.1}
    kept = IDS != -100 if kind == "ids" else np.ones(N, dtype=bool)
    penalty = np.where(kept, 0.3 * ref.logsumexp(LOGITS) ** 2, 0.0)
    added = {"none": penalty, "sum": penalty.sum(), "mean": penalty.sum() / kept.sum()}[reduction]
    expected = ref.cross_entropy(LOGITS, targets, **options) + added
    assert_close(ref.cross_entropy(LOGITS, targets, z_loss=0.3, **options), expected, rtol=1e-14)
    _check(LOGITS, targets, z_loss=0.3, **options)


@pytest.mark.parametrize("kind", ["ids", "probabilities"])
@pytest.mark.parametrize("class_weight", [None, WEIGHTS])
def test_num_items_makes_the_parts_of_a_batch_add_up(kind: str, class_weight: Array | None) -> None:
    targets = TARGETS[kind]
    options: Any = {"class_weight": class_weight, "label_smoothing": 0.1, "z_loss": 0.2}
    whole = ref.cross_entropy(LOGITS, targets, reduction="sum", **options) / 7
    parts = [
        ref.cross_entropy(LOGITS[rows], targets[rows], num_items=7, **options)
        for rows in (slice(0, 2), slice(2, 3), slice(3, N))  # the middle part is all ignored
    ]
    assert_close(np.sum(parts), whole, rtol=1e-14)
    _check(LOGITS, targets, num_items=7, **options)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("kind", ["ids", "probabilities"])
def test_the_whole_last_step(kind: str, softcap: float | None) -> None:
    targets = TARGETS[kind]
    head: Any = {"softcap": softcap, "scale": 0.7}
    loss: Any = {"label_smoothing": 0.1, "z_loss": 0.05, "class_weight": WEIGHTS}
    grads = ref.linear_cross_entropy_backward(
        HIDDEN, WEIGHT, targets, bias=BIAS, grad_output=1.7, **head, **loss
    )

    def f(hidden: Array, weight: Array, bias: Array) -> Any:
        return 1.7 * ref.linear_cross_entropy(hidden, weight, targets, bias=bias, **head, **loss)

    assert_gradient(grads.x, lambda h: f(h, WEIGHT, BIAS), HIDDEN)
    assert_gradient(grads.weight, lambda w: f(HIDDEN, w, BIAS), WEIGHT)
    assert_gradient(grads.bias, lambda b: f(HIDDEN, WEIGHT, b), BIAS)


def test_different_upstream_gradients_per_row() -> None:
    def f(hidden: Array) -> Any:
        return (UPSTREAM * ref.linear_cross_entropy(hidden, WEIGHT, IDS, reduction="none")).sum()

    grads = ref.linear_cross_entropy_backward(
        HIDDEN, WEIGHT, IDS, reduction="none", grad_output=UPSTREAM
    )
    assert_gradient(grads.x, f, HIDDEN)


# Corners


def test_a_batch_without_a_kept_row() -> None:
    ids = np.full(N, -100)
    assert np.isnan(ref.cross_entropy(LOGITS, ids))
    assert ref.cross_entropy(LOGITS, ids, reduction="sum") == 0
    assert ref.cross_entropy(LOGITS, ids, reduction="none").tolist() == [0.0] * N
    for options in ({}, {"z_loss": 0.1}, {"reduction": "sum"}, {"label_smoothing": 0.1}):
        loose: Any = options
        assert not ref.cross_entropy_backward(LOGITS, ids, **loose).any()


def test_an_empty_batch() -> None:
    z, ids = np.zeros((0, V)), np.zeros(0, dtype=np.int64)
    assert np.isnan(ref.cross_entropy(z, ids))
    assert ref.cross_entropy(z, ids, reduction="sum") == 0
    assert ref.cross_entropy(z, ids, reduction="none").shape == (0,)
    assert ref.cross_entropy_backward(z, ids).shape == (0, V)


def test_ignored_rows_may_hold_anything() -> None:
    z = LOGITS.copy()
    z[2], z[5] = np.nan, NINF
    for options in ({}, {"label_smoothing": 0.1}, {"z_loss": 0.1}, {"class_weight": WEIGHTS}):
        loose: Any = options
        assert_close(ref.cross_entropy(z, IDS, **loose), ref.cross_entropy(LOGITS, IDS, **loose))
        assert_close(
            ref.cross_entropy_backward(z, IDS, **loose),
            ref.cross_entropy_backward(LOGITS, IDS, **loose),
        )


def test_nan_in_a_kept_row_is_not_hidden() -> None:
    z = LOGITS.copy()
    z[0, 3] = np.nan
    rows = ref.cross_entropy(z, IDS, reduction="none")
    assert np.isnan(rows).tolist() == [True] + [False] * (N - 1)


def test_one_word_has_nothing_to_learn() -> None:
    assert ref.cross_entropy([[3.0]], [0]) == 0
    assert ref.cross_entropy_backward([[3.0]], [0]).tolist() == [[0.0]]


# Masked words


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("class_weight", [None, WEIGHTS])
def test_masked_words_cost_nothing(
    reduction: str, smoothing: float, class_weight: Array | None
) -> None:
    z = LOGITS.copy()
    z[:, [1, 3]] = NINF  # no target is 1 or 3
    options: Any = {
        "reduction": reduction,
        "label_smoothing": smoothing,
        "class_weight": class_weight,
        "z_loss": 0.1,
    }
    loss = ref.cross_entropy(z, IDS, **options)
    assert np.isfinite(loss).all()
    grad = ref.cross_entropy_backward(z, IDS, **options)
    assert np.isfinite(grad).all()
    assert not grad[:, [1, 3]].any()
    _check(z, IDS, **options)


def test_smoothing_with_a_mask_drops_the_masked_terms_only() -> None:
    z = np.array([1.0, NINF, 2.0])
    log_p = ref.log_softmax(z)
    expected = -0.9 * log_p[2] - 0.1 / 3 * (log_p[0] + log_p[2])
    assert_close(ref.cross_entropy(z, 2, label_smoothing=0.1), expected, rtol=1e-15)


def test_a_masked_target_costs_infinity() -> None:
    z = np.array([[1.0, NINF, 2.0], [1.0, 2.0, 3.0]])
    assert ref.cross_entropy(z, [1, 0]) == np.inf
    assert ref.cross_entropy(z, [1, 0], reduction="none")[1] < np.inf
    assert ref.cross_entropy(z[0], [0.5, 0.5, 0.0]) == np.inf
    grad = ref.cross_entropy_backward(z, [1, 0], reduction="sum")
    assert grad[0, 1] == 0
    assert np.isfinite(grad).all()


def test_probabilities_of_0_on_masked_words() -> None:
    z = np.array([1.0, NINF, 2.0])
    for smoothing in (0.0, 0.1):
        _check(z, np.array([0.3, 0.0, 0.7]), label_smoothing=smoothing)
        assert np.isfinite(ref.cross_entropy(z, [0.3, 0.0, 0.7], label_smoothing=smoothing))


# Refusals


@pytest.mark.parametrize(
    ("targets", "options", "message"),
    [
        ([0, 5], {}, r"targets must be in \[0, 3\) or ignore_index; got 5 at index 1"),
        ([0, -1], {}, r"targets must be in \[0, 3\) or ignore_index; got -1 at index 1"),
        ([0], {}, r"targets must have shape \(2,\); got \(1,\)"),
        ([0.5, 0.5], {}, r"targets must be ids or of shape \(2, 3\); got \(2,\)"),
        ([0, 1], {"label_smoothing": -0.1}, r"label_smoothing must be in \[0, 1\]; got -0.1"),
        ([0, 1], {"reduction": "max"}, r"reduction must be 'mean', 'sum' or 'none'; got 'max'"),
        ([0, 1], {"num_items": 3, "reduction": "sum"}, r"num_items needs reduction='mean'"),
    ],
)
def test_mistakes_are_named(targets: Any, options: Any, message: str) -> None:
    for f in (ref.cross_entropy, ref.cross_entropy_backward):
        with pytest.raises(ValueError, match=message):
            f(np.zeros((2, 3)), targets, **options)
