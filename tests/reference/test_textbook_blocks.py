"""The blocks around the head, as torch has them: norm, Add & Norm, attention, feed-forward."""

from typing import Any

import numpy as np
import pytest
import torch
from compare import Array, assert_close
from finite_differences import assert_gradient, autograd
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.nn import functional as F

from lmhead import reference as ref

rng = np.random.default_rng(9)
X, G = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3, 4))
GAMMA, BETA = rng.normal(size=4), rng.normal(size=4)
UP, UP_BIAS = rng.normal(size=(8, 4)), rng.normal(size=8)
DOWN, DOWN_BIAS = rng.normal(size=(4, 8)), rng.normal(size=4)


# Layer norm


def test_layer_norm_as_torch() -> None:
    y, torch_grads = autograd(
        lambda x, gamma, beta: F.layer_norm(x, (4,), gamma, beta), X, GAMMA, BETA, upstream=G
    )
    assert_close(ref.layer_norm(X, GAMMA, BETA), y, atol=1e-13)
    for ours, theirs in zip(ref.layer_norm_backward(G, X, GAMMA), torch_grads, strict=True):
        assert_close(ours, theirs, atol=1e-13)


def test_layer_norm_backward() -> None:
    grads = ref.layer_norm_backward(G, X, GAMMA, eps=0.1)
    assert_gradient(grads.x, lambda x: (G * ref.layer_norm(x, GAMMA, BETA, eps=0.1)).sum(), X)
    assert_gradient(grads.gamma, lambda c: (G * ref.layer_norm(X, c, BETA, eps=0.1)).sum(), GAMMA)
    assert_gradient(grads.beta, lambda b: (G * ref.layer_norm(X, GAMMA, b, eps=0.1)).sum(), BETA)


@given(
    hnp.arrays(np.float64, (3, 6), elements=st.integers(-50, 50).map(float)),
    st.floats(-10, 10),
    st.floats(0.5, 10),
)
def test_layer_norm_standardises_softmax_distributes(x: Array, shift: float, scale: float) -> None:
    x[:, 0] = 100.0  # no constant vector: it has no direction to standardise
    y = ref.layer_norm(x, eps=0.0)
    assert_close(y.mean(axis=-1), np.zeros(3), atol=1e-13)
    assert_close(y.var(axis=-1), np.ones(3), rtol=1e-13)
    assert_close(ref.layer_norm(scale * x + shift, eps=0.0), y, atol=1e-11)
    assert (y < 0).any()  # no distribution
    assert_close(ref.softmax(x).sum(axis=-1), np.ones(3), rtol=1e-14)


# Add & Norm


def _sublayer(x: Array) -> Array:
    return ref.feed_forward(x, UP, DOWN, up_bias=UP_BIAS, down_bias=DOWN_BIAS)


def _sublayer_backward(grad: Array, x: Array) -> Array:
    return ref.feed_forward_backward(grad, x, UP, DOWN, up_bias=UP_BIAS).x


def _torch_sublayer(x: torch.Tensor) -> torch.Tensor:
    up = F.gelu(F.linear(x, torch.tensor(UP), torch.tensor(UP_BIAS)))
    return F.linear(up, torch.tensor(DOWN), torch.tensor(DOWN_BIAS))


def test_post_norm() -> None:
    y, torch_grads = autograd(
        lambda x, gamma, beta: F.layer_norm(x + _torch_sublayer(x), (4,), gamma, beta),
        X,
        GAMMA,
        BETA,
        upstream=G,
    )
    assert_close(ref.post_norm(X, _sublayer, GAMMA, BETA), y, atol=1e-12)
    grads = ref.post_norm_backward(G, X, _sublayer, _sublayer_backward, GAMMA)
    for ours, theirs in zip(grads, torch_grads, strict=True):
        assert_close(ours, theirs, atol=1e-12)
    assert_gradient(grads.x, lambda x: (G * ref.post_norm(x, _sublayer, GAMMA, BETA)).sum(), X)


