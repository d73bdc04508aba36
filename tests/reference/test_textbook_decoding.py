"""From logits to a word: who is kept by each filter, and whether draws follow p."""

from collections.abc import Callable

import numpy as np
import pytest
from compare import Array, assert_close
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from lmhead import reference as ref

NINF = -np.inf
P = np.array([0.5, 0.0, 0.25, 0.15, 0.1])
with np.errstate(divide="ignore"):
    Z = np.log(P)

logit_rows = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=1, max_dims=2, max_side=8),
    elements=st.floats(-20, 20) | st.sampled_from([0.0, 1.0]),
)


def _kept(z: Array) -> list[int]:
    return np.flatnonzero(np.isfinite(z)).tolist()


@given(logit_rows, st.sampled_from([0.1, 0.5, 1.0, 2.0]))
def test_greedy_needs_no_softmax(z: Array, temperature: float) -> None:
    best = ref.greedy(z)
    p = ref.softmax(z, temperature=temperature)
    # Rounding may make two unequal logits equal in p, never change who is on top.
    assert (np.take_along_axis(p, best[..., None], axis=-1)[..., 0] == p.max(axis=-1)).all()


# Draws

DRAWS = 20_000


def _chi_square_p(drawn: Array) -> float:
    counts = np.bincount(drawn.astype(int), minlength=5)
    assert counts[1] == 0  # probability 0
    possible = P > 0
    return float(stats.chisquare(counts[possible], P[possible] * DRAWS).pvalue)


def test_inverse_cdf_draws_from_p() -> None:
    u = np.random.default_rng(0).random(DRAWS)
    drawn = ref.sample_inverse_cdf(np.broadcast_to(P, (DRAWS, 5)), u)
    assert _chi_square_p(drawn.astype(float)) > 1e-3


def test_gumbel_draws_from_softmax() -> None:
    u = np.random.default_rng(0).random((DRAWS, 5))
    drawn = ref.sample_gumbel(np.broadcast_to(Z, (DRAWS, 5)), u)
    assert _chi_square_p(drawn.astype(float)) > 1e-3


@pytest.mark.parametrize("u", [0.0, 0.1, 0.5, 0.75, 0.9, 1 - 2**-53])
def test_inverse_cdf_never_draws_a_word_of_probability_0(u: float) -> None:
    p = np.array([0.0, 0.3, 0.0, 0.7, 0.0])
    assert int(ref.sample_inverse_cdf(p, u)) in (1, 3)
    assert int(ref.sample_inverse_cdf(p * (1 - 1e-15), u)) in (1, 3)  # sums to a little less than 1


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    u = np.random.default_rng(1).random(DRAWS)
    assert stats.kstest(ref.gumbel(u), "gumbel_r").pvalue > 1e-3


# Filters


def test_top_k_keeps_exactly_k_even_with_ties() -> None:
    assert _kept(ref.top_k_filter([1.0, 2.0, 2.0, 2.0, 0.0], 2)) == [1, 2]
    assert _kept(ref.top_k_filter(Z, 2)) == [0, 2]
    assert_close(ref.top_k_filter(Z, 99), Z)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.0, [0]), (0.49, [0]), (0.5, [0]), (0.51, [0, 2]), (0.75, [0, 2]), (0.76, [0, 2, 3])],
)
def test_top_p_boundaries(top_p: float, kept: list[int]) -> None:
    assert _kept(ref.top_p_filter(Z, top_p)) == kept


def test_top_p_of_1_keeps_every_word_however_rare() -> None:
    z = np.array([0.0, -50.0, -500.0])  # in float64, p[0] alone is already 1
    assert_close(ref.top_p_filter(z, 1.0), z)


def test_top_p_ties_at_the_boundary_go_to_the_lowest_ids() -> None:
    assert _kept(ref.top_p_filter([0.0, 0.0, 0.0, 0.0], 0.5)) == [0, 1]


@pytest.mark.parametrize(
    ("min_p", "kept"), [(0.0, [0, 2, 3, 4]), (0.25, [0, 2, 3]), (0.45, [0, 2]), (1.0, [0])]
)
def test_min_p(min_p: float, kept: list[int]) -> None:
    assert _kept(ref.min_p_filter(Z, min_p)) == kept


@given(logit_rows, st.floats(0, 1), st.integers(1, 9))
def test_filters_by_their_definitions(z: Array, x: float, k: int) -> None:
    rows = z.reshape(-1, z.shape[-1])
    for row in rows:
        p, order = ref.softmax(row), ref.descending_order(row).tolist()
        assert _kept(ref.top_k_filter(row, k)) == sorted(order[:k])
        assert _kept(ref.min_p_filter(row, x)) == [
            v for v in range(len(row)) if np.exp(row[v] - row.max()) >= x
        ]
        nucleus = set(_kept(ref.top_p_filter(row, x)))
        assert nucleus == set(order[: len(nucleus)])  # the best ones
        assert len(nucleus) >= 1
        assert p[list(nucleus)].sum() >= x - 1e-12  # enough of them
        without_last = p[order[: len(nucleus) - 1]].sum()
        assert without_last < x + 1e-12  # and not one more
    for kept in (ref.top_k_filter(z, k), ref.top_p_filter(z, x), ref.min_p_filter(z, x)):
        assert kept.shape == z.shape
        assert (ref.greedy(kept) == ref.greedy(z)).all()  # no filter changes the best word
        assert np.isfinite(ref.softmax(kept)).all()


def test_filters_of_a_batch_work_row_by_row() -> None:
    z = np.random.default_rng(0).normal(size=(2, 3, 7))
    filters: list[Callable[[Array], Array]] = [
        lambda z: ref.top_k_filter(z, 3),
        lambda z: ref.top_p_filter(z, 0.7),
        lambda z: ref.min_p_filter(z, 0.2),
    ]
    for f in filters:
        rows = np.stack([f(row) for row in z.reshape(-1, 7)]).reshape(z.shape)
        assert_close(f(z), rows)


@pytest.mark.parametrize("bad", [[NINF, NINF], [0.0, np.nan], [0.0, np.inf]])
def test_no_word_is_made_up_where_there_is_none_to_choose(bad: list[float]) -> None:
    z, u = np.array([[0.0, 1.0], bad]), np.full((2, 2), 0.5)
    choices: list[Callable[[], object]] = [
        lambda: ref.greedy(z),
        lambda: ref.sample_gumbel(z, u),
        lambda: ref.top_k_filter(z, 1),
        lambda: ref.top_p_filter(z, 0.5),
        lambda: ref.min_p_filter(z, 0.5),
    ]
    for choose in choices:
        with pytest.raises(ValueError, match=r"finite maximum; got (-inf|nan|inf) in row 1"):
            choose()
    for p in ([0.5, np.nan], [0.0, 0.0]):
        with pytest.raises(ValueError, match="p must be finite and have a sum above 0"):
            ref.sample_inverse_cdf(p, 0.5)


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match="k must be at least 1; got 0"):
        ref.top_k_filter(Z, 0)
    with pytest.raises(ValueError, match=r"top_p must be in \[0, 1\]; got 1.5"):
        ref.top_p_filter(Z, 1.5)
    with pytest.raises(ValueError, match=r"min_p must be in \[0, 1\]; got -0.1"):
        ref.min_p_filter(Z, -0.1)
