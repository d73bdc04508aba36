"""More filters: against Hugging Face where it has them, by hand where it has not."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from compare import Array, assert_close
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lmhead import reference as ref

os.environ.setdefault("HF_HUB_OFFLINE", "1")
NINF = -np.inf


def _kept(z: Array) -> list[int]:
    return np.flatnonzero(np.isfinite(z)).tolist()


def _logits(rows: int = 40, vocab_size: int = 150) -> Array:
    """Flat and peaked rows, with some words cut."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(rows, vocab_size)) * rng.uniform(0.1, 6.0, size=(rows, 1))
    z[rows // 2 :, rng.permutation(vocab_size)[:30]] = NINF
    return z


FILTERS: dict[str, tuple[dict[str, Any], Callable[[Array], Array]]] = {
    "TemperatureLogitsWarper": ({"temperature": 0.7}, lambda z: ref.temperature_scale(z, 0.7)),
    "TopKLogitsWarper": ({"top_k": 7}, lambda z: ref.top_k_filter(z, 7)),
    "TopKLogitsWarper keep": (
        {"top_k": 2, "min_tokens_to_keep": 5},
        lambda z: ref.top_k_filter(z, 2, min_tokens_to_keep=5),
    ),
    "TopPLogitsWarper": ({"top_p": 0.8}, lambda z: ref.top_p_filter(z, 0.8)),
    "TopPLogitsWarper keep": (
        {"top_p": 0.2, "min_tokens_to_keep": 4},
        lambda z: ref.top_p_filter(z, 0.2, min_tokens_to_keep=4),
    ),
    "MinPLogitsWarper": ({"min_p": 0.1}, lambda z: ref.min_p_filter(z, 0.1)),
    "MinPLogitsWarper keep": (
        {"min_p": 0.9, "min_tokens_to_keep": 4},
        lambda z: ref.min_p_filter(z, 0.9, min_tokens_to_keep=4),
    ),
    "TopHLogitsWarper": ({"top_h": 0.4}, lambda z: ref.top_h_filter(z, 0.4)),
    "TopHLogitsWarper most": ({"top_h": 0.95}, lambda z: ref.top_h_filter(z, 0.95)),
    "TypicalLogitsWarper": ({"mass": 0.6}, lambda z: ref.typical_filter(z, 0.6)),
    "TypicalLogitsWarper keep": (
        {"mass": 0.05, "min_tokens_to_keep": 5},
        lambda z: ref.typical_filter(z, 0.05, min_tokens_to_keep=5),
    ),
    "EpsilonLogitsWarper": ({"epsilon": 0.01}, lambda z: ref.epsilon_filter(z, 0.01)),
    "EpsilonLogitsWarper keep": (
        {"epsilon": 0.3, "min_tokens_to_keep": 3},
        lambda z: ref.epsilon_filter(z, 0.3, min_tokens_to_keep=3),
    ),
    "EtaLogitsWarper": ({"epsilon": 2.0**-8}, lambda z: ref.eta_filter(z, 2.0**-8)),
    "EtaLogitsWarper keep": (
        {"epsilon": 0.25, "min_tokens_to_keep": 3},
        lambda z: ref.eta_filter(z, 0.25, min_tokens_to_keep=3),
    ),
}


@pytest.mark.parametrize("name", FILTERS)
def test_as_hugging_face(name: str) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    options, ours = FILTERS[name]
    theirs = getattr(processors, name.split()[0])(**options)
    z = _logits()
    expected = theirs(torch.zeros(len(z), 1, dtype=torch.long), torch.from_numpy(z)).numpy()
    assert_close(ours(z), expected)
    if "Temperature" not in name:  # the case says something: some words go, some stay
        assert np.isfinite(expected).sum(axis=-1).max() > 1
        assert np.isfinite(expected).sum() < np.isfinite(z).sum()


# By hand


def test_temperature_per_row_and_of_zero() -> None:
    z = np.array([[1.0, 3.0, 3.0], [1.0, 3.0, NINF]])
    assert_close(
        ref.temperature_scale(z, [0.0, 2.0]), np.array([[NINF, 3.0, NINF], [0.5, 1.5, NINF]])
    )


def test_dynamic_temperature_by_hand() -> None:
    # p = 1/2, 1/4, 1/4, one word cut: H = 1.5 bits of log2 3 = 1.58496 possible, H / max = 0.94639.
    z = np.append(np.log([0.5, 0.25, 0.25]), NINF)
    # T = 0.5 + (1.5 - 0.5) · 0.94639 = 1.44639
    assert_close(ref.dynamic_temperature(z, 1.0, 0.5), z / (0.5 + 1.5 / np.log2(3)), atol=1e-12)
    # T = 0 + 2.5 · 0.94639² = 2.23917: a low end under 0 is 0
    t = 2.5 * (1.5 / np.log2(3)) ** 2
    assert t == pytest.approx(2.23917, abs=2e-5)
    assert_close(ref.dynamic_temperature(z, 1.0, 1.5, 2.0), z / t, atol=1e-12)
    assert_close(ref.dynamic_temperature(z, 0.7, 0.0, 2.0), ref.temperature_scale(z, 0.7))
    # One word left: as it is. A certain row with low end 0: T = 0, the best word.
    assert_close(ref.dynamic_temperature([5.0, NINF], 2.0, 1.0), np.array([5.0, NINF]))
    assert_close(ref.dynamic_temperature([0.0, 5000.0], 1.0, 1.0), np.array([NINF, 5000.0]))


def test_top_h_looks_at_the_top_words_only() -> None:
    # Over the best two of p ~ 4, 4, 1, 1: H = 1 bit, half of it each.
    z = np.log([4.0, 1.0, 4.0, 1.0])
    assert _kept(ref.top_h_filter(z, 0.5, top_n=2)) == [0]
    assert _kept(ref.top_h_filter(z, 1.0, top_n=2)) == [0, 2]
    # Over all four, p = 0.4, 0.4, 0.1, 0.1: parts 0.5288, 0.5288, 0.3322, 0.3322, H = 1.7219 bits.
    assert _kept(ref.top_h_filter(z, 0.61)) == [0]
    assert _kept(ref.top_h_filter(z, 0.62)) == [0, 2]
    assert _kept(ref.top_h_filter(z, 0.81)) == [0, 1, 2]
    # A certain row: H is 0, and a word of probability 0 is not kept for adding nothing to it.
    assert _kept(ref.top_h_filter([0.0, -5000.0], 1.0)) == [0]


def test_of_equally_typical_words_the_lowest_ids_stay() -> None:
    # All alike: distance 0. Before words 0, 1, 2, 3: 0, 0.25, 0.5, 0.75.
    assert _kept(ref.typical_filter(np.zeros(4), 0.5)) == [0, 1]
    assert _kept(ref.typical_filter(np.zeros(4), 0.51)) == [0, 1, 2]
    assert _kept(ref.typical_filter(np.zeros(4), 1e-9, min_tokens_to_keep=3)) == [0, 1, 2]
    z = np.array([0.0, NINF, -500.0])  # in float64, p[0] alone is already 1
    assert_close(ref.typical_filter(z, 1.0), z)


def test_ties_at_the_edge_of_min_tokens_to_keep_go_to_the_lowest_ids() -> None:
    z = np.zeros(4)
    assert _kept(ref.epsilon_filter(z, 0.9)) == [0]
    assert _kept(ref.eta_filter(np.zeros(2), 0.999999, min_tokens_to_keep=1)) == [0, 1]  # η < 1/2
    assert _kept(ref.epsilon_filter(z, 0.9, min_tokens_to_keep=2)) == [0, 1]
    assert _kept(ref.epsilon_filter(z, 0.25)) == [0, 1, 2, 3]  # p >= epsilon: equal is enough
    # What was cut before does not come back to fill the number.
    assert _kept(ref.epsilon_filter([1.0, NINF], 0.5, min_tokens_to_keep=2)) == [0]


def test_top_n_sigma_by_hand() -> None:
    # mean 2, deviations -2, -1, 0, 3: σ² = 14 / 4, σ = 1.8708. Floors 5 - σ n: 3.13, 1.26, -0.6.
    z = np.array([0.0, 1.0, NINF, 2.0, 5.0])
    assert _kept(ref.top_n_sigma_filter(z, 1.0)) == [4]
    assert _kept(ref.top_n_sigma_filter(z, 2.0)) == [3, 4]
    assert _kept(ref.top_n_sigma_filter(z, 3.0)) == [0, 1, 3, 4]
    # The same words at any temperature.
    assert _kept(ref.top_n_sigma_filter(z / 0.3, 2.0)) == [3, 4]
    # log of 0.1 .. 0.4: mean -1.5081, σ 0.5208, best -0.9163, floor -1.4371: 0.3 (-1.204) stays.
    assert _kept(ref.top_n_sigma_filter(np.log([0.1, 0.2, 0.3, 0.4]), 1.0)) == [2, 3]


def test_xtc_by_hand() -> None:
    z = np.append(np.log([0.1, 0.4, 0.2, 0.3]), NINF)

    def kept(u: float = 0.0, probability: float = 1.0, threshold: float = 0.2, **more: int) -> Any:
        return _kept(ref.xtc_filter(z, u, probability=probability, threshold=threshold, **more))

    everything = [0, 1, 2, 3]
    assert kept(threshold=0.15) == [0, 2]  # of 0.4, 0.3, 0.2 the last stays
    assert kept(threshold=0.25) == [0, 2, 3]
    assert kept(threshold=0.35) == everything  # one word reaches it
    assert kept(threshold=0.45) == everything
    assert kept(threshold=0.51) == everything
    assert kept(threshold=0.0) == [0]  # all reach it
    assert kept(u=0.3, probability=0.3, threshold=0.15) == everything  # u must be below
    assert kept(u=0.29, probability=0.3, threshold=0.15) == [0, 2]
    assert kept(probability=0.0, threshold=0.15) == everything
    assert kept(threshold=0.15, min_tokens_to_keep=2) == [0, 2]
    assert kept(threshold=0.15, min_tokens_to_keep=3) == everything  # all or nothing
    # Equal words: the one with the highest id stays.
    even = ref.xtc_filter(np.zeros((2, 3)), [0.1, 0.9], probability=0.5, threshold=0.3)
    assert [_kept(row) for row in even] == [[2], [0, 1, 2]]


# All of them

EVERY: dict[str, Callable[[Array], Array]] = {
    "temperature": lambda z: ref.temperature_scale(z, 0.7),
    "dynamic temperature": lambda z: ref.dynamic_temperature(z, 1.0, 0.5, 1.3),
    "top-h": lambda z: ref.top_h_filter(z, 0.5, top_n=5),
    "typical": lambda z: ref.typical_filter(z, 0.5),
    "epsilon": lambda z: ref.epsilon_filter(z, 0.1),
    "eta": lambda z: ref.eta_filter(z, 0.1),
    "top-n-sigma": lambda z: ref.top_n_sigma_filter(z, 1.0),
    "xtc": lambda z: ref.xtc_filter(z, 0.1, probability=0.5, threshold=0.1),
    "mirostat 1": lambda z: ref.mirostat_1_filter(z, 2.0, m=5),
    "mirostat 2": lambda z: ref.mirostat_2_filter(z, 2.0),
}
logit_rows = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=1, max_dims=2, max_side=8),
    elements=st.floats(-20, 20) | st.sampled_from([0.0, 1.0]),
)


