"""The body of a Llama: a `DecoderBody` with rotary positions, RMSNorm and SwiGLU, without biases.

x = embedding(ids)
x = x + attention(norm(x))        rotary positions, grouped queries
x = x + feed_forward(norm(x))     down(silu(gate(x)) · up(x))
hidden = norm(x)                  after the last block
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lmhead.nn.transformer import DecoderBody
from lmhead.nn.transformer_config import DecoderConfig, Pairs


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama; the names are those of Hugging Face's `LlamaConfig`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None  # d; None for hidden_size / num_attention_heads
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    # "half" (Hugging Face) or "interleaved" (llama2.c), see `TransformerConfig`
    rotary: Pairs = "half"
    # d/2 numbers by which the angles are divided; None for ones
    rope_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        self.decoder()  # validates

    def decoder(self) -> DecoderConfig:
        """Return the same configuration as a `DecoderConfig`."""
        same = {name: value for name, value in vars(self).items() if name != "rms_norm_eps"}
        kinds: dict[str, Any] = {"position": "rotary", "norm": "rms", "activation": "swiglu"}
        return DecoderConfig(**same, **kinds, norm_eps=self.rms_norm_eps)

    @property
    def head_size(self) -> int:
        """The size d of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


class LlamaBody(DecoderBody):
    """A Llama without its head.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> body = LlamaBody(LlamaConfig(50, 16, 24, 2, 4, 2))
    >>> hidden, cache = body(torch.tensor([[3, 1, 4]]))
    >>> hidden.shape, cache.length
    (torch.Size([1, 3, 16]), 3)
    """

    norm: nn.RMSNorm

    def __init__(self, config: LlamaConfig, *, embedding: nn.Embedding | None = None) -> None:
        super().__init__(config.decoder(), embedding=embedding)
        self.config = config
