"""Derivatives of every kind: first, second, per sample, of several answers at once, recomputed."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from lazy_and_dense import backward, ids
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from lmhead import LMHead, linear_cross_entropy, query

# Finite differences take time in proportion to the numbers that enter.
N, D, V = 4, 2, 5
# Several tiles even at this size: all logits take 160 bytes.
TILED = 64
TARGETS = torch.tensor([3, -100, 4, 0])

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smooth": {"label_smoothing": 0.1},
    "weighted": {"class_weight": torch.linspace(0.5, 2, V, dtype=torch.float64)},
    "z_loss": {"z_loss": 0.3},
    "softcap": {"softcap": 1.5, "scale": 0.7},
    "num_items": {"num_items": 11},
    "all": {
        "reduction": "none",
        "label_smoothing": 0.2,
        "class_weight": torch.linspace(0.5, 2, V, dtype=torch.float64),
        "z_loss": 0.1,
        "softcap": 2.0,
        "scale": 1.3,
    },
}


def leaves(n: int = N, d: int = D, v: int = V) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    return (
        torch.randn(n, d, dtype=torch.float64, requires_grad=True),
        torch.randn(v, d, dtype=torch.float64, requires_grad=True),
        torch.randn(v, dtype=torch.float64, requires_grad=True),
    )


def dense_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias), targets)


def assert_gradients(ours: Tensor, theirs: Tensor, of: tuple[Tensor, ...]) -> None:
    assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    for a, e in zip(torch.autograd.grad(ours, of), torch.autograd.grad(theirs, of), strict=True):
        assert_close(a, e, rtol=1e-11, atol=1e-13)


# --- first and second derivatives by finite differences -------------------------------------------


@pytest.mark.parametrize("max_bytes", [None, TILED])
@pytest.mark.parametrize("options", OPTIONS)
def test_loss_derivatives(options: str, max_bytes: int | None) -> None:
    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, TARGETS, bias=bias, max_bytes=max_bytes, **OPTIONS[options]
        )

    assert gradcheck(loss, leaves())
    assert gradgradcheck(loss, leaves())


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_derivatives_for_probabilities(smoothing: float) -> None:
    targets = torch.rand(N, V, dtype=torch.float64).softmax(-1)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, targets, label_smoothing=smoothing, max_bytes=TILED
        )

    assert gradcheck(loss, leaves()[:2])
    assert gradgradcheck(loss, leaves()[:2])


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("max_bytes", [None, TILED])
def test_query_derivatives(softcap: float | None, max_bytes: int | None) -> None:
    other = torch.randn(N, 2, dtype=torch.float64, requires_grad=True)
    other_weight = torch.randn(V, 2, dtype=torch.float64, requires_grad=True)

    def ask(
        hidden: Tensor, weight: Tensor, bias: Tensor, other: Tensor, other_weight: Tensor
    ) -> tuple[Tensor, ...]:
        answers = query(
            hidden,
            weight,
            bias=bias,
            softcap=softcap,
            log_prob=torch.tensor([[1, 2], [0, 0], [4, 3], [3, 3]]),
            entropy=True,
            logsumexp=True,
            kl_to=(other, other_weight),
            max_bytes=max_bytes,
        )
        wanted = (answers.log_prob, answers.entropy, answers.logsumexp, answers.kl)
        return tuple(answer for answer in wanted if answer is not None)

    inputs = (*leaves(), other, other_weight)
    assert len(ask(*inputs)) == 4
    assert gradcheck(ask, inputs)
    assert gradgradcheck(ask, inputs)


def test_several_answers_with_different_upstream_gradients() -> None:
    hidden, weight, bias = leaves(6, 5, 11)
    torch.manual_seed(2)
    a, b, c = torch.randn(3, 6, dtype=torch.float64)
    answers = query(
        hidden, weight, bias=bias, log_prob=ids(6, vocab=11), entropy=True, logsumexp=True
    )
    assert answers.log_prob is not None
    assert answers.entropy is not None
    assert answers.logsumexp is not None
    ours = a @ answers.log_prob + b @ answers.entropy.square() + c @ answers.logsumexp
    logits = F.linear(hidden, weight, bias)
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    picked = log_p.gather(-1, ids(6, vocab=11)[:, None])[:, 0]
    theirs = a @ picked + b @ entropy.square() + c @ logits.logsumexp(-1)
    assert_gradients(ours, theirs, (hidden, weight, bias))


def test_rows_with_different_upstream_gradients() -> None:
    hidden, weight, bias = leaves(6, 5, 11)
    upstream = torch.tensor([0.0, 1.0, -2.0, 3.0, 0.5, 7.0], dtype=torch.float64)
    targets = ids(6, vocab=11)
    ours = linear_cross_entropy(hidden, weight, targets, bias=bias, reduction="none")
    theirs = F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="none")
    assert_gradients(upstream @ ours, upstream @ theirs, (hidden, weight, bias))


# --- the graph used more than once ----------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_retained_graph_gives_the_same_gradient_again(reduction: Any) -> None:
    hidden, weight, _ = leaves()
    loss = linear_cross_entropy(hidden, weight, TARGETS, reduction=reduction).sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(3 * loss, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        assert_close(3 * a, b, rtol=1e-13)


def test_the_gradient_is_not_changed_by_who_receives_it() -> None:
    hidden, weight, _ = leaves()
    loss = linear_cross_entropy(hidden, weight, TARGETS)
    first = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    kept = first.clone()
    first.zero_()
    assert_close(torch.autograd.grad(loss, weight)[0], kept)


def test_a_gradient_penalty() -> None:
    hidden, weight, bias = leaves()

    def penalised(loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
        return loss + gradient.square().sum()

    ours = penalised(linear_cross_entropy(hidden, weight, TARGETS, bias=bias))
    theirs = penalised(dense_loss(hidden, weight, bias, TARGETS))
    assert_gradients(ours, theirs, (hidden, weight, bias))


def test_third_derivatives() -> None:
    hidden, weight, _ = leaves()

    def third(answer: Tensor) -> Tensor:
        (once,) = torch.autograd.grad(answer, hidden, create_graph=True)
        (twice,) = torch.autograd.grad((once**3).sum(), weight, create_graph=True)
        return torch.autograd.grad((twice**2).sum(), hidden)[0]

    assert_close(
        third(linear_cross_entropy(hidden, weight, TARGETS)),
        third(dense_loss(hidden, weight, None, TARGETS)),
        rtol=1e-9,
        atol=1e-12,
    )


def test_activation_checkpointing() -> None:
    hidden, weight, bias = leaves()

    def body(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(torch.tanh(hidden), weight, TARGETS, bias=bias)

    ours: Any = checkpoint(body, hidden, weight, bias, use_reentrant=False)
    theirs = dense_loss(torch.tanh(hidden), weight, bias, TARGETS)
    assert_gradients(ours, theirs, (hidden, weight, bias))


def test_activation_checkpointing_of_a_lazy_head() -> None:
    torch.manual_seed(0)
    head = LMHead(D, V, dtype=torch.float64)
    hidden, _, _ = leaves()
    ours: Any = checkpoint(
        lambda h: F.cross_entropy(head(torch.tanh(h)), TARGETS), hidden, use_reentrant=False
    )
    theirs = dense_loss(torch.tanh(hidden), head.weight, None, TARGETS)
    assert_gradients(ours, theirs, (hidden, head.weight))


def test_gradient_accumulation_equals_one_big_batch() -> None:
    hidden, weight, _ = leaves(12, 5, 11)
    targets = ids(12, vocab=11)
    targets[[0, 1, 7]] = -100
    kept = int((targets != -100).sum())
    for part in range(4):
        rows = slice(3 * part, 3 * part + 3)
        backward(linear_cross_entropy(hidden[rows], weight, targets[rows], num_items=kept))
    expected = torch.autograd.grad(dense_loss(hidden, weight, None, targets), (hidden, weight))
    for leaf, gradient in zip((hidden, weight), expected, strict=True):
        assert leaf.grad is not None
        assert_close(leaf.grad, gradient, rtol=1e-12, atol=1e-14)


def test_num_items_may_be_a_tensor() -> None:
    hidden, weight, _ = leaves()
    a = linear_cross_entropy(hidden, weight, TARGETS, num_items=torch.tensor(5))
    b = linear_cross_entropy(hidden, weight, TARGETS, num_items=5)
    assert_close(a, b)


def test_non_leaf_expanded_and_strided_inputs() -> None:
    hidden, weight, bias = leaves(6, 5, 11)
    targets = ids(3, vocab=11)
    wide = hidden[::2].expand(4, 3, 5).transpose(0, 1)  # (3, 4, 5), not contiguous
    many = targets[:, None].expand(3, 4)
    tall = torch.cat([weight, weight]).T.contiguous().T[:11]
    ours = linear_cross_entropy(wide, tall, many, bias=bias)
    theirs = dense_loss(wide.reshape(-1, 5), tall, bias, many.reshape(-1))
    assert_gradients(ours, theirs, (hidden, weight, bias))
