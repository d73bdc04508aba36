"""Logits with bias, scale and soft-capping, against torch and finite differences."""

import numpy as np
import pytest
import torch
from compare import Array, assert_close
from finite_differences import assert_gradient, autograd

from lmhead import reference as ref

HIDDEN = np.random.default_rng(0).normal(size=(2, 3, 4))
WEIGHT = np.random.default_rng(1).normal(size=(5, 4))
BIAS = np.random.default_rng(2).normal(size=5)
UPSTREAM = np.random.default_rng(3).normal(size=(2, 3, 5))


def _torch_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    softcap: float | None,
    scale: float,
) -> torch.Tensor:
    z = scale * (hidden @ weight.T + bias)
    return z if softcap is None else softcap * torch.tanh(z / softcap)


@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
@pytest.mark.parametrize("scale", [1.0, 0.0625, -2.0])
def test_logits_and_their_gradients(softcap: float | None, scale: float) -> None:
    def f(hidden: Array, weight: Array, bias: Array) -> Array:
        z = ref.head_logits(hidden, weight, bias=bias, softcap=softcap, scale=scale)
        return np.asarray((UPSTREAM * z).sum())

    grads = ref.head_logits_backward(
        UPSTREAM, HIDDEN, WEIGHT, bias=BIAS, softcap=softcap, scale=scale
    )
    assert_gradient(grads.x, lambda x: f(x, WEIGHT, BIAS), HIDDEN)
    assert_gradient(grads.weight, lambda w: f(HIDDEN, w, BIAS), WEIGHT)
    assert_gradient(grads.bias, lambda b: f(HIDDEN, WEIGHT, b), BIAS)

    z, torch_grads = autograd(
        lambda h, w, b: _torch_logits(h, w, b, softcap, scale),
        HIDDEN,
        WEIGHT,
        BIAS,
        upstream=UPSTREAM,
    )
    ours = ref.head_logits(HIDDEN, WEIGHT, bias=BIAS, softcap=softcap, scale=scale)
    assert_close(ours, z, atol=1e-13)
    for mine, theirs in zip(grads, torch_grads, strict=True):
        assert_close(mine, theirs, atol=1e-12)


def test_no_bias_is_a_bias_of_0() -> None:
    zero = np.zeros(5)
    assert_close(ref.head_logits(HIDDEN, WEIGHT), ref.head_logits(HIDDEN, WEIGHT, bias=zero))


def test_softcap_bounds_and_bends_little_near_0() -> None:
    z = np.array([-1e9, -0.01, 0.0, 0.01, 1e9])
    capped = ref.softcap(z, 30.0)
    assert capped[[0, 4]].tolist() == [-30.0, 30.0]
    assert_close(capped[1:4], z[1:4], atol=1e-8)


def test_softcap_never_revives_a_masked_word() -> None:
    z = np.array([1.0, -np.inf, 2.0])
    capped = ref.softcap(z, 30.0)
    assert capped[1] == -np.inf
    assert ref.softmax(capped)[1] == 0.0
    assert ref.softcap_backward(np.ones(3), z, 30.0)[1] == 0.0


def test_a_bias_of_minus_infinity_masks_a_word_all_the_way() -> None:
    bias = np.array([0.0, -np.inf, 0.0, 0.0, 0.0])
    z = ref.head_logits(HIDDEN, WEIGHT, bias=bias, softcap=5.0)
    assert (z[..., 1] == -np.inf).all()
    grads = ref.head_logits_backward(UPSTREAM, HIDDEN, WEIGHT, bias=bias, softcap=5.0)
    assert np.isfinite(grads.x).all()
    assert (grads.weight[1] == 0).all()
    assert grads.bias[1] == 0


@pytest.mark.parametrize("cap", [0.0, -1.0, float("nan")])
def test_cap_must_be_positive(cap: float) -> None:
    with pytest.raises(ValueError, match="softcap must be above 0; got"):
        ref.head_logits(HIDDEN, WEIGHT, softcap=cap)
    with pytest.raises(ValueError, match="softcap must be above 0; got"):
        ref.head_logits_backward(UPSTREAM, HIDDEN, WEIGHT, softcap=cap)
