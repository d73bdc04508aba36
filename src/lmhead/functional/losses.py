"""`linear_cross_entropy`, and the same on a source.

In:  hidden (..., D), weight (V, D), targets (...) or (..., V), and options.
Out: the loss, a number or (...).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lmhead import checks
from lmhead.functional.inputs import make_source, result_dtype
from lmhead.loss import class_targets, probability_targets, reduce
from lmhead.sweep import GradFilter, Pointwise, Source
from lmhead.sweep.eager import eager

Reduction = Literal["mean", "sum", "none"]


@eager
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    z_loss: float = 0.0,
    num_items: int | Tensor | None = None,
    grad_filter: float | GradFilter | None = None,
    max_bytes: int | None = None,
) -> Tensor:
    """Cross-entropy of a linear layer's logits, which are never built.

    Equivalent to: F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, ...)

    Args:
        hidden: (..., D), float32, float64, bfloat16 or float16.
        weight: (V, D), of the same type. Half precisions are multiplied and summed in float32.
        targets: ids (...), or probabilities (..., V).
        bias: (V,); -inf masks a word: probability 0, no gradient, no share of label smoothing.
        class_weight: (V,), the weight of each target word.
        ignore_index: tokens with this target count for nothing and cost nothing.
        reduction: "mean" over the tokens that count, "sum", or "none" for (...).
        label_smoothing: ε in [0, 1]; ε of the target's mass is spread evenly over the words.
        softcap: logits become softcap · tanh(scale · x / softcap).
        scale: a factor of the logits, before soft-capping.
        z_loss: adds z_loss · logsumexp(logits)² to each token's loss.
        num_items: what "mean" divides by, for gradient accumulation: the tokens that count in all
            micro-batches together.
        grad_filter: τ in [0, 1), an approximation: the words that carry the last τ of the
            probability mass get their gradient from one rank-one term. About twice as fast on a
            trained model, the loss itself is exact. A `GradFilter` reports its error.
        max_bytes: bound on temporary memory; None for 128 MiB.

    Returns:
        A number, or (...) for "none"; float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: an argument of the wrong shape, type or range.

    With gradients and a reduction it costs three matrix products in all (four where `max_bytes`
    does not hold 32 tokens x V). The gradients are made in the forward pass, so call it under
    `torch.no_grad()` where they are not needed.

    >>> hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(50, 8)
    >>> targets = torch.tensor([3, 1, 4, -100, 5, 9])
    >>> loss = linear_cross_entropy(hidden, weight, targets)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(hidden @ weight.T, targets))
    True
    """
    checks.check_map(softcap, scale)
    source = make_source(hidden, weight, bias, Pointwise.of(softcap=softcap, scale=scale))
    return cross_entropy(
        source,
        hidden.shape[:-1],
        targets,
        class_weight=class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        num_items=num_items,
        grad_filter=grad_filter,
        max_bytes=max_bytes,
    ).to(result_dtype(hidden))


def cross_entropy(
    source: Source,
    lead: torch.Size,
    targets: Tensor,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_items: int | Tensor | None = None,
    grad_filter: float | GradFilter | None = None,
    max_bytes: int | None = None,
) -> Tensor:
    """`linear_cross_entropy` on a source whose rows have the shape `lead`; float64."""
    checks.check_number("z_loss", z_loss, low=0.0)
    checks.check_max_bytes(max_bytes)
    gradient_filter = as_filter(grad_filter)
    check_loss(
        lead,
        source.vocab,
        source.hiddens[0],
        targets,
        class_weight=class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    if num_items is not None and reduction != "mean":
        raise ValueError(
            f"num_items is what reduction='mean' divides by; got reduction={reduction!r}"
        )
    if targets.is_floating_point():
        weights = probability_targets(
            source,
            targets.reshape(-1, source.vocab),
            class_weight=class_weight,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            grad_filter=gradient_filter,
            max_bytes=max_bytes,
        )
    else:
        weights = class_targets(
            source,
            targets.reshape(-1).long(),
            ignore_index=ignore_index,
            class_weight=class_weight,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            grad_filter=gradient_filter,
            max_bytes=max_bytes,
        )
    return reduce(weights, reduction, num_items).reshape(lead if reduction == "none" else ())


def check_loss(
    lead: torch.Size,
    vocab: int,
    hidden: Tensor,
    targets: Tensor,
    *,
    class_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> None:
    """Targets and options of a cross-entropy over logits (*lead, vocab)."""
    checks.check_entries("class_weight", class_weight, vocab, hidden)
    checks.check_number("label_smoothing", label_smoothing, low=0.0, high=1.0)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none'; got {reduction!r}")
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets must be a torch.Tensor; got {type(targets).__name__}")
    checks.check_device("targets", targets, "hidden", hidden)
    if targets.is_floating_point():
        _check_shape("targets", targets, (*lead, vocab), "probabilities (..., V)")
    else:
        _check_shape("targets", targets, tuple(lead), "ids (...) for hidden (..., D)")
        checks.check_ids("targets", targets, vocab, ignore_index=ignore_index)


def as_filter(grad_filter: float | GradFilter | None) -> GradFilter | None:
    """A gradient filter from its tail mass; None for exact gradients."""
    tail_mass = grad_filter.tail_mass if isinstance(grad_filter, GradFilter) else grad_filter
    if tail_mass is None:
        return None
    checks.check_number("grad_filter", tail_mass, low=0.0, high=1.0)
    if tail_mass == 1.0:
        raise ValueError("grad_filter must be below 1; got 1.0, which would keep no word")
    if tail_mass == 0.0:
        return None
    return grad_filter if isinstance(grad_filter, GradFilter) else GradFilter(tail_mass)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, {meaning}; got {tuple(tensor.shape)}")
