"""The judge is judged first: right on known derivatives, and able to say no."""

import numpy as np
import pytest
from finite_differences import assert_gradient, numerical_gradient


def test_known_derivatives() -> None:
    x = np.array([[0.3, -1.2], [2.0, 0.0]])
    np.testing.assert_allclose(numerical_gradient(lambda x: (x**3).sum(), x), 3 * x**2, atol=1e-9)
    np.testing.assert_allclose(numerical_gradient(lambda x: np.sin(x).sum(), x), np.cos(x))


def test_leaves_x_as_it_was() -> None:
    x = np.array([1.0, 2.0])
    numerical_gradient(lambda x: x.sum(), x)
    assert x.tolist() == [1.0, 2.0]


def test_a_masked_entry_has_no_slope() -> None:
    gradient = numerical_gradient(lambda x: np.exp(x).sum(), np.array([0.0, -np.inf]))
    np.testing.assert_allclose(gradient, [1.0, 0.0])


def test_a_wrong_gradient_is_refused() -> None:
    x = np.array([1.0, 2.0])
    assert_gradient(2 * x, lambda x: (x * x).sum(), x)
    with pytest.raises(AssertionError, match="differs"):
        assert_gradient(2.001 * x, lambda x: (x * x).sum(), x)
    with pytest.raises(AssertionError):
        assert_gradient(np.full(2, np.nan), lambda x: (x * x).sum(), x)
