"""Chapter 6. Softmax regression: chapters 1 to 4 are a complete multi-class classifier.

A language model asks "which word comes next?" of a hidden state. A classifier asks "which kind of
flower is this?" of its measurements. The last step is the same: linear layer, softmax,
cross-entropy, gradient p - y. With nothing before the last step, the whole training fits here.

    loss(W, b) = mean_n -log softmax(x[n] Wᵀ + b)[y[n]]  +  l2 / (2N) · Σ W²

The loss is a bowl (convex): downhill from anywhere leads to the same bottom. The l2 term keeps W
finite when the classes can be separated without error; it leaves b alone.
"""

from typing import NamedTuple

import numpy as np

from lmhead.reference.arrays import Array, ArrayLike, Ids, floats, ids_below
from lmhead.reference.cross_entropy import linear_cross_entropy, linear_cross_entropy_backward
from lmhead.reference.linear import linear
from lmhead.reference.queries import argmax
from lmhead.reference.softmax import softmax

__all__ = ["SoftmaxRegression", "fit_softmax_regression", "regression_gradients", "regression_loss"]


class SoftmaxRegression(NamedTuple):
    """A fitted classifier: weight (classes, features) and bias (classes,)."""

    weight: Array
    bias: Array

    def probabilities(self, x: ArrayLike) -> Array:
        """Distribution over classes: p = softmax(x Wᵀ + b). Shape (N, features) to (N, classes).

        >>> SoftmaxRegression(np.eye(2), np.zeros(2)).probabilities([[1.0, 1.0]])
        array([[0.5, 0.5]])
        """
        return softmax(linear(x, self.weight, self.bias))

    def predict(self, x: ArrayLike) -> Ids:
        """The best class: argmax(x Wᵀ + b), which needs no softmax.

        >>> SoftmaxRegression(np.eye(2), np.zeros(2)).predict([[1.0, 0.0], [0.0, 1.0]])
        array([0, 1])
        """
        return argmax(linear(x, self.weight, self.bias))


def regression_loss(
    model: SoftmaxRegression, x: ArrayLike, targets: ArrayLike, *, l2: float = 1.0
) -> float:
    """The height of the bowl: mean cross-entropy + l2 / (2N) · Σ W².

    >>> flat = SoftmaxRegression(np.zeros((4, 2)), np.zeros(4))
    >>> round(regression_loss(flat, [[1.0, 2.0]], [3]), 4)  # log 4: no idea yet
    1.3863
    """
    n = floats(x).shape[0]
    surprise = linear_cross_entropy(x, model.weight, targets, bias=model.bias)
    return float(surprise + l2 / (2 * n) * (model.weight**2).sum())


def regression_gradients(
    model: SoftmaxRegression, x: ArrayLike, targets: ArrayLike, *, l2: float = 1.0
) -> SoftmaxRegression:
    """The slope of the bowl: ∂W = (P - Y)ᵀ X / N + l2 W / N,   ∂b = Σ_n (P - Y)[n] / N.

    >>> flat = SoftmaxRegression(np.zeros((2, 1)), np.zeros(2))
    >>> regression_gradients(flat, [[1.0]], [1]).weight
    array([[ 0.5],
           [-0.5]])
    """
    grads = linear_cross_entropy_backward(x, model.weight, targets, bias=model.bias)
    return SoftmaxRegression(grads.weight + l2 * model.weight / floats(x).shape[0], grads.bias)


def fit_softmax_regression(
    x: ArrayLike,
    targets: ArrayLike,
    classes: int,
    *,
    l2: float = 1.0,
    steps: int = 20_000,
    tolerance: float = 1e-6,
) -> SoftmaxRegression:
    """Gradient descent from zero: W ← W - η ∂W,   b ← b - η ∂b, until the slope is tiny.

    The step η = 1 / L never overshoots, where L bounds how fast the slope can change: half the
    largest eigenvalue of [X 1]ᵀ[X 1] / N (the Jacobian of softmax is at most 1/2), plus l2 / N.
    Scale the features to similar sizes first, or the bowl is a ravine and the walk is long.

    >>> x, y = [[-2.0], [-1.0], [1.0], [2.0]], [0, 0, 1, 1]
    >>> model = fit_softmax_regression(x, y, classes=2)
    >>> model.predict(x)
    array([0, 0, 1, 1])
    >>> model.weight.round(3)
    array([[-0.671],
           [ 0.671]])
    """
    x, targets = floats(x), ids_below(classes, targets, name="targets")
    with_one = np.column_stack([x, np.ones(len(x))])
    curvature = np.linalg.eigvalsh(with_one.T @ with_one / len(x))[-1] / 2 + l2 / len(x)
    model = SoftmaxRegression(np.zeros((classes, x.shape[1])), np.zeros(classes))
    for _ in range(steps):
        slope = regression_gradients(model, x, targets, l2=l2)
        if max(np.abs(slope.weight).max(), np.abs(slope.bias).max()) < tolerance:
            break
        model = SoftmaxRegression(
            model.weight - slope.weight / curvature, model.bias - slope.bias / curvature
        )
    return model
