"""Inputs for the contract, and a run of one implementation on them: the loss and every gradient."""

from typing import Any, NamedTuple, TypeAlias

import oracle
import torch
from compare import assert_close
from oracle import Gradients
from torch import Tensor

from contract.implementations import Implementation

Options: TypeAlias = dict[str, Any]


class Inputs(NamedTuple):
    """Odd sizes, unequal rows: flat or even inputs hide errors."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor


class Outcome(NamedTuple):
    loss: Tensor
    grads: Gradients


def inputs(
    *rows: int, vocab: int = 37, dim: int = 5, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Inputs:
    """Random hidden (*rows, D), weight (V, D), bias (V,), targets (*rows); 11 rows by default."""
    rows = rows or (11,)
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*rows, dim, generator=random, dtype=torch.float64)
    hidden *= torch.linspace(0.2, 3.0, hidden[..., 0].numel()).view(*rows, 1)
    weight = torch.randn(vocab, dim, generator=random, dtype=torch.float64)
    bias = torch.randn(vocab, generator=random, dtype=torch.float64)
    targets = torch.randint(vocab, rows, generator=random)
    return Inputs(hidden.to(dtype), weight.to(dtype), bias.to(dtype), targets)


def probabilities(*shape: int, seed: int = 1) -> Tensor:
    """Soft targets (..., V), float64."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64).mul(2).softmax(-1)


def run(
    implementation: Implementation,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    upstream: Tensor | None = None,
    **options: Any,
) -> Outcome:
    """The loss and its gradients; `upstream` is the gradient that reaches the loss, 1 if absent."""
    hidden, weight = (t.detach().requires_grad_() for t in (hidden, weight))
    if bias is not None:
        bias = options["bias"] = bias.detach().requires_grad_()
    loss = implementation.loss(hidden, weight, targets, **options)
    loss.backward(torch.ones_like(loss) if upstream is None else upstream)  # type: ignore[no-untyped-call]
    return Outcome(
        loss.detach(), Gradients(hidden.grad, weight.grad, None if bias is None else bias.grad)
    )


def assert_true(
    outcome: Outcome,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    upstream: Tensor | float = 1.0,
    rtol: float = 1e-10,
    atol: float = 1e-12,
    equal_nan: bool = False,
    **options: Any,
) -> None:
    """The loss and each gradient are those of the reference."""
    truth = oracle.linear_cross_entropy(hidden, weight, targets, **options)
    assert_close(outcome.loss, truth, rtol=rtol, atol=atol, equal_nan=equal_nan, what="loss")
    grads = oracle.linear_cross_entropy_backward(
        hidden, weight, targets, grad_output=upstream, **options
    )
    for name, ours, true in zip(Gradients._fields, outcome.grads, grads, strict=True):
        if true is None:
            assert ours is None
        else:
            assert_close(ours, true, rtol=rtol, atol=atol, what=f"gradient of {name}")
