"""Derivatives of derivatives, `torch.func`, `torch.compile` and checkpoints around the loss.

Liger 1338: compiled, the gradients were wrong without an error.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from compare import assert_close
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from contract.cases import Options, inputs, probabilities, run
from contract.implementations import TORCH, Implementation, every_implementation

CLASS_WEIGHT = torch.linspace(0.5, 2.0, 5, dtype=torch.float64)
OPTIONS: list[Options] = [
    {},
    {"reduction": "none"},
    {"label_smoothing": 0.2, "class_weight": CLASS_WEIGHT},
]
MAPPED: list[Options] = [
    {"label_smoothing": 0.2, "softcap": 3.0},
    {"scale": 0.5, "class_weight": CLASS_WEIGHT},
]


# A head that is made inside draws its first weights; nothing else is random.
vmap = partial(torch.func.vmap, randomness="same")


def loss_of(
    implementation: Implementation, targets: Tensor, **options: Any
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return implementation.loss(hidden, weight, targets, bias=bias, **options)

    return loss


def small() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Few numbers: finite differences take time in proportion to them."""
    hidden, weight, bias, targets = inputs(4, vocab=5, dim=2)
    targets[2] = -100
    return hidden, weight, bias, targets


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@every_implementation(needs={"transforms"})
def test_gradcheck_and_gradgradcheck(implementation: Implementation, options: Options) -> None:
    hidden, weight, bias, targets = small()
    tensors = tuple(t.clone().requires_grad_() for t in (hidden, weight, bias))
    loss = loss_of(implementation, targets, **options)
    assert torch.autograd.gradcheck(loss, tensors)
    assert torch.autograd.gradgradcheck(loss, tensors)


@pytest.mark.parametrize("options", MAPPED, ids="-".join)
@every_implementation(needs={"map", "transforms"})
def test_gradcheck_with_scale_and_softcap(implementation: Implementation, options: Options) -> None:
    test_gradcheck_and_gradgradcheck(implementation, options)


@every_implementation(needs={"transforms"})
def test_gradgradcheck_of_soft_targets(implementation: Implementation) -> None:
    hidden, weight, bias, _ = small()
    tensors = tuple(t.clone().requires_grad_() for t in (hidden, weight, bias))
    loss = loss_of(implementation, probabilities(4, 5))
    assert torch.autograd.gradcheck(loss, tensors)
    assert torch.autograd.gradgradcheck(loss, tensors)


@every_implementation(needs={"z_loss", "transforms"})
def test_gradgradcheck_of_z_loss(implementation: Implementation) -> None:
    hidden, weight, bias, targets = small()
    tensors = tuple(t.clone().requires_grad_() for t in (hidden, weight, bias))
    loss = loss_of(implementation, targets, z_loss=0.1, num_items=5)
    assert torch.autograd.gradcheck(loss, tensors)
    assert torch.autograd.gradgradcheck(loss, tensors)


