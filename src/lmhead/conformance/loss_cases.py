"""Cases for losses: linear layer and cross-entropy, forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmhead import reference
from lmhead.conformance.case import case, expect, expect_close, gradient_of
from lmhead.conformance.implementations import Implementation

ROWS, VOCAB, DIM = 11, 37, 8


class Inputs(NamedTuple):
    """Odd sizes, unequal rows: flat or even inputs hide errors."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor


def inputs(seed: int = 0) -> Inputs:
    """Return float32 tensors: hidden (N, D), weight (V, D), bias (V,), targets (N,)."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, DIM, generator=random) * torch.linspace(0.2, 3.0, ROWS)[:, None]
    weight = torch.randn(VOCAB, DIM, generator=random)
    bias = torch.randn(VOCAB, generator=random)
    return Inputs(hidden, weight, bias, torch.randint(VOCAB, (ROWS,), generator=random))


def check(
    implementation: Implementation,
    tensors: Inputs,
    *,
    upstream: Tensor | None = None,
    frozen: str = "",
    **options: Any,
) -> None:
    """Compare the loss and the gradients of hidden states, weight and bias with the reference."""
    given = {"hidden": tensors.hidden, "weight": tensors.weight}
    if options.get("bias") is not None:
        given["bias"] = options["bias"]
    given = {name: t.detach().clone().requires_grad_(name != frozen) for name, t in given.items()}
    leaves = {name: t for name, t in given.items() if name != frozen}
    if "bias" in leaves:
        options["bias"] = leaves["bias"]
    loss = implementation.loss(given["hidden"], given["weight"], tensors.targets, **options)
    plain = {name: _numpy(value) for name, value in options.items()}
    args = (_numpy(tensors.hidden), _numpy(tensors.weight), tensors.targets.numpy())
    expect_close(loss, reference.linear_cross_entropy(*args, **plain), "loss")
    loss.backward(upstream)  # type: ignore[no-untyped-call]
    up = 1.0 if upstream is None else _numpy(upstream)
    true = reference.linear_cross_entropy_backward(*args, grad_output=up, **plain)
    truths = {"hidden": true.x, "weight": true.weight, "bias": true.bias}
    for name, leaf in leaves.items():
        expect_close(gradient_of(leaf, name), truths[name], f"gradient of {name}")


def _numpy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().double().numpy() if value.is_floating_point() else value.numpy()


def half_ignored() -> Inputs:
    """Return inputs with 5 of 11 rows ignored."""
    tensors = inputs()
    tensors.targets[[0, 3, 4, 9, 10]] = -100
    return tensors


def masked_inputs() -> Inputs:
    """Return inputs whose last 7 tokens are masked by a bias of -inf, and are no target."""
    tensors = inputs()
    tensors.bias[30:] = -torch.inf
    return tensors._replace(targets=tensors.targets.remainder(30))


@case("loss", "F.cross_entropy")
def mean_sum_and_none(implementation: Implementation) -> None:
    """Loss and gradients for each reduction."""
    for reduction in ("mean", "sum"):
        check(implementation, inputs(), reduction=reduction)
    check(implementation, inputs(), reduction="none", upstream=torch.ones(ROWS))


@case("loss", "F.cross_entropy")
def bias_of_the_head(implementation: Implementation) -> None:
    """The bias enters the loss and has a gradient."""
    tensors = inputs()
    check(implementation, tensors, bias=tensors.bias)


@case("loss", "Liger 968, 872, 488")
def different_upstream_gradients(implementation: Implementation) -> None:
    """reduction="none" with another upstream gradient for each row."""
    check(implementation, inputs(), reduction="none", upstream=torch.linspace(-1.0, 2.0, ROWS))


@case("loss", "F.cross_entropy")
def every_row_ignored(implementation: Implementation) -> None:
    """A batch of ignored rows: the sum is 0 and no gradient is NaN."""
    tensors = inputs()
    tensors.targets.fill_(-100)
    hidden = tensors.hidden.clone().requires_grad_()
    weight = tensors.weight.clone().requires_grad_()
    loss = implementation.loss(hidden, weight, tensors.targets, reduction="sum")
    expect(float(loss.detach()) == 0.0, f"the sum is {float(loss.detach())}, should be 0")
    loss.backward()  # type: ignore[no-untyped-call]
    for name, leaf in (("hidden", hidden), ("weight", weight)):
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        expect(bool((grad == 0).all()), f"gradient of {name} is not 0")


@case("loss", "F.cross_entropy")
def mean_of_ignored_rows_keeps_gradients_finite(implementation: Implementation) -> None:
    """The mean over nothing may be NaN or 0, but no gradient is NaN."""
    tensors = inputs()
    tensors.targets.fill_(-100)
    hidden = tensors.hidden.clone().requires_grad_()
    implementation.loss(hidden, tensors.weight, tensors.targets).backward()  # type: ignore[no-untyped-call]
    grad = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
    expect(bool(grad.isfinite().all()), "a gradient is NaN")


@case("loss", "F.cross_entropy")
def ignored_rows(implementation: Implementation) -> None:
    """Ignored rows cost nothing and get no gradient."""
    check(implementation, half_ignored())


@case("loss", "torch 73205")
def ignored_rows_with_smoothing(implementation: Implementation) -> None:
    """Label smoothing does not count ignored rows."""
    check(implementation, half_ignored(), label_smoothing=0.1)


@case("loss", "torch 104776")
def ignored_rows_with_class_weights(implementation: Implementation) -> None:
    """The mean with class weights divides by the weights of the rows that count."""
    weights = torch.linspace(0.5, 2.0, VOCAB)
    check(implementation, half_ignored(), class_weight=weights)
    check(implementation, half_ignored(), class_weight=weights, label_smoothing=0.1)


@case("loss", "F.cross_entropy")
def another_ignore_index(implementation: Implementation) -> None:
    """ignore_index may be a token of the vocabulary; it keeps its probability mass."""
    tensors = inputs()
    tensors.targets[[1, 5]] = 7
    check(implementation, tensors, ignore_index=7)


@case("loss", "F.cross_entropy")
def nan_in_an_ignored_row(implementation: Implementation) -> None:
    """A NaN hidden state of an ignored row does not reach the loss."""
    tensors = half_ignored()
    clean = implementation.loss(tensors.hidden, tensors.weight, tensors.targets)
    tensors.hidden[tensors.targets == -100] = torch.nan
    expect_close(
        implementation.loss(tensors.hidden, tensors.weight, tensors.targets), clean.numpy(), "loss"
    )


@case("loss", "lmhead docs/lazy.md")
def smoothing_with_a_masked_token(implementation: Implementation) -> None:
    """A token masked with -inf gets no share of label smoothing: the loss is finite."""
    tensors = masked_inputs()
    check(implementation, tensors, bias=tensors.bias, label_smoothing=0.1)


@case("loss", "unsloth 10616")
def softcap_with_masked_tokens(implementation: Implementation) -> None:
    """Soft-capping does not revive padding columns masked with -inf."""
    tensors = masked_inputs()
    check(implementation, tensors, bias=tensors.bias, softcap=3.0)


@case("loss", "Gemma 2")
def softcap(implementation: Implementation) -> None:
    """Soft-capped logits, forward and backward."""
    check(implementation, inputs(), softcap=5.0)


@case("loss", "transformers 34191, 35203; Liger 802")
def micro_batches_add_up(implementation: Implementation) -> None:
    """Micro-batches of unequal size with num_items sum to the mean of the whole batch."""
    tensors = half_ignored()
    full_batch = implementation.loss(tensors.hidden, tensors.weight, tensors.targets)
    count = int((tensors.targets != -100).sum())
    total = torch.zeros(())
    for rows in (slice(0, 3), slice(3, 5), slice(5, ROWS)):
        total = total + implementation.loss(
            tensors.hidden[rows], tensors.weight, tensors.targets[rows], num_items=count
        )
    expect_close(total, full_batch.numpy(), "sum of the parts")


@case("loss", "PaLM")
def z_loss(implementation: Implementation) -> None:
    """z_loss · logsumexp² is added to the loss, with its gradient."""
    check(implementation, inputs(), z_loss=0.01)


@case("loss", "Liger: gradients gated on the input")
def frozen_hidden_states(implementation: Implementation) -> None:
    """Only the weight is trained: it gets its gradient."""
    check(implementation, inputs(), frozen="hidden")


@case("loss", "Liger: gradients gated on the input")
def frozen_weight(implementation: Implementation) -> None:
    """Only the hidden states are trained: they get their gradient."""
    check(implementation, inputs(), frozen="weight")


@case("loss", "Liger 512, 827; CCE 14")
def half_precision_weight_gradient(implementation: Implementation) -> None:
    """The weight gradient of bfloat16 tensors over many rows errs as one rounding does."""
    random = torch.Generator().manual_seed(5)
    hidden = torch.randn(512, 16, generator=random).bfloat16().requires_grad_()
    weight = torch.randn(29, 16, generator=random).bfloat16().requires_grad_()
    targets = torch.randint(29, (512,), generator=random)
    implementation.loss(hidden, weight, targets, reduction="sum").backward()  # type: ignore[no-untyped-call]
    args = (_numpy(hidden), _numpy(weight), targets.numpy())
    truth = reference.linear_cross_entropy_backward(*args, reduction="sum").weight
    off = np.linalg.norm(_numpy(gradient_of(weight, "weight")) - truth) / np.linalg.norm(truth)
    expect(float(off) < 0.006, f"weight gradient off by {off:.4f} of its norm, should be < 0.006")


@case("loss", "Liger 1338")
def second_derivative(implementation: Implementation) -> None:
    """A gradient penalty (create_graph) has the right gradient, or is refused."""
    tensors = inputs()
    hidden = tensors.hidden.double().requires_grad_()
    weight = tensors.weight.double()
    loss = implementation.loss(hidden, weight, tensors.targets)
    try:
        (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
        (second,) = torch.autograd.grad((grad**2).sum(), hidden)
    except RuntimeError:
        return  # refused
    other = tensors.hidden.double().requires_grad_()
    plain = torch.nn.functional.cross_entropy(other @ weight.T, tensors.targets)
    (first,) = torch.autograd.grad(plain, other, create_graph=True)
    (truth,) = torch.autograd.grad((first**2).sum(), other)
    expect_close(second, truth.numpy(), "second derivative", atol=1e-7)


@case("loss", "numerical stability")
def large_logits(implementation: Implementation) -> None:
    """Logits in the tens of thousands do not overflow."""
    tensors = inputs()
    hidden = tensors.hidden * 1e4
    args = (_numpy(hidden), _numpy(tensors.weight), tensors.targets.numpy())
    loss = implementation.loss(hidden, tensors.weight, tensors.targets)
    expect_close(loss, reference.linear_cross_entropy(*args), "loss")


@case("loss", "numerical stability")
def confident_rows(implementation: Implementation) -> None:
    """A loss of 4.5e-5 is not lost in the rounding of logits near 1000."""
    hidden, targets = torch.ones(5, 1), torch.zeros(5, dtype=torch.int64)
    weight = torch.tensor([[1000.0], [990.0], [-1000.0], [0.0]])
    loss = implementation.loss(hidden, weight, targets, reduction="sum")
    truth = 5 * np.log1p(np.exp(-10.0))
    expect_close(loss, truth, "loss", rtol=1e-2, atol=0.0)


@case("loss", "TRL; SkyRL 2259")
def entropy_with_masked_tokens(implementation: Implementation) -> None:
    """The entropy and its gradient are finite where a token has probability 0."""
    tensors = inputs()
    tensors.bias[3:9] = -torch.inf
    hidden = tensors.hidden.clone().requires_grad_()
    entropy = implementation.entropy(hidden, tensors.weight, tensors.bias)
    logits = reference.head_logits(
        _numpy(tensors.hidden), _numpy(tensors.weight), bias=_numpy(tensors.bias)
    )
    expect_close(entropy, reference.entropy(logits), "entropy")
    (2.0 * entropy).sum().backward()  # type: ignore[no-untyped-call]
    to_logits = reference.entropy_backward(np.full(ROWS, 2.0), logits)
    truth = reference.head_logits_backward(
        to_logits, _numpy(tensors.hidden), _numpy(tensors.weight), bias=_numpy(tensors.bias)
    ).x
    expect_close(gradient_of(hidden, "hidden"), truth, "gradient of the entropy")
