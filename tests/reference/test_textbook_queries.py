"""Questions: against torch, by finite differences, and where words are masked, tied or NaN."""

from typing import Any

import numpy as np
import pytest
import torch
from compare import Array, assert_close, float64
from finite_differences import assert_gradient, autograd
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.distributions import Categorical, kl_divergence

from lmhead import reference as ref

NINF = -np.inf
rng = np.random.default_rng(5)
Z = rng.normal(size=(2, 3, 6)) * 2
Q = rng.normal(size=(2, 3, 6)) * 2
IDS = rng.integers(6, size=(2, 3))
MANY = rng.integers(6, size=(2, 3, 4))
G = rng.normal(size=(2, 3))
MASKED = np.where(rng.random(Z.shape) < 0.3, NINF, Z)
MASKED[..., 0] = 0.5  # every row keeps a word

tied_rows = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=1, max_dims=2, max_side=8),
    elements=st.sampled_from([-1.0, 0.0, 0.5, 2.0, NINF]),
)


def test_values_as_torch() -> None:
    t: Any = Categorical(logits=torch.tensor(Z))
    assert_close(ref.log_prob(Z, IDS), t.log_prob(torch.tensor(IDS)), rtol=1e-13)
    assert_close(ref.entropy(Z), t.entropy(), rtol=1e-13)
    assert_close(ref.kl(Z, Q), kl_divergence(t, Categorical(logits=torch.tensor(Q))), rtol=1e-12)


def test_log_prob_of_several_ids_per_row() -> None:
    expected = torch.tensor(Z).log_softmax(-1).gather(-1, torch.tensor(MANY))
    assert_close(ref.log_prob(Z, MANY), expected, rtol=1e-13)


@pytest.mark.parametrize("z", [Z, MASKED], ids=["plain", "masked"])
def test_entropy_backward(z: Array) -> None:
    grad = ref.entropy_backward(G, z)
    assert_gradient(grad, lambda z: (G * ref.entropy(z)).sum(), z)
    assert not grad[np.isneginf(z)].any()


@pytest.mark.parametrize("ids", [IDS, MANY], ids=["one", "many"])
def test_log_prob_backward(ids: Any) -> None:
    g = np.random.default_rng(0).normal(size=ids.shape)
    grad = ref.log_prob_backward(g, Z, ids)
    assert_gradient(grad, lambda z: (g * ref.log_prob(z, ids)).sum(), Z)


def test_log_prob_backward_counts_an_id_asked_twice_twice() -> None:
    once = ref.log_prob_backward([1.0], [1.0, 2.0, 3.0], [2])
    twice = ref.log_prob_backward([1.0, 1.0], [1.0, 2.0, 3.0], [2, 2])
    assert_close(twice, 2 * once)


def test_log_prob_of_a_masked_word() -> None:
    z = np.array([1.0, NINF, 2.0])
    assert ref.log_prob(z, 1) == NINF
    grad = ref.log_prob_backward([1.0, 1.0], z, [1, 2])
    assert np.isfinite(grad).all()
    assert grad[1] == 0


def test_kl_backward() -> None:
    grad_p, grad_q = ref.kl_backward(G, Z, Q)
    assert_gradient(grad_p, lambda z: (G * ref.kl(z, Q)).sum(), Z)
    assert_gradient(grad_q, lambda q: (G * ref.kl(Z, q)).sum(), Q)
    value, (p, q) = autograd(
        lambda p, q: kl_divergence(Categorical(logits=p), Categorical(logits=q)), Z, Q, upstream=G
    )
    assert_close(ref.kl(Z, Q), value, rtol=1e-12)
    assert_close(grad_p, p, atol=1e-13)
    assert_close(grad_q, q, atol=1e-13)


def test_kl_with_masks() -> None:
    both = np.where(np.isneginf(MASKED), NINF, Q)
    assert (ref.kl(MASKED, both) >= 0).all()  # same words masked: finite
    assert np.isfinite(ref.kl(MASKED, Q)).all()  # p masks more than q: finite
    assert ref.kl([0.0, 0.0], [0.0, NINF]) == np.inf  # q masks more than p


