"""Gradients by central finite differences, which every backward is compared with.

And gradients by torch's autograd, for functions that torch has too.

    ∂f/∂x[i] ≈ (f(x + h e[i]) - f(x - h e[i])) / 2h

In float64 with h = 1e-5 the error is about 1e-10 for functions of ordinary size: far below what a
wrong formula gives, far above rounding.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from compare import Array, assert_close, float64
from torch import Tensor


def numerical_gradient(f: Callable[[Array], Any], x: Array, *, step: float = 1e-5) -> Array:
    """The gradient at x of a function that returns one number. A masked x[i] = -inf gets 0."""
    x = np.array(x, dtype=np.float64)
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        here = x[i]
        x[i] = here + step
        above = float(f(x))
        x[i] = here - step
        below = float(f(x))
        x[i] = here
        gradient[i] = (above - below) / (2 * step)
    return gradient


def assert_gradient(
    gradient: Array, f: Callable[[Array], Any], x: Array, *, atol: float = 1e-8, what: str = "grad"
) -> None:
    """`gradient` is that of f at x, as finite differences see it."""
    assert_close(gradient, numerical_gradient(f, x), rtol=1e-6, atol=atol, what=what)


def autograd(
    f: Callable[..., Tensor], *inputs: Array, upstream: Array | float = 1.0
) -> tuple[Array, list[Array]]:
    """The value of f in torch float64, and the gradients of Σ upstream · f for each input."""
    tensors = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in inputs]
    value = f(*tensors)
    total = (value * torch.as_tensor(upstream, dtype=torch.float64)).sum()
    return float64(value), [float64(grad) for grad in torch.autograd.grad(total, tensors)]
