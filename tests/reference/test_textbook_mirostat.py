"""Mirostat: how many words stay, by hand; and whether the surprise goes where it should."""

from collections.abc import Callable

import numpy as np
import pytest
from compare import Array, assert_close

from lmhead import reference as ref

NINF = -np.inf
# b_i = log 2 for all i; t = log 2, log 3/2, log 4/3, so Σ t = log 4 and Σ t² = 0.727616:
# ŝ = log 2 · log 4 / 0.727616 = 1.320623, ŝ - 1 = 0.320623.
Z = np.log([4.0, 8.0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("mu", "k"),
    [
        # 1 - 4^-0.320623 = 0.358841, and 0.320623 / 0.358841 = 0.893496.
        (0.0, 1),  # 0.893496^(1/1.320623) = 0.918, but 1 at least
        (1.5, 2),  # (0.893496 · 2.828427)^(1/1.320623) = 2.018
        (2.5, 3),  # (0.893496 · 5.656854)^(1/1.320623) = 3.411
        (9.0, 4),  # 103.4, but there are 4 words
        (5000.0, 4),  # 2^5000 is no float
        (-5000.0, 1),
    ],
)
def test_k_by_hand(mu: float, k: int) -> None:
    assert int(ref.mirostat_k(Z, mu)) == k
    assert_close(ref.mirostat_1_filter(Z, mu), ref.top_k_filter(Z, k))


def test_cut_words_count_in_the_vocabulary_and_not_in_the_estimate() -> None:
    # V = 5: 1 - 5^-0.320623 = 0.403111, and (0.320623 / 0.403111 · 2.828427)^(1/1.320623) = 1.848.
    assert int(ref.mirostat_k(np.append(Z, NINF), 1.5)) == 1


def test_only_the_m_best_words_are_looked_at() -> None:
    # m = 2: ŝ = 1, k = 2^2.2 / log 4 = 3.31. m = 4: (0.893496 · 4.594793)^(1/1.320623) = 2.914.
    assert int(ref.mirostat_k(Z, 2.2, m=2)) == 3
    assert int(ref.mirostat_k(Z, 2.2, m=4)) == 2


def test_one_word_left() -> None:
    assert int(ref.mirostat_k([0.0], 5.0)) == 1
    assert int(ref.mirostat_k([NINF, 0.0], 5.0)) == 1


def test_mirostat_2_by_hand() -> None:
    # surprises 1, 2, 3, 3 bits (powers of 2, so that the edges are exact to rounding)
    z = np.log([0.125, 0.5, 0.25, 0.125])
    for mu, kept in ((0.5, [1]), (1.01, [1]), (2.01, [1, 2]), (2.99, [1, 2]), (3.01, [0, 1, 2, 3])):
        assert np.flatnonzero(np.isfinite(ref.mirostat_2_filter(z, mu))).tolist() == kept


def test_update_by_hand() -> None:
    # q = 2/3, 1/3 after the cut: log2 1.5 = 0.584963 and log2 3 = 1.584963 bits.
    cut = np.array([[np.log(0.5), np.log(0.25), NINF]] * 2)
    mu = ref.mirostat_update([4.0, 4.0], cut, [0, 1], tau=1.0, eta=0.5)
    assert_close(mu, np.array([4 + 0.5 * 0.4150375, 4 - 0.5 * 0.5849625]), atol=1e-7)
    with pytest.raises(ValueError, match="token must be a word that was not cut"):
        ref.mirostat_update(4.0, cut[0], 2, tau=1.0, eta=0.5)


@pytest.mark.parametrize("cut", [ref.mirostat_1_filter, ref.mirostat_2_filter])
def test_the_mean_surprise_becomes_tau(cut: Callable[[Array, Array], Array]) -> None:
    z = -1.1 * np.log(np.arange(1, 201))  # Zipf
    tau, steps, ids = 2.5, 800, np.arange(200)
    mu, total = np.float64(2 * tau), 0.0
    for step in range(steps):
        left = cut(z, np.asarray(mu))
        token = ref.argmax(left + ref.philox_gumbel(3, step, ids))
        total -= float(ref.log_prob(left, token)) / np.log(2)
        mu = np.float64(ref.mirostat_update(mu, left, token, tau=tau, eta=0.1))
    assert total / steps == pytest.approx(tau, abs=0.1)
    assert float(ref.entropy(z)) / np.log(2) > tau + 1  # which it would not be without
