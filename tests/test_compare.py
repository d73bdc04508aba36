"""The comparator fails where it should: it is what every other test leans on."""

import numpy as np
import pytest
import torch
from compare import assert_as_good_as, assert_close

NAN, INF = float("nan"), float("inf")


def test_equal_values_pass_whatever_holds_them() -> None:
    assert_close(torch.tensor([1.0, 2.0]), np.array([1.0, 2.0]))
    assert_close(torch.tensor(3.0), 3.0)
    assert_close(torch.tensor([1, 2]), torch.tensor([1, 2]))
    assert_close(torch.empty(0, 4), np.empty((0, 4)))


def test_values_of_a_graph_are_compared() -> None:
    assert_close(torch.ones(2, requires_grad=True), np.ones(2))


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ([1.0, NAN], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, NAN]),
        ([1.0, NAN], [1.0, NAN]),
        ([1.0, INF], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, INF]),
        ([1.0, INF], [1.0, -INF]),
        ([1.0, NAN], [1.0, INF]),
        ([1.0, 2.1], [1.0, 2.0]),
    ],
)
def test_a_difference_fails_and_no_tolerance_excuses_nan_or_inf(
    actual: list[float], expected: list[float]
) -> None:
    a, e = torch.tensor(actual), torch.tensor(expected)
    wide = 0.0 if np.isfinite([*actual, *expected]).all() else 1e300
    with pytest.raises(AssertionError, match="result"):
        assert_close(a, e, atol=wide, rtol=wide)
    with pytest.raises(AssertionError, match="result"):
        assert_as_good_as(a, e.nan_to_num(), e, slack=wide)


def test_announced_nan_must_be_in_the_same_place() -> None:
    a = torch.tensor([NAN, 1.0])
    assert_close(a, a, equal_nan=True)
    assert_as_good_as(a, a, a, 0.0, equal_nan=True)
    for expected in (torch.tensor([1.0, NAN]), torch.tensor([1.0, 1.0]), a.isnan() * NAN):
        with pytest.raises(AssertionError, match="should be"):
            assert_close(a, expected, equal_nan=True)
        with pytest.raises(AssertionError, match="should be"):
            assert_as_good_as(a, a, expected, 1.0, equal_nan=True)


def test_equal_infinities_pass() -> None:
    a = torch.tensor([INF, -INF, 1.0])
    assert_close(a, a)
    assert_as_good_as(a, a, a, 0.0)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (), (3,), (0,)])
def test_shapes_are_not_broadcast(shape: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(shape), np.ones(2), atol=1e300)
    with pytest.raises(AssertionError, match="shape"):
        assert_as_good_as(torch.ones(shape), np.ones(2), np.ones(2), 1.0)
    with pytest.raises(AssertionError, match="shape"):
        assert_as_good_as(torch.ones(2), np.ones(shape), np.ones(2), 1.0)


def test_dtype_is_checked_when_asked() -> None:
    a = torch.ones(2, dtype=torch.bfloat16)
    assert_close(a, np.ones(2), dtype=torch.bfloat16)
    assert_close(a, np.ones(2))
    with pytest.raises(AssertionError, match=r"bfloat16.*float32"):
        assert_close(a, np.ones(2), dtype=torch.float32)
    with pytest.raises(AssertionError, match=r"bfloat16.*float32"):
        assert_as_good_as(a, a, np.ones(2), 1.0, dtype=torch.float32)
    with pytest.raises(AssertionError, match="dtype"):
        assert_close(1.0, 1.0, dtype=torch.float32)


def test_a_missing_gradient_fails() -> None:
    missing = torch.ones(2, requires_grad=True).grad
    with pytest.raises(AssertionError, match="gradient is None"):
        assert_close(missing, torch.zeros(2), what="gradient")
    with pytest.raises(AssertionError, match="gradient is None"):
        assert_as_good_as(missing, torch.zeros(2), torch.zeros(2), 1.0, what="gradient")


def test_tolerances_are_inclusive_and_per_element() -> None:
    expected = np.array([1.0, 100.0])
    assert_close(np.array([1.5, 100.5]), expected, atol=0.5)
    assert_close(np.array([1.25, 125.0]), expected, rtol=0.25)
    with pytest.raises(AssertionError, match=r"1 of 2 entries, most at \[0\]"):
        assert_close(np.array([2.0, 100.5]), expected, rtol=0.25)


def test_ours_may_err_as_much_as_torch_and_a_little_more() -> None:
    truth, plain = np.array([10.0, -20.0]), np.array([10.5, -20.0])
    assert_as_good_as(np.array([10.0, -20.5]), plain, truth, 0.0)
    assert_as_good_as(np.array([10.0, -20.75]), plain, truth, 0.25 / 20)
    with pytest.raises(AssertionError, match=r"less exact than plain torch: off by 0.75 at \[1\]"):
        assert_as_good_as(np.array([10.0, -20.75]), plain, truth, 0.24 / 20)
    assert_as_good_as(np.array([10.0, -20.75]), plain, truth, 0.25, scale=1.0)


def test_where_torch_is_not_finite_nothing_is_excused() -> None:
    truth = np.array([1.0, 2.0])
    for plain in (np.array([1.0, NAN]), np.array([1.0, INF]), np.array([NAN, NAN])):
        assert_as_good_as(truth, plain, truth, 0.0)
        with pytest.raises(AssertionError, match="less exact"):
            assert_as_good_as(np.array([1.0, 2.5]), plain, truth, 0.1)


def test_a_scale_that_is_not_finite_is_refused() -> None:
    for scale in (NAN, INF):
        with pytest.raises(AssertionError, match="scale"):
            assert_as_good_as(1.0, 1.0, 1.0, 1.0, scale=scale)


def test_empty_values_pass() -> None:
    empty = torch.empty(0, 3)
    assert_as_good_as(empty, empty, empty, 0.0)
