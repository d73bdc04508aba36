"""Parameters of FSDP2 (`fully_shard`), which FSDP2 frees and gathers again between calls.

In the forward pass of a group of modules a parameter is a plain tensor, whose storage FSDP2 frees
afterwards. Lazy logits may be queried later: this module finds the sharded parameter, and gathers
it again for the duration of the question. Every rank must ask the same questions in the same order.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmhead import checks

_STATES = "torch.distributed._composable_state"


class Sharded(NamedTuple):
    """A parameter in its sharded form."""

    parameter: Any  # a DTensor
    kept: tuple[Any, ...]  # placements on the last mesh dimensions that FSDP2 does not gather

    def gather(self, like: Tensor) -> Tensor:
        """Return the entries that FSDP2 would gather, in the dtype it gathered them in before."""
        with torch.no_grad():
            local = self.parameter.detach().to(like.dtype)
            if not self.kept:
                gathered: Tensor = local.full_tensor()
            else:
                from torch.distributed.tensor import Replicate

                dimensions = local.device_mesh.ndim - len(self.kept)
                placements = [Replicate()] * dimensions + list(self.kept)
                gathered = local.redistribute(placements=placements).to_local()
        return gathered.requires_grad_(like.requires_grad)


def sharded_parameter(tensor: Tensor) -> Sharded | None:
    """Return the sharded parameter that a gathered tensor was made from, or None."""
    local = _memory(tensor)
    if local is None:
        return None
    storage = local.untyped_storage()._cdata
    for parameter in _parameters():
        gathered = getattr(parameter, "_unsharded_param", None)  # unset before the first forward
        memory = None if gathered is None else _memory(gathered)
        if memory is not None and memory.untyped_storage()._cdata == storage:
            kept = getattr(parameter, "_unsharded_dtensor_spec", None)
            return Sharded(parameter.sharded_param, () if kept is None else kept.placements)
    return None


def is_sharded_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter of FSDP2 in its sharded form."""
    return any(parameter.sharded_param is tensor for parameter in _parameters())


def is_freed(tensor: Tensor) -> bool:
    """Return whether the storage of a tensor was freed."""
    local = _memory(tensor)
    return local is not None and local.numel() > 0 and local.untyped_storage().nbytes() == 0


def _memory(tensor: Tensor) -> Tensor | None:
    """Return the tensor that holds the memory of a plain tensor or a DTensor; None for others."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local if checks.is_plain(local) and local.device.type != "meta" else None


def _parameters() -> list[Any]:
    """Return all parameters that FSDP2 manages in this process."""
    module = sys.modules.get(_STATES)
    if module is None:
        return []
    states = {id(s): s for ref in list(module._module_state_mapping.values()) if (s := ref())}
    return [
        parameter
        for state in states.values()
        for group in getattr(state, "_fsdp_param_groups", ())
        for parameter in group.fsdp_params
    ]
