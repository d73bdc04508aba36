"""F.cross_entropy of few float32 logits, which has a shorter way than other losses."""

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close

from lmhead import LMHead

N, D, V = 6, 8, 11


@pytest.fixture
def head() -> LMHead:
    torch.manual_seed(0)
    return LMHead(D, V)


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_value_and_gradients(
    head: LMHead, reduction: str, ignored: bool, create_graph: bool
) -> None:
    hidden, targets = torch.randn(N, D, requires_grad=True), ids(N)
    if ignored:
        targets[2] = -100
    leaves = [hidden, head.weight]
    found: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for z, into in ((head(hidden), found), (F.linear(hidden, head.weight), expected)):
        loss = F.cross_entropy(z, targets.clone(), reduction=reduction)
        grads = torch.autograd.grad(loss, leaves, create_graph=create_graph)
        into += [loss, *grads]
        if create_graph:
            into += torch.autograd.grad(
                torch.stack([g.square().sum() for g in grads]).sum(), leaves
            )
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert_close(a.detach(), b.detach(), rtol=1e-4, atol=1e-5)


def test_the_callers_targets_may_be_reused(head: LMHead) -> None:
    hidden, targets = torch.randn(N, D, requires_grad=True), ids(N)
    loss = F.cross_entropy(head(hidden), targets)
    (expected,) = torch.autograd.grad(
        F.cross_entropy(F.linear(hidden, head.weight), targets), hidden
    )
    targets.zero_()
    (found,) = torch.autograd.grad(loss, hidden, create_graph=True)
    assert_close(found.detach(), expected, rtol=1e-4, atol=1e-6)


def test_square_logits_with_the_vocabulary_first_are_not_confused(head: LMHead) -> None:
    hidden, targets = torch.randn(V, D), ids(V)
    with torch.no_grad():
        found = F.cross_entropy(head(hidden).T, targets)
        expected = F.cross_entropy(F.linear(hidden, head.weight).T, targets)
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_retained_gradient_is_that_of_the_logits(head: LMHead) -> None:
    hidden, targets = torch.randn(N, D, requires_grad=True), ids(N)
    logits, dense = head(hidden), F.linear(hidden, head.weight)
    logits.retain_grad()
    dense.retain_grad()
    torch.autograd.backward(F.cross_entropy(logits, targets))
    torch.autograd.backward(F.cross_entropy(dense, targets))
    assert logits.grad is not None
    assert dense.grad is not None
    assert_close(logits.grad.materialize(), dense.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("grad", [False, True])
def test_a_modified_weight_is_an_error(head: LMHead, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        logits = head(torch.randn(N, D))
        head.weight.data[0] += 1.0
        with pytest.raises(RuntimeError, match="the weight of these lazy logits was modified"):
            F.cross_entropy(logits, ids(N))


@pytest.mark.parametrize("wrong", [V, -1])
def test_a_target_out_of_range_is_an_error(head: LMHead, wrong: int) -> None:
    targets = ids(N)
    targets[3] = wrong
    with pytest.raises(ValueError, match=f"got {wrong} at index 3"):
        F.cross_entropy(head(torch.randn(N, D)), targets)


def test_infinite_hidden_states_are_left_to_the_sweep(head: LMHead) -> None:
    hidden = torch.randn(N, D)
    hidden[1, 2] = float("inf")
    found = F.cross_entropy(head(hidden), ids(N))
    assert not found.isfinite()
