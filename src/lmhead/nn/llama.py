"""The body of a Llama: a `DecoderBody` with rotary positions, RMSNorm and SwiGLU, without biases.

x = embedding(ids)
x = x + attention(norm(x))        rotary positions, grouped queries
x = x + feed_forward(norm(x))     down(silu(gate(x)) · up(x))
hidden = norm(x)                  after the last block
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lmhead.nn.transformer import DecoderBody
from lmhead.nn.transformer_config import DecoderConfig, Pairs


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama; the names are those of Hugging Face's `LlamaConfig`.

    Attributes:
        head_dim: d; None for hidden_size / num_attention_heads.
        rope_factors: d/2 numbers by which the angles are divided; None for ones.
        rotary: "half" (Hugging Face) or "interleaved" (llama2.c), see `TransformerConfig`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    rotary: Pairs = "half"
    rope_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        self.decoder()  # validates

    def decoder(self) -> DecoderConfig:
        """Return the same configuration as a `DecoderConfig`."""
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            position="rotary",
            rotary=self.rotary,
            rope_theta=self.rope_theta,
            rope_factors=self.rope_factors,
            norm="rms",
            norm_eps=self.rms_norm_eps,
            activation="swiglu",
        )

    @property
    def head_size(self) -> int:
        """The size d of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


class LlamaBody(DecoderBody):
    """A Llama without its head.

    Args:
        config: the sizes.
        embedding: (V, D), to be shared; None for a new one.

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