@every_implementation(needs={"transforms"})
def test_create_graph_gives_a_gradient_penalty(implementation: Implementation) -> None:
    """|∂loss/∂hidden|² as a loss: its gradient, beside torch's."""
    penalties, gradients = [], []
    for each in (implementation, TORCH):
        hidden, weight, bias, targets = small()
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        loss = each.loss(leaves[0], leaves[1], targets, bias=leaves[2])
        (grad,) = torch.autograd.grad(loss, leaves[0], create_graph=True)
        penalty = loss + (grad**2).sum()
        penalty.backward()  # type: ignore[no-untyped-call]
        penalties.append(penalty)
        gradients.append([leaf.grad for leaf in leaves])
    assert_close(penalties[0], penalties[1], rtol=1e-11)
    for ours, torchs in zip(*gradients, strict=True):
        assert ours is not None
        assert torchs is not None
        assert_close(ours, torchs, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@every_implementation(needs={"transforms"})
def test_two_backwards_through_one_graph(implementation: Implementation, reduction: str) -> None:
    """`retain_graph`, with another upstream gradient the second time."""
    hidden, weight, bias, targets = inputs()
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    loss = implementation.loss(leaves[0], leaves[1], targets, bias=leaves[2], reduction=reduction)
    first = torch.linspace(1.0, 2.0, loss.numel(), dtype=torch.float64).view_as(loss)
    second = first.flip(0) if reduction == "none" else -3.0 * first
    for upstream in (first, second):
        grads = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
        expected = run(
            TORCH, hidden, weight, targets, bias=bias, reduction=reduction, upstream=upstream
        )
        for ours, torchs in zip(grads, expected.grads, strict=True):
            assert_close(ours, torchs, rtol=1e-10, atol=1e-12)


@every_implementation(needs={"transforms"})
def test_a_second_backward_without_retain_graph_is_refused(implementation: Implementation) -> None:
    hidden, weight, _, targets = inputs()
    loss = implementation.loss(hidden.requires_grad_(), weight, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()  # type: ignore[no-untyped-call]


@every_implementation(needs={"transforms"})
def test_a_weight_changed_before_backward_is_noticed(implementation: Implementation) -> None:
    """An optimizer step between forward and backward must raise, never mix old and new."""
    hidden, weight, _, targets = inputs()
    leaf = weight.clone().requires_grad_()
    before = run(TORCH, hidden, weight, targets, reduction="none")
    state = hidden.clone().requires_grad_()
    loss = implementation.loss(state, leaf, targets, reduction="none").sum()
    with torch.no_grad():
        leaf.mul_(2.0)
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:  # gradients computed in the forward pass are those of the old weight
        assert state.grad is not None
        assert_close(state.grad, before.grads.hidden, rtol=1e-10, atol=1e-12)


@every_implementation(needs={"transforms"})
def test_func_grad(implementation: Implementation) -> None:
    hidden, weight, bias, targets = inputs()
    grads = torch.func.grad(loss_of(implementation, targets), argnums=(0, 1, 2))(
        hidden, weight, bias
    )
    expected = run(TORCH, hidden, weight, targets, bias=bias)
    for ours, torchs in zip(grads, expected.grads, strict=True):
        assert_close(ours, torchs, rtol=1e-10, atol=1e-12)


@every_implementation(needs={"transforms"})
def test_func_grad_of_grad(implementation: Implementation) -> None:
    hidden, weight, bias, targets = small()

    def penalty(each: Implementation) -> Callable[[Tensor], Tensor]:
        def inner(state: Tensor) -> Tensor:
            return each.loss(state, weight, targets, bias=bias)

        return lambda state: (torch.func.grad(inner)(state) ** 2).sum()

    ours = torch.func.grad(penalty(implementation))(hidden)
    torchs = torch.func.grad(penalty(TORCH))(hidden)
    assert_close(ours, torchs, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@every_implementation(needs={"transforms"})
def test_vmap_over_the_batch(implementation: Implementation, reduction: str) -> None:
    hidden, weight, bias, targets = inputs(3, 4)

    def loss(state: Tensor, ids: Tensor) -> Tensor:
        return implementation.loss(state, weight, ids, bias=bias, reduction=reduction)

    mapped = vmap(loss)(hidden, targets)
    looped = torch.stack(
        [
            TORCH.loss(state, weight, ids, bias=bias, reduction=reduction)
            for state, ids in zip(hidden, targets, strict=True)
        ]
    )
    assert_close(mapped, looped, rtol=1e-11)


@every_implementation(needs={"transforms"})
def test_vmap_over_an_ensemble_of_heads(implementation: Implementation) -> None:
    hidden, _, _, targets = inputs()
    weights = torch.stack([inputs(seed=seed).weight for seed in range(3)])
    mapped = vmap(lambda w: implementation.loss(hidden, w, targets))(weights)
    looped = torch.stack([TORCH.loss(hidden, w, targets) for w in weights])
    assert_close(mapped, looped, rtol=1e-11)


@every_implementation(needs={"transforms"})
def test_gradients_per_sample(implementation: Implementation) -> None:
    """vmap(grad(loss)): one gradient of the weight for each sequence."""
    hidden, weight, _, targets = inputs(3, 4)

    def loss(w: Tensor, state: Tensor, ids: Tensor) -> Tensor:
        return implementation.loss(state, w, ids)

    mapped = vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weight, hidden, targets)
    looped = torch.stack(
        [
            run(TORCH, state, weight, ids).grads.weight
            for state, ids in zip(hidden, targets, strict=True)
        ]
    )
    assert_close(mapped, looped, rtol=1e-10, atol=1e-12)


# Where a graph breaks, dynamo itself looks at `.grad` of what is passed on.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(("reduction", "backend"), [("mean", "aot_eager"), ("none", "eager")])
@every_implementation(needs={"transforms"})
def test_compile_keeps_the_numbers(
    implementation: Implementation, reduction: str, backend: str
) -> None:
    torch.compiler.reset()
    hidden, weight, bias, targets = inputs()
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    compiled = torch.compile(loss_of(implementation, targets, reduction=reduction), backend=backend)
    loss = compiled(*(2.0 * leaf for leaf in leaves)) * 3.0
    upstream = torch.linspace(1.0, 2.0, loss.numel(), dtype=torch.float64).view_as(loss)
    grads = torch.autograd.grad(loss, leaves, upstream)
    expected = run(
        TORCH,
        2.0 * hidden,
        2.0 * weight,
        targets,
        bias=2.0 * bias,
        reduction=reduction,
        upstream=upstream,
    )
    assert_close(loss, 3.0 * expected.loss, rtol=1e-10)
    for ours, torchs in zip(grads, expected.grads, strict=True):
        assert_close(ours, 6.0 * torchs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [False, True])
@every_implementation(needs={"transforms"})
def test_checkpointing_keeps_the_gradients(
    implementation: Implementation, use_reentrant: bool
) -> None:
    hidden, weight, bias, targets = inputs()
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    loss = checkpoint(loss_of(implementation, targets), *leaves, use_reentrant=use_reentrant)
    loss.backward()
    expected = run(TORCH, hidden, weight, targets, bias=bias)
    for leaf, torchs in zip(leaves, expected.grads, strict=True):
        assert leaf.grad is not None
        assert_close(leaf.grad, torchs, rtol=1e-10, atol=1e-12)
