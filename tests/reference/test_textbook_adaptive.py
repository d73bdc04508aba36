"""Adaptive softmax: a distribution, torch's own, with gradients that finite differences confirm."""

from typing import Any

import numpy as np
import torch
from compare import assert_close, float64
from finite_differences import assert_gradient

from lmhead import reference as ref


def test_it_is_torchs() -> None:
    torch.manual_seed(0)
    theirs = torch.nn.AdaptiveLogSoftmaxWithLoss(6, 20, [5, 11], div_value=2.0, head_bias=True)
    theirs, hidden = theirs.double(), torch.randn(4, 6, dtype=torch.float64)
    tails: Any = theirs.tail
    clusters = [ref.Cluster(float64(p.weight), float64(w.weight)) for p, w in tails]
    head_weight, head_bias = float64(theirs.head.weight), float64(theirs.head.bias)
    log_p = ref.adaptive_log_probs(float64(hidden), head_weight, clusters, head_bias)
    assert_close(log_p, theirs.log_prob(hidden), atol=1e-12)
    assert_close(np.exp(log_p).sum(1), np.ones(4), atol=1e-12)


def test_gradients() -> None:
    rng = np.random.default_rng(0)
    hidden, head_weight = rng.normal(size=(3, 4)), rng.normal(size=(5, 4))
    head_bias, upstream = rng.normal(size=5), rng.normal(size=(3, 9))
    given = [
        ref.Cluster(rng.normal(size=(d, 4)), rng.normal(size=(n, d)), rng.normal(size=n))
        for n, d in ((2, 3), (4, 2))
    ]
    grads = ref.adaptive_log_probs_backward(upstream, hidden, head_weight, given, head_bias)

    def total(*, at: str, c: int = 0, x: Any = None) -> float:
        values = {"hidden": hidden, "head_weight": head_weight, "head_bias": head_bias}
        clusters = list(given)
        if at in values:
            values[at] = x
        else:
            clusters[c] = given[c]._replace(**{at: x})
        log_p = ref.adaptive_log_probs(
            values["hidden"], values["head_weight"], clusters, values["head_bias"]
        )
        return float((upstream * log_p).sum())

    for name, x in (("hidden", hidden), ("head_weight", head_weight), ("head_bias", head_bias)):
        assert_gradient(getattr(grads, name), lambda x, n=name: total(at=n, x=x), x, what=name)  # type: ignore[misc]
    for c, cluster in enumerate(given):
        for name in ref.Cluster._fields:
            assert_gradient(
                getattr(grads.clusters[c], name),
                lambda x, c=c, n=name: total(at=n, c=c, x=x),  # type: ignore[misc]
                getattr(cluster, name),
                what=f"{name} of cluster {c}",
            )
