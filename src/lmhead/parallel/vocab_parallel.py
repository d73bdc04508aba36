"""`VocabParallel`: split a head over the ranks of a device mesh, by `parallelize_module`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle


class VocabParallel(ParallelStyle):
    """Split the vocabulary of an `LMHead` over a mesh; its logits stay lazy and are not gathered.

    Equivalent to: `ColwiseParallel(output_layouts=Shard(-1))` and `loss_parallel()`, for every
    question and not only for the loss

    Args:
        input_layouts: how plain hidden states are placed: `Replicate()`, or `Shard(1)` if each rank
            has a part of the sequence, as after `SequenceParallel`. Ignored for a `DTensor`.

    Use it next to other styles: `parallelize_module(model, mesh, {"norm": SequenceParallel(),
    "lm_head": VocabParallel()})`. Every rank gets logits of the whole sequence and vocabulary.
    """

    def __init__(self, *, input_layouts: Placement | None = None) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            raise TypeError(
                "VocabParallel must be applied to an LMHead; got an adapter of PEFT around it. "
                'Name the layer itself: {"lm_head.base_layer": VocabParallel()}'
            )
        if not hasattr(module, "scores"):
            raise TypeError(
                f"VocabParallel must be applied to an LMHead; got {type(module).__name__}. Put one "
                "in its place with LMHead.from_linear"
            )
        return distribute_module(module, device_mesh, _split, self._place)

    def _place(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:  # noqa: ARG002
        (hidden,) = inputs
        plain = isinstance(hidden, torch.Tensor) and not isinstance(hidden, DTensor)
        if plain and not self.input_layouts.is_replicate():
            hidden = DTensor.from_local(hidden, mesh, [self.input_layouts], run_check=False)
        return (hidden,)


def _split(name: str, module: nn.Module, mesh: DeviceMesh) -> None:  # noqa: ARG001
    """Replace parameters (V, ...) by slices, and the projection of a low-rank delta by copies."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor):
            continue
        placement = Replicate() if key == "low_rank_a" else Shard(0)
        split = nn.Parameter(
            distribute_tensor(parameter, mesh, [placement]), requires_grad=parameter.requires_grad
        )
        module.register_parameter(key, split)