@pytest.mark.parametrize("name", EVERY)
@given(logit_rows)
def test_something_is_always_left_and_words_are_cut_or_kept_as_they_are(
    name: str, z: Array
) -> None:
    result = EVERY[name](z)
    assert result.shape == z.shape
    assert np.isfinite(ref.softmax(result)).all()
    if "temperature" not in name:
        assert ((result == z) | np.isneginf(result)).all()


@pytest.mark.parametrize("name", EVERY)
def test_a_batch_works_row_by_row_and_nothing_is_written_to(name: str) -> None:
    z = np.random.default_rng(0).normal(size=(2, 3, 7))
    z[0, 1, 2:5] = NINF
    before = z.copy()
    rows = np.stack([EVERY[name](row) for row in z.reshape(-1, 7)]).reshape(z.shape)
    result = EVERY[name](z)
    assert_close(result, rows, atol=1e-12)
    assert not np.shares_memory(result, z)
    assert_close(z, before)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("bad", [[NINF, NINF], [0.0, np.nan], [0.0, np.inf]])
def test_no_word_is_made_up_where_there_is_none_to_choose(name: str, bad: list[float]) -> None:
    with pytest.raises(ValueError, match=r"finite maximum; got (-inf|nan|inf) in row 1"):
        EVERY[name](np.array([[0.0, 1.0], bad]))


