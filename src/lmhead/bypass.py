"""Catch packages that multiply with the weight of an `LMHead` themselves, and so change its logits.

TRL's trainers never call the output layer: they hand `lm_head.weight` to a function of their own,
which ignores a head's softcap, scale and low-rank delta. If such a head's weight is passed to that
function, it raises an error, unless `lmhead.integrations.trl.patch()` was called.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

# TRL's autograd functions that take the weight: (module, name).
FUNCTIONS = [
    ("trl.trainer.utils", "_ChunkedLogProbFunction"),
    ("trl.trainer.distillation_trainer", "ChunkedDivergenceFunction"),
]
_heads: WeakSet[nn.Module] = WeakSet()


def watch(head: nn.Module) -> None:
    """Register a head with a softcap, scale or delta; guard TRL's functions if TRL is loaded."""
    _heads.add(head)
    for module, name in FUNCTIONS:
        owner = sys.modules.get(module)
        function = getattr(owner, name, None)
        if function is not None and not hasattr(function, "respects_heads"):
            setattr(owner, name, _Guard(function))


def head_of(weight: Any) -> Any:
    """Return the registered head with this weight, or None."""
    return next((h for h in _heads if h.weight is weight and not h.is_plain), None)


class _Guard:
    """Wrap TRL's autograd function: raise if one of its tensors is the weight of such a head."""

    respects_heads = True

    def __init__(self, function: Any) -> None:
        self.function = function

    def apply(self, *args: Any) -> Any:
        for argument in args:
            if isinstance(argument, Tensor) and (head := head_of(argument)) is not None:
                raise RuntimeError(
                    f"TRL multiplies with the weight of the output layer itself and would ignore "
                    f"what {head} adds to it. Call lmhead.integrations.trl.patch() before training"
                )
        return self.function.apply(*args)
