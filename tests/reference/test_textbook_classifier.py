"""Softmax regression finds what scikit-learn finds, on flowers and on wines."""

import numpy as np
import pytest
from compare import assert_close
from finite_differences import assert_gradient
from sklearn.datasets import load_iris, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from lmhead import reference as ref

LOADERS = {"iris": load_iris, "wine": load_wine}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("l2", [1.0, 10.0])
def test_same_coefficients_as_scikit_learn(name: str, l2: float) -> None:
    x, y = LOADERS[name](return_X_y=True)
    x = StandardScaler().fit_transform(x)
    model = ref.fit_softmax_regression(x, y, classes=3, l2=l2)
    peer = LogisticRegression(C=1 / l2, tol=1e-10, max_iter=10_000).fit(x, y)
    assert_close(model.weight, peer.coef_, atol=1e-3)
    assert_close(model.bias, peer.intercept_, atol=1e-3)
    assert_close(model.probabilities(x), peer.predict_proba(x), atol=1e-4)
    assert (model.predict(x) == peer.predict(x)).all()
    assert (model.predict(x) == y).mean() > 0.9


def test_gradients() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(7, 3)), rng.integers(4, size=7)
    model = ref.SoftmaxRegression(rng.normal(size=(4, 3)), rng.normal(size=4))
    slope = ref.regression_gradients(model, x, y, l2=0.6)
    assert_gradient(
        slope.weight,
        lambda w: ref.regression_loss(model._replace(weight=w), x, y, l2=0.6),
        model.weight,
    )
    assert_gradient(
        slope.bias,
        lambda b: ref.regression_loss(model._replace(bias=b), x, y, l2=0.6),
        model.bias,
    )


def test_every_step_goes_down() -> None:
    x, y = load_iris(return_X_y=True)
    losses = []
    for steps in range(12):
        model = ref.fit_softmax_regression(x, y, classes=3, steps=steps)
        losses.append(ref.regression_loss(model, x, y))
    assert losses[0] == pytest.approx(np.log(3))
    assert (np.diff(losses) < 0).all()


def test_targets_are_looked_at() -> None:
    with pytest.raises(ValueError, match=r"targets must be in \[0, 2\); got 2 at index 1"):
        ref.fit_softmax_regression(np.eye(2), [0, 2], classes=2)
