"""The tensors of a linear layer, as a sweep takes them.

In:  hidden (..., D), weight (V, D), bias (V,).
Out: a `Source` of rows (N, V), in autocast's type where that is on; the type of results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmhead import checks
from lmhead.sweep import Pointwise, Source, accumulation_dtype


def make_source(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, pointwise: Pointwise
) -> Source:
    """Check the tensors of a linear layer and take them as autocast would."""
    checks.check_hidden_and_weight(*autocast(hidden, weight))
    checks.check_vector("bias", bias, weight)
    hidden, weight = autocast(hidden, weight)
    return Source((hidden.reshape(-1, hidden.shape[-1]),), (weight,), bias, pointwise)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as `F.linear` would take them: in autocast's type where that is on."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype)
        if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
        else t
        for t in tensors
    )


def result_dtype(hidden: Tensor) -> torch.dtype:
    """float64 for float64, else float32: as autocast has it for losses."""
    return accumulation_dtype(hidden.dtype)
