"""The feed-forward sublayer: two linear layers at each position, with an activation between.

relu, gelu    down(activation(up(x)))
swiglu        down(silu(gate(x)) · up(x))
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from lmhead.nn.transformer_config import TransformerConfig

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swiglu": F.silu,
}


class FeedForward(nn.Module):
    """From D to `inner_size` to D.

    >>> import torch
    >>> config = TransformerConfig(vocab_size=9, hidden_size=8, num_attention_heads=2)
    >>> FeedForward(config)(torch.randn(3, 8)).shape
    torch.Size([3, 8])
    """

    gate: nn.Linear | None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.inner_size
        self.activation = _ACTIVATIONS[config.activation]
        self.gate = None
        if config.activation == "swiglu":
            self.gate = nn.Linear(size, inner, bias=config.bias)
        self.up = nn.Linear(size, inner, bias=config.bias)
        self.down = nn.Linear(inner, size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., D) for x (..., D)."""
        up = self.up(x)
        inner = self.activation(up) if self.gate is None else self.activation(self.gate(x)) * up
        out: Tensor = self.down(inner)
        return out
