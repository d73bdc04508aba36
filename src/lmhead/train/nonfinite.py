"""Find where inf or NaN first appears in a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


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
    first: list[str] = []

    def hook(name: str, module: nn.Module, output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        # Only dense tensors: a lazy one would be computed.
        if not first and any(type(part) is Tensor and not _finite(part) for part in parts):
            first.append(f"first in the output of {name or 'the model'} ({type(module).__name__})")

    handles = [
        module.register_forward_hook(lambda m, _, output, name=name: hook(name, m, output))
        for name, module in model.named_modules()
    ]
    try:
        yield first
    finally:
        for handle in handles:
            handle.remove()


def find_nonfinite(
    model: nn.Module, loss_of: Callable[[Any], Tensor], batches: Sequence[Any]
) -> str:
    """Repeat a training step; return where inf or NaN first appears, "" if nowhere.

    All of the step is repeated, for other ranks may take part in it.
    """
    places = [
        f"the weight {name} is not finite"
        for name, parameter in model.named_parameters()
        if not _finite(parameter)
    ]
    model.zero_grad(set_to_none=True)
    for number, batch in enumerate(batches, 1):
        batch_name = f"batch {number} of {len(batches)}"
        with watch_outputs(model) as outputs:
            loss = loss_of(batch)
        places += [f"{output}, {batch_name}" for output in outputs]
        if not _finite(loss):
            places.append(f"first in the loss of {batch_name}; its hidden states are finite")
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in reversed(list(model.named_parameters())):
            if parameter.grad is not None and not _finite(parameter.grad):
                places.append(f"first in the gradient of {name}, {batch_name}; the loss is finite")
    return places[0] if places else ""


def _finite(tensor: Any) -> bool:
    """Return whether a tensor, or this rank's part of it, is finite."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(local.detach().isfinite().all())
