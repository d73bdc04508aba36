"""Expected results of tests: `lmhead.reference`, in float64, from the same tensors.

A tensor of any dtype holds exact numbers; they are taken as they are, and everything after is
float64. `Gradients` have the shapes of what they are gradients of; an absent bias has None.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from compare import Array, float64
from torch import Tensor

from lmhead import reference


class Gradients(NamedTuple):
    hidden: Any
    weight: Any
    bias: Any


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Array:
    """The loss as float64, 0-dim or (...) for reduction="none"."""
    return np.asarray(
        reference.linear_cross_entropy(
            float64(hidden), float64(weight), _targets(targets), **_numpy(options)
        ),
        dtype=np.float64,
    )


def linear_cross_entropy_backward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    grad_output: Tensor | float = 1.0,
    **options: Any,
) -> Gradients:
    """Gradients of sum(loss · grad_output)."""
    upstream = float64(grad_output) if isinstance(grad_output, Tensor) else grad_output
    grads = reference.linear_cross_entropy_backward(
        float64(hidden),
        float64(weight),
        _targets(targets),
        grad_output=upstream,
        **_numpy(options),
    )
    return Gradients(grads.x, grads.weight, None if options.get("bias") is None else grads.bias)


def head_logits(hidden: Tensor, weight: Tensor, **options: Any) -> Array:
    """Logits (..., V): for `softcap`, `scale` and `bias` see the reference."""
    return np.asarray(
        reference.head_logits(float64(hidden), float64(weight), **_numpy(options)), dtype=np.float64
    )


def head_logits_backward(
    grad_logits: Array, hidden: Tensor, weight: Tensor, **options: Any
) -> Gradients:
    """Gradients of sum(logits · grad_logits)."""
    grads = reference.head_logits_backward(
        grad_logits, float64(hidden), float64(weight), **_numpy(options)
    )
    return Gradients(grads.x, grads.weight, None if options.get("bias") is None else grads.bias)


def _targets(targets: Tensor) -> Any:
    return float64(targets) if targets.is_floating_point() else targets.numpy()


def _numpy(options: dict[str, Any]) -> dict[str, Any]:
    """Floating tensors as float64 arrays, integer ones (num_items) as integers."""
    return {
        name: (float64(value) if value.is_floating_point() else int(value))
        if isinstance(value, torch.Tensor)
        else value
        for name, value in options.items()
    }
