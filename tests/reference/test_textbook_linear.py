"""The linear layer against torch: figures, gradients, activations, initial weights."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from compare import Array, assert_close, float64
from finite_differences import assert_gradient, autograd
from torch import nn
from torch.nn import functional as F

import lmhead
from lmhead import reference as ref

SHAPES = [(4,), (3, 4), (2, 3, 4)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def _seeded_linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 3)


def test_nn_linear_under_seed_0_has_the_figures_everyone_sees() -> None:
    layer = _seeded_linear()
    weight = [[-0.0053, 0.3793], [-0.5820, -0.5204], [-0.2723, 0.1896]]
    assert_close(float64(layer.weight).round(4), np.array(weight))
    assert_close(float64(layer.bias).round(4), np.array([-0.0140, 0.5607, -0.0628]))


def test_linear_gives_the_figures_of_nn_linear() -> None:
    layer = _seeded_linear()
    weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()
    y = ref.linear([[0, 1], [2, 3]], weight, bias)
    expected = [[0.3653, 0.0403, 0.1269], [1.1134, -2.1645, -0.0386]]
    assert_close(y.round(4), np.array(expected))


def test_lm_head_starts_as_nn_linear_does() -> None:
    layer = _seeded_linear()
    torch.manual_seed(0)
    head = lmhead.LMHead(2, 3, bias=True)
    assert head.bias is not None
    assert torch.equal(head.weight, layer.weight)
    assert torch.equal(head.bias, layer.bias)


def test_initial_weights_are_those_of_nn_linear() -> None:
    """The same formula fed by torch's own random numbers gives torch's own weights."""

    def uniform(low: float, high: float, size: tuple[int, ...]) -> Array:
        drawn: Array = torch.empty(size).uniform_(low, high).double().numpy()
        return drawn

    torch.manual_seed(3)
    layer = nn.Linear(5, 7)
    torch.manual_seed(3)
    weight = ref.kaiming_uniform(7, 5, uniform=uniform)
    bias = ref.bias_uniform(7, 5, uniform=uniform)
    assert_close(weight, layer.weight, rtol=1e-6)
    assert_close(bias, layer.bias, rtol=1e-6)


@pytest.mark.parametrize("a", [0.0, 1.0, 5**0.5])
def test_kaiming_bound_for_any_slope(a: float) -> None:
    bounds: list[float] = []

    def uniform(low: float, high: float, size: tuple[int, ...]) -> Array:
        bounds.extend((low, high))
        return np.zeros(size)

    ref.kaiming_uniform(4, 6, uniform=uniform, a=a)
    bound = nn.init.calculate_gain("leaky_relu", a) * (3 / 6) ** 0.5
    assert bounds == pytest.approx([-bound, bound])


@pytest.mark.parametrize("shape", SHAPES)
def test_linear_backward(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x, weight, bias = rng.normal(size=shape), rng.normal(size=(5, 4)), rng.normal(size=5)
    g = rng.normal(size=(*shape[:-1], 5))
    grads = ref.linear_backward(g, x, weight)
    assert_gradient(grads.x, lambda x: (g * ref.linear(x, weight, bias)).sum(), x)
    assert_gradient(grads.weight, lambda w: (g * ref.linear(x, w, bias)).sum(), weight)
    assert_gradient(grads.bias, lambda b: (g * ref.linear(x, weight, b)).sum(), bias)

    y, torch_grads = autograd(F.linear, x, weight, bias, upstream=g)
    assert_close(ref.linear(x, weight, bias), y, atol=1e-14)
    for ours, theirs in zip(grads, torch_grads, strict=True):
        assert_close(ours, theirs, atol=1e-13)


def test_the_bias_gradient_is_the_sum_over_rows() -> None:
    grads = ref.linear_backward([[1, 2], [10, 20], [100, 200]], np.ones((3, 1)), np.ones((2, 1)))
    assert grads.bias.tolist() == [111, 222]


def test_wrong_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x must end in 4 features; got shape \(3,\)"):
        ref.linear(np.ones(3), np.ones((5, 4)))


@pytest.mark.parametrize(
    ("ours", "backward", "theirs"),
    [
        (ref.relu, ref.relu_backward, F.relu),
        (ref.sigmoid, ref.sigmoid_backward, torch.sigmoid),
        (ref.gelu, ref.gelu_backward, F.gelu),
    ],
    ids=["relu", "sigmoid", "gelu"],
)
def test_activations(
    ours: Callable[[Array], Array],
    backward: Callable[[Array, Array], Array],
    theirs: Callable[[torch.Tensor], torch.Tensor],
    rng: np.random.Generator,
) -> None:
    x, g = rng.normal(size=(3, 5)) * 3, rng.normal(size=(3, 5))
    y, (grad,) = autograd(theirs, x, upstream=g)
    assert_close(ours(x), y, atol=1e-14)
    assert_close(backward(g, x), grad, atol=1e-14)
    assert_gradient(backward(g, x), lambda x: (g * ours(x)).sum(), x)


def test_sigmoid_is_the_softmax_of_x_and_0() -> None:
    x = np.linspace(-800, 800, 9)
    pairs = np.stack([x, np.zeros_like(x)], axis=-1)
    assert_close(ref.sigmoid(x), ref.softmax(pairs)[:, 0], rtol=1e-14)
