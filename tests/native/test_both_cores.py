"""What matters most, on the compiled core and on torch operations: float32 against the truth.

The contract runs in float64, where the core has no part; here it is float32 and bfloat16, with
enough tokens for the core to serve, in one tile and in many.
"""

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compare import assert_as_good_as, assert_close
from contract.cases import Inputs, inputs, run
from contract.implementations import HALF, TORCH, Functional, Implementation, Lazy
from oracle import Gradients

import lmhead
from lmhead import reference

pytestmark = pytest.mark.both_cores

TILES = 20_000  # bytes: tiles of some tokens and rows
OURS = pytest.mark.parametrize(
    "implementation",
    [Functional("functional"), Functional("functional-in-tiles", TILES), Lazy()],
    ids=lambda i: i.name,
)
MASKED = torch.zeros(301)
MASKED[7::10] = -torch.inf
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 5.0, "scale": 1.3},
    "smoothing": {"label_smoothing": 0.1, "class_weight": torch.rand(301) + 0.5},
    "ignored": {"ignore_index": 3, "reduction": "sum"},
}


def case(dtype: torch.dtype) -> Inputs:
    hidden, weight, bias, targets = inputs(37, vocab=301, dim=16, dtype=dtype)
    targets[::4] = 3
    return Inputs(hidden, weight, bias, targets)


@OURS
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_and_gradients(
    implementation: Implementation, options: dict[str, Any], dtype: torch.dtype
) -> None:
    given = case(dtype)
    options = {
        k: v.to(torch.float32 if dtype in HALF else dtype) if isinstance(v, torch.Tensor) else v
        for k, v in options.items()
    }
    ours = run(implementation, *given[:2], given.targets, bias=given.bias, **options)
    plain = run(TORCH, *given[:2], given.targets, bias=given.bias, **options)
    arguments = {"bias": given.bias, **options}
    truth = oracle.linear_cross_entropy(*given[:2], given.targets, **arguments)
    assert_as_good_as(ours.loss, plain.loss, truth, 1e-6, what="loss")
    grads = oracle.linear_cross_entropy_backward(*given[:2], given.targets, **arguments)
    for name, x, y, true in zip(Gradients._fields, ours.grads, plain.grads, grads, strict=True):
        assert_as_good_as(x, y, true, 1e-6, dtype=dtype, what=f"gradient of {name}")


@pytest.mark.parametrize("max_bytes", [None, TILES], ids=["one tile", "many tiles"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("masked", [False, True], ids=["all words", "masked words"])
def test_answers(max_bytes: int | None, softcap: float | None, masked: bool) -> None:
    hidden, weight, bias, targets = case(torch.float32)
    bias = bias + MASKED if masked else bias
    answers = lmhead.query(
        hidden,
        weight,
        bias=bias,
        softcap=softcap,
        log_prob=targets,
        rank=targets,
        entropy=True,
        logsumexp=True,
        argmax=True,
        top_k=7,
        max_bytes=max_bytes,
    )
    logits = oracle.head_logits(hidden, weight, bias=bias, softcap=softcap)
    ids = targets.numpy()
    true = {
        "log_prob": reference.log_prob(logits, ids),
        "entropy": reference.entropy(logits),
        "logsumexp": reference.logsumexp(logits),
    }
    for name, value in true.items():
        assert_close(getattr(answers, name), value, rtol=3e-6, atol=3e-6, what=name)
    assert answers.rank is not None
    assert answers.argmax is not None
    assert answers.top_k is not None
    np.testing.assert_array_equal(answers.rank.numpy(), reference.rank(logits, ids))
    np.testing.assert_array_equal(answers.argmax.numpy(), reference.argmax(logits))
    np.testing.assert_array_equal(answers.top_k.indices.numpy(), reference.top_k(logits, 7)[1])


@pytest.mark.parametrize("max_bytes", [None, TILES], ids=["one tile", "many tiles"])
def test_gradients_of_entropy(max_bytes: int | None) -> None:
    hidden, weight, bias, targets = case(torch.float32)
    hidden.requires_grad_()
    found = lmhead.query(
        hidden, weight, bias=bias, entropy=True, log_prob=targets, max_bytes=max_bytes
    )
    assert found.entropy is not None
    assert found.log_prob is not None
    (found.entropy + found.log_prob).sum().backward()
    logits = oracle.head_logits(hidden, weight, bias=bias)
    ones = np.ones(len(targets))
    grad_logits = reference.entropy_backward(ones, logits)
    grad_logits += reference.log_prob_backward(ones, logits, targets.numpy())
    truth = oracle.head_logits_backward(grad_logits, hidden, weight, bias=bias)
    assert_close(hidden.grad, truth.hidden, rtol=1e-4, atol=3e-5)


def test_the_filter_keeps_mass_and_errs_little() -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 16, generator=random).mul(1.5)
    weight = torch.randn(2000, 16, generator=random)
    targets = torch.randint(2000, (64,), generator=random)
    grads = {}
    for tail in (None, 0.02):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = lmhead.linear_cross_entropy(h, w, targets, grad_filter=tail)
        loss.backward()  # type: ignore[no-untyped-call]
        assert h.grad is not None
        assert w.grad is not None
        grads[tail] = h.grad, w.grad
    for exact, filtered in zip(grads[None], grads[0.02], strict=True):
        assert not torch.equal(exact, filtered), "nothing was filtered"
        assert float((exact - filtered).norm() / exact.norm()) < 0.02