Z = np.zeros(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ref.temperature_scale(Z, -1.0), r"temperature must be .* got -1.0"),
        (lambda: ref.dynamic_temperature(Z, 1.0, -0.5), r"dynatemp_range must be .* got -0.5"),
        (lambda: ref.dynamic_temperature(Z, 1.0, 0.5, 0.0), r"dynatemp_exponent must be .* 0.0"),
        (lambda: ref.top_h_filter(Z, 0.0), r"top_h must be in \(0, 1\]; got 0.0"),
        (lambda: ref.top_h_filter(Z, 0.5, top_n=0), r"k must be at least 1; got 0"),
        (lambda: ref.typical_filter(Z, 1.1), r"typical_p must be in \(0, 1\]; got 1.1"),
        (lambda: ref.epsilon_filter(Z, 1.0), r"epsilon must be in \[0, 1\); got 1.0"),
        (lambda: ref.eta_filter(Z, -0.1), r"epsilon must be in \[0, 1\); got -0.1"),
        (lambda: ref.top_n_sigma_filter(Z, 0.0), r"n must be above 0; got 0.0"),
        (lambda: ref.xtc_filter(Z, 1.0, probability=1, threshold=0.1), r"u must be in \[0, 1\)"),
        (lambda: ref.xtc_filter(Z, 0.0, probability=2, threshold=0.1), r"probability must be .* 2"),
        (lambda: ref.xtc_filter(Z, 0.0, probability=1, threshold=-1), r"threshold must be .* -1"),
        (
            lambda: ref.xtc_filter(Z, 0, probability=1, threshold=0.1, min_tokens_to_keep=0),
            r"min_tokens_to_keep must be at least 1; got 0",
        ),
        (lambda: ref.min_p_filter(Z, 0.5, min_tokens_to_keep=0), r"min_tokens_to_keep .* got 0"),
        (lambda: ref.mirostat_k(Z, 1.0, m=1), r"m must be at least 2; got 1"),
        (lambda: ref.mirostat_k(Z, np.nan), r"mu must be finite; got nan"),
        (lambda: ref.mirostat_2_filter(Z, np.inf), r"mu must be finite; got \[inf\]"),
    ],
)
def test_bad_options_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
