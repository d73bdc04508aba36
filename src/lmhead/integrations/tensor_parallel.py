"""A tensor-parallel style of `transformers` that keeps the logits of the output layer lazy.

    from_pretrained(..., tp_plan={"lm_head": lmhead.integrations.tensor_parallel.register()})

replaces "colwise_gather_output", which gathers the logits of all ranks on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from lmhead.head import LMHead

NAME = "lmhead_vocab"


class VocabParallelLayer(TensorParallelLayer):  # type: ignore[misc]
    """Split the weight of an output layer over its vocabulary, and call an `LMHead` on it."""

    def shard_param(self, module: Any, param: str, mesh: Any) -> None:
        """Replace a parameter by this rank's slice."""
        parameter = module._parameters.get(param)
        if parameter is not None:
            split = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            module._parameters[param] = torch.nn.Parameter(split, parameter.requires_grad)

    def install_forward(self, module: Any, mesh: Any) -> Any:  # noqa: ARG002
        """Make the module return lazy logits of the whole vocabulary."""

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            head = module if isinstance(module, LMHead) else LMHead.from_linear(module)
            return LMHead.forward(head, hidden)

        module.forward = forward
        return module


def register() -> str:
    """Register the style with `transformers`, and return its name for a `tp_plan`."""
    ALL_PARALLEL_STYLES.register(NAME, VocabParallelLayer())
    return NAME
