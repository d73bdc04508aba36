"""Softmax: its four properties, its stability, and its gradient, the printed mistake included."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from compare import Array, assert_close
from finite_differences import assert_gradient, autograd, numerical_gradient
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lmhead import reference as ref

NINF = -np.inf
ROWS = [
    [0.0],
    [1.0, 2.0, 3.0],
    [1000.0, 1001.0, 1002.0],
    [-1000.0, 0.0, 1000.0],
    [0.5, NINF, -0.5, NINF],
]

logit_rows = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=1, max_dims=3, max_side=9),
    elements=st.floats(-300, 300, width=64),
)


# Naive against stable


def test_naive_overflows_where_stable_does_not() -> None:
    z = [1000.0, 1001.0, 1002.0]
    with pytest.warns(RuntimeWarning, match="overflow|invalid"):
        naive = ref.softmax_naive(z)
    assert np.isnan(naive).all()
    assert ref.softmax(z).round(4).tolist() == [0.09, 0.2447, 0.6652]
    assert_close(ref.softmax(z), ref.softmax([0.0, 1.0, 2.0]))


def test_naive_and_stable_agree_where_both_work() -> None:
    z = np.random.default_rng(0).normal(size=(5, 7))
    assert_close(ref.softmax_naive(z), ref.softmax(z), rtol=1e-14)


def test_plain_normalisation_is_not_softmax() -> None:
    assert ref.normalize([1, 2, 3]).round(3).tolist() == [0.167, 0.333, 0.5]
    assert ref.softmax([1, 2, 3]).round(3).tolist() == [0.09, 0.245, 0.665]


@pytest.mark.parametrize("row", ROWS)
def test_as_torch(row: list[float]) -> None:
    t = torch.tensor(row, dtype=torch.float64)
    assert_close(ref.softmax(row), t.softmax(-1), rtol=1e-14)
    assert_close(ref.log_softmax(row), t.log_softmax(-1), rtol=1e-14)
    assert_close(ref.logsumexp(row), t.logsumexp(-1), rtol=1e-14)


# Properties


@given(logit_rows)
def test_positive_and_sums_to_1(z: Array) -> None:
    p = ref.softmax(z)
    assert (p > 0).all()
    assert_close(p.sum(axis=-1), np.ones(z.shape[:-1]), rtol=1e-14)


@given(logit_rows)
def test_order_is_kept(z: Array) -> None:
    p = ref.softmax(z)
    order = ref.descending_order(z)
    assert (np.diff(np.take_along_axis(p, order, axis=-1), axis=-1) <= 0).all()


@given(logit_rows, st.floats(-1e6, 1e6))
def test_a_shift_changes_nothing(z: Array, shift: float) -> None:
    # z + shift rounds in the 10th digit; that, not softmax, is the difference allowed for.
    assert_close(ref.softmax(z + shift), ref.softmax(z), atol=1e-9)


@given(logit_rows)
def test_logsumexp_is_a_soft_maximum(z: Array) -> None:
    lse, best, size = ref.logsumexp(z), z.max(axis=-1), z.shape[-1]
    assert (lse >= best).all()
    assert (lse <= best + np.log(size) + 1e-12).all()


# Temperature


def test_temperature_divides_the_logits() -> None:
    z = np.array([1.0, -2.0, 0.5])
    assert_close(ref.softmax(z, temperature=0.7), ref.softmax(z / 0.7))


@given(logit_rows)
def test_heat_raises_entropy(z: Array) -> None:
    cold, warm, hot = (ref.entropy(z / t) for t in (0.5, 1.0, 2.0))
    assert (cold <= warm + 1e-12).all()
    assert (warm <= hot + 1e-12).all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be above 0; got"):
        ref.softmax([1.0, 2.0], temperature=temperature)


# Gradients


@pytest.fixture
def z() -> Array:
    return np.random.default_rng(1).normal(size=(3, 5)) * 2


@pytest.fixture
def g() -> Array:
    return np.random.default_rng(2).normal(size=(3, 5))


def test_jacobian_by_finite_differences(z: Array) -> None:
    row = z[0]

    def entry(i: int) -> Callable[[Array], Any]:
        return lambda z: ref.softmax(z)[i]

    measured = [numerical_gradient(entry(i), row) for i in range(5)]
    jacobian = ref.softmax_jacobian(ref.softmax(row))
    assert_close(jacobian, np.array(measured), atol=1e-9)
    p = ref.softmax(row)
    assert_close(jacobian, np.diag(p) - np.outer(p, p), atol=1e-16)
    assert_close(jacobian.sum(axis=0), np.zeros(5), atol=1e-15)


def test_jacobian_of_a_batch(z: Array) -> None:
    p = ref.softmax(z)
    assert_close(ref.softmax_jacobian(p), np.stack([ref.softmax_jacobian(row) for row in p]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_softmax_backward(z: Array, g: Array, temperature: float) -> None:
    p = ref.softmax(z, temperature=temperature)
    grad = ref.softmax_backward(g, p, temperature=temperature)
    assert_gradient(grad, lambda z: (g * ref.softmax(z, temperature=temperature)).sum(), z)
    _, (theirs,) = autograd(lambda t: (t / temperature).softmax(-1), z, upstream=g)
    assert_close(grad, theirs, atol=1e-14)


def test_the_extra_factor_some_texts_print_is_wrong(z: Array, g: Array) -> None:
    """Right: p (g - Σ g p). Printed here and there: p (1 - p) (g - Σ g p). Measure, and see."""
    p = ref.softmax(z)
    measured = numerical_gradient(lambda z: (g * ref.softmax(z)).sum(), z)
    right = p * (g - (g * p).sum(axis=-1, keepdims=True))
    wrong = right * (1 - p)
    assert_close(right, measured, atol=1e-9)
    assert np.abs(wrong - measured).max() > 0.01
    assert_close(ref.softmax_backward(g, p), right, atol=1e-15)


def test_log_softmax_backward(z: Array, g: Array) -> None:
    grad = ref.log_softmax_backward(g, ref.log_softmax(z))
    assert_gradient(grad, lambda z: (g * ref.log_softmax(z)).sum(), z)
    _, (theirs,) = autograd(lambda t: t.log_softmax(-1), z, upstream=g)
    assert_close(grad, theirs, atol=1e-14)


def test_logsumexp_backward(z: Array, g: Array) -> None:
    grad = ref.logsumexp_backward(g[:, 0], z)
    assert_gradient(grad, lambda z: (g[:, 0] * ref.logsumexp(z)).sum(), z)


def test_normalize_backward(z: Array, g: Array) -> None:
    x = np.exp(z)
    assert_gradient(ref.normalize_backward(g, x), lambda x: (g * ref.normalize(x)).sum(), x)


# Masked words


def test_a_masked_word_has_probability_0_and_no_gradient() -> None:
    z, g = np.array([0.5, NINF, -0.5]), np.array([1.0, 2.0, 3.0])
    p = ref.softmax(z)
    assert p[1] == 0
    assert_close(p[[0, 2]], ref.softmax(z[[0, 2]]), rtol=1e-15)
    assert_gradient(ref.softmax_backward(g, p), lambda z: (g * ref.softmax(z)).sum(), z)
    assert_gradient(ref.logsumexp_backward(1.0, z), ref.logsumexp, z)


def test_a_row_of_only_masked_words_is_nan_without_a_warning() -> None:
    z = [[NINF, NINF], [0.0, 0.0]]
    assert_close(ref.softmax(z), np.array([[np.nan] * 2, [0.5] * 2]), equal_nan=True)
    assert ref.logsumexp(z)[0] == NINF
    assert np.isnan(ref.log_softmax(z)[0]).all()