@pytest.mark.parametrize("same_mask", [True, False])
def test_kl_backward_with_masks(same_mask: bool) -> None:
    q = np.where(np.isneginf(MASKED) & same_mask, NINF, Q)
    grad_p, grad_q = ref.kl_backward(G, MASKED, q)
    assert_gradient(grad_p, lambda z: (G * ref.kl(z, q)).sum(), MASKED)
    assert_gradient(grad_q, lambda q: (G * ref.kl(MASKED, q)).sum(), q)


@given(hnp.arrays(np.float64, (2, 5), elements=st.floats(-30, 30)))
def test_kl_is_never_negative_and_0_for_equals(z: Array) -> None:
    assert ref.kl(z[0], z[1]) >= -1e-13
    assert abs(ref.kl(z[0], z[0] + 3.0)) < 1e-13


def test_entropy_of_masked_rows_is_that_of_the_words_left() -> None:
    z = np.array([0.3, NINF, -0.4, NINF])
    assert_close(ref.entropy(z), ref.entropy(z[[0, 2]]), rtol=1e-15)
    assert ref.entropy([2.0, NINF]) == 0


# The one order


@given(tied_rows)
def test_order_is_logit_descending_then_id_ascending(z: Array) -> None:
    rows = z.reshape(-1, z.shape[-1])
    orders = ref.descending_order(z).reshape(rows.shape)
    for row, order in zip(rows, orders, strict=True):
        assert order.tolist() == sorted(range(len(row)), key=lambda v: (-row[v], v))


@given(tied_rows)
def test_argmax_top_k_and_rank_agree(z: Array) -> None:
    assume((z > NINF).any(axis=-1).all())
    size = z.shape[-1]
    values, ids = ref.top_k(z, size)
    assert (ref.argmax(z) == ids[..., 0]).all()
    assert (ref.rank(z, ref.argmax(z)) == 0).all()
    assert (ref.rank(z, ids) == np.arange(size)).all()
    assert (values == np.take_along_axis(z, ids, axis=-1)).all()


@given(tied_rows, st.data())
def test_rank_counts_the_words_before(z: Array, data: st.DataObject) -> None:
    assume((z > NINF).any(axis=-1).all())
    ids = data.draw(hnp.arrays(np.int64, z.shape[:-1], elements=st.integers(0, z.shape[-1] - 1)))
    mine = np.take_along_axis(z, ids[..., None], axis=-1)
    before = (z > mine) | ((z == mine) & (np.arange(z.shape[-1]) < ids[..., None]))
    assert (ref.rank(z, ids) == before.sum(axis=-1)).all()


@pytest.mark.parametrize("row", [[1.0, np.nan, 2.0], [-np.inf] * 3])
def test_a_row_without_a_best_word_gives_none(row: list[float]) -> None:
    z = np.array([[0.0, 2.0, 1.0], row])
    assert ref.argmax(z).tolist() == [1, -1]
    assert ref.rank(z, [2, 2]).tolist() == [1, -1]
    assert ref.top_k(z, 2)[1].tolist() == [[1, 2], [-1, -1]]


def test_top_k_values_as_torch() -> None:
    values, ids = ref.top_k(Z, 3)
    expected = torch.tensor(Z).topk(3)
    assert_close(values, expected.values)
    assert_close(float64(ids), expected.indices)


@pytest.mark.parametrize("k", [-1, 7])
def test_k_must_fit(k: int) -> None:
    with pytest.raises(ValueError, match=rf"k must be in \[0, 6\]; got {k}"):
        ref.top_k(Z, k)


def test_bad_ids_are_named() -> None:
    with pytest.raises(ValueError, match=r"ids must be in \[0, 6\); got 6 at index 1"):
        ref.log_prob(Z[0, 0], [0, 6])
    with pytest.raises(ValueError, match=r"ids must have shape \(2, 3\) or \(2, 3, 'K'\)"):
        ref.rank(Z, [0, 1])
    with pytest.raises(TypeError, match="ids must be integers; got float64"):
        ref.log_prob(Z[0, 0], 1.0)