def test_pre_norm() -> None:
    y, torch_grads = autograd(
        lambda x, gamma, beta: x + _torch_sublayer(F.layer_norm(x, (4,), gamma, beta)),
        X,
        GAMMA,
        BETA,
        upstream=G,
    )
    assert_close(ref.pre_norm(X, _sublayer, GAMMA, BETA), y, atol=1e-12)
    grads = ref.pre_norm_backward(G, X, _sublayer_backward, GAMMA, BETA)
    for ours, theirs in zip(grads, torch_grads, strict=True):
        assert_close(ours, theirs, atol=1e-12)
    assert_gradient(grads.x, lambda x: (G * ref.pre_norm(x, _sublayer, GAMMA, BETA)).sum(), X)


# Attention

QUERY, KEY = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 5, 4))
VALUE, GY = rng.normal(size=(2, 5, 6)), rng.normal(size=(2, 3, 6))
SOME = np.array([[1, 0, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]], dtype=bool)
NOWHERE = np.array([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]], dtype=bool)


@pytest.mark.parametrize("mask", [None, SOME, NOWHERE], ids=["all", "some", "nowhere"])
def test_attention(mask: Any) -> None:
    y, torch_grads = autograd(
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=None if mask is None else torch.tensor(mask)
        ),
        QUERY,
        KEY,
        VALUE,
        upstream=GY,
    )
    assert_close(ref.attention(QUERY, KEY, VALUE, mask), y, atol=1e-13)
    grads = ref.attention_backward(GY, QUERY, KEY, VALUE, mask)
    for ours, theirs in zip(grads, torch_grads, strict=True):
        assert_close(ours, theirs, atol=1e-13)

    def f(q: Array, k: Array, v: Array) -> Any:
        return (GY * ref.attention(q, k, v, mask)).sum()

    assert_gradient(grads.query, lambda q: f(q, KEY, VALUE), QUERY)
    assert_gradient(grads.key, lambda k: f(QUERY, k, VALUE), KEY)
    assert_gradient(grads.value, lambda v: f(QUERY, KEY, v), VALUE)


def test_attention_shares_are_distributions() -> None:
    shares = ref.attention_weights(QUERY, KEY, SOME)
    assert_close(shares.sum(axis=-1), np.ones((2, 3)), rtol=1e-14)
    assert not shares[:, ~SOME].any()


def test_causal_attention_does_not_see_the_future() -> None:
    x = rng.normal(size=(5, 4))
    mask = ref.causal_mask(5)
    before = ref.attention(x, x, x, mask)
    x[3:] += 1.0
    after = ref.attention(x, x, x, mask)
    assert_close(after[:3], before[:3])
    assert np.abs(after[3:] - before[3:]).min() > 1e-3
    tensor = torch.tensor(x)
    expected = F.scaled_dot_product_attention(tensor, tensor, tensor, is_causal=True)
    assert_close(after, expected, atol=1e-13)


# Feed-forward


@pytest.mark.parametrize(
    ("name", "bend"), [("relu", F.relu), ("gelu", F.gelu), ("sigmoid", torch.sigmoid)]
)
def test_feed_forward(name: str, bend: Any) -> None:
    y, torch_grads = autograd(
        lambda x, up, ub, down, db: F.linear(bend(F.linear(x, up, ub)), down, db),
        X,
        UP,
        UP_BIAS,
        DOWN,
        DOWN_BIAS,
        upstream=G,
    )
    biases: Any = {"up_bias": UP_BIAS, "down_bias": DOWN_BIAS}
    assert_close(ref.feed_forward(X, UP, DOWN, activation=name, **biases), y, atol=1e-12)
    grads = ref.feed_forward_backward(G, X, UP, DOWN, up_bias=UP_BIAS, activation=name)
    for ours, theirs in zip(grads, torch_grads, strict=True):
        assert_close(ours, theirs, atol=1e-12)

    def f(x: Array) -> Any:
        return (G * ref.feed_forward(x, UP, DOWN, activation=name, **biases)).sum()

    assert_gradient(grads.x, f, X)


def test_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match=r"activation must be one of .*; got 'tan'"):
        ref.feed_forward(X, UP, DOWN, activation="tan")
