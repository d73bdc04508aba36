"""Find where inf or NaN first appears in a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lmhead.train.task import Task


class NonFiniteError(ArithmeticError):
    """A loss or gradient is inf or NaN."""


@contextmanager
def watch_outputs(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list that gets one entry when a module's output is not finite: the first such module.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> with watch_outputs(model) as found:
    ...     _ = model(torch.full((1, 2), torch.inf))
    >>> found
    ['first in the output of 0 (Linear)']
    """
    found: list[str] = []

    def hook(name: str, module: nn.Module, output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        # Only dense tensors: a lazy one would be computed.
        if not found and any(type(part) is Tensor and not _finite(part) for part in parts):
            found.append(f"first in the output of {name or 'the model'} ({type(module).__name__})")

    handles = [
        module.register_forward_hook(lambda m, _, output, name=name: hook(name, m, output))
        for name, module in model.named_modules()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def find_nonfinite(task: Task, batches: Sequence[Any], num_items: int) -> str:
    """Repeat a training step; return where inf or NaN first appears, "" if nowhere."""
    for name, parameter in task.model.named_parameters():
        if not _finite(parameter):
            return f"the weight {name} is not finite"
    task.model.zero_grad(set_to_none=True)
    for number, batch in enumerate(batches, 1):
        which = f"batch {number} of {len(batches)}"
        with watch_outputs(task.model) as found:
            loss = task.loss(batch, num_items)
        if found:
            return f"{found[0]}, {which}"
        if not _finite(loss):
            return f"first in the loss of {which}; its hidden states are finite"
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in reversed(list(task.model.named_parameters())):
            if parameter.grad is not None and not _finite(parameter.grad):
                return f"first in the gradient of {name}, {which}; the loss is finite"
    return ""


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())
