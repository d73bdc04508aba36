"""Sampled losses: gradients by finite differences, and what they estimate."""

from typing import Any

import numpy as np
import pytest
from compare import assert_close
from finite_differences import assert_gradient

from lmhead import reference as ref

RNG = np.random.default_rng(0)
HIDDEN, WEIGHT = RNG.normal(size=(4, 3)), RNG.normal(size=(9, 3))
TARGETS, NEGATIVES = [0, 3, 3, 8], [1, 3, 5, 1, 0]
Q = ref.log_uniform(9)
LOSSES = [
    (ref.sampled_softmax, ref.sampled_softmax_backward),
    (ref.noise_contrastive, ref.noise_contrastive_backward),
]


@pytest.mark.parametrize("remove_hits", [True, False])
@pytest.mark.parametrize(("loss", "backward"), LOSSES, ids=["softmax", "nce"])
def test_gradients(loss: Any, backward: Any, remove_hits: bool) -> None:
    upstream = RNG.normal(size=4)
    rest = (TARGETS, NEGATIVES, Q)
    grads = backward(upstream, HIDDEN, WEIGHT, *rest, remove_hits=remove_hits)

    def total(h: Any, w: Any) -> Any:
        return (upstream * loss(h, w, *rest, remove_hits=remove_hits)).sum()

    assert_gradient(grads.hidden, lambda h: total(h, WEIGHT), HIDDEN)
    assert_gradient(grads.weight, lambda w: total(HIDDEN, w), WEIGHT)


def test_the_proposal_sums_to_1() -> None:
    for vocab in (1, 2, 1000):
        assert_close(ref.log_uniform(vocab).sum(), np.float64(1.0), rtol=1e-12)


def test_all_words_as_negatives_are_the_full_softmax() -> None:
    """With q uniform and every word drawn once, nothing is left to chance."""
    q = np.full(9, 1 / 9)
    loss = ref.sampled_softmax(HIDDEN, WEIGHT, TARGETS, np.arange(9), q)
    full = ref.linear_cross_entropy(HIDDEN, WEIGHT, TARGETS, reduction="none")
    assert_close(loss, np.asarray(full), atol=1e-12)


def test_nce_is_least_where_the_logits_are_log_probabilities() -> None:
    """In expectation over data p and noise q, its gradient vanishes at z = log p."""
    p, q = ref.softmax(RNG.normal(size=9)), ref.log_uniform(9)
    k = 4
    s = np.log(p) - np.log(k * q)
    # Σ_y p(y) (σ(s_y) - 1) + k Σ_w q(w) σ(s_w), word by word
    gradient = p * (ref.sigmoid(s) - 1) + k * q * ref.sigmoid(s)
    assert_close(gradient, np.zeros(9), atol=1e-15)
