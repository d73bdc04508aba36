"""`linear_cross_entropy`: the loss of a linear layer's logits, which are never built."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from lmhead import checks
from lmhead.checks import eager
from lmhead.parallel.linear_layer import linear_scores
from lmhead.scores.row_loss import CrossEntropy
from lmhead.sweep import GradFilter, Pointwise, accumulation_dtype, as_filter
from lmhead.sweep.small_batch import quick_loss

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
    """Return the cross-entropy of a linear layer's logits, without building them.

    Equivalent to: F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, ...)

    Args:
        hidden: (..., D), float32, float64, bfloat16 or float16.
        weight: (V, D), of the same type. Half precisions are multiplied and summed in float32.
        targets: ids (...), or probabilities (..., V).
        bias: (V,); -inf masks a token: probability 0, no gradient, no share of label smoothing.
        class_weight: (V,), the weight of each target token.
        ignore_index: rows with this target do not count, and cost nothing.
        reduction: "mean" over the rows that count, "sum", or "none" for (...).
        label_smoothing: ε in [0, 1]; ε of the target's mass is spread evenly over the vocabulary.
        softcap: logits become softcap · tanh(scale · x / softcap).
        scale: a factor of the logits, before soft-capping.
        z_loss: adds z_loss · logsumexp(logits)² to each row's loss.
        num_items: what "mean" divides by, for gradient accumulation: the rows that count in all
            micro-batches together.
        grad_filter: τ in [0, 1), an approximation: the tokens that carry the last τ of the
            probability mass get their gradient from one rank-one term. About twice as fast on a
            trained model, the loss itself is exact. A `GradFilter` reports its error.
        max_bytes: bound on temporary memory; None for 128 MiB.

    Returns:
        A number, or (...) for "none"; float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: an argument of the wrong shape, type or range.

    With gradients and a reduction it costs three matrix products in all (four where `max_bytes`
    does not hold 32 rows x V). The gradients are computed in the forward pass, so call it under
    `torch.no_grad()` where they are not needed.

    >>> import torch
    >>> hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(50, 8)
    >>> targets = torch.tensor([3, 1, 4, -100, 5, 9])
    >>> loss = linear_cross_entropy(hidden, weight, targets)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(hidden @ weight.T, targets))
    True
    """
    options = (bias, class_weight, softcap, num_items, grad_filter, max_bytes)
    numbers = (label_smoothing, scale, z_loss)
    plainly = all(option is None for option in options) and bool not in map(type, numbers)
    if plainly and numbers == (0.0, 1.0, 0.0):
        quick = quick_loss(hidden, weight, targets, ignore_index, reduction)
        if quick is not None:
            return quick
    checks.check_map(softcap, scale)
    checks.check_max_bytes(max_bytes)
    scores, plain = linear_scores(
        hidden,
        weight,
        bias,
        Pointwise.of(softcap=softcap, scale=scale),
        grad_filter=as_filter(grad_filter),
        max_bytes=max_bytes,
    )
    lead = plain.shape[:-1]
    loss = CrossEntropy.checked(
        lead,
        scores.vocab_size,
        plain,
        targets,
        class_weight=class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        num_items=num_items,
    )
    value = scores.cross_entropy(loss).reshape(lead if reduction == "none" else ())
    return value.to(accumulation_dtype(hidden.dtype))
