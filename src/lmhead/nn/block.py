"""One layer of a Transformer: attention, perhaps cross-attention, feed-forward.

What a sublayer f gives is added to what came in, so that it need only learn a correction:

    pre-norm    x + f(norm(x))      the sum itself is never normed, and gradients pass untouched
    post-norm   norm(x + f(x))      "Add & Norm", as drawn in the paper of 2017
"""

from __future__ import annotations

from torch import Tensor, nn

from lmhead.nn.attention import Attention, Look
from lmhead.nn.cache import KeyValue
from lmhead.nn.config import TransformerConfig
from lmhead.nn.feed_forward import FeedForward


def make_norm(config: TransformerConfig) -> nn.Module:
    """LayerNorm or RMSNorm of D coordinates."""
    if config.norm == "rms":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.bias)


class Block(nn.Module):
    """A layer of an encoder or, with `cross`, of a decoder that hears an encoder.

    >>> import torch
    >>> config = TransformerConfig(vocab_size=9, hidden_size=8, num_attention_heads=2)
    >>> x, (key, value) = Block(config)(torch.randn(1, 5, 8), Look(causal=True))
    >>> x.shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, config: TransformerConfig, *, cross: bool = False) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        if cross:
            self.cross_norm = make_norm(config)
            self.cross = Attention(config)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        look: Look,
        past: KeyValue | None = None,
        memory: tuple[KeyValue, Look] | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """Add what attention, cross-attention and feed-forward have to say.

        Args:
            x: (B, T, D).
            look: who sees whom among all tokens, old and new.
            past: keys and values of the tokens before x.
            memory: what `cross.read` made of the encoder's states, and who sees what of it.

        Returns:
            (B, T, D); keys and values of all tokens.
        """
        heard, present = self.attention(self._before(self.attention_norm, x), look, past)
        x = self._add(self.attention_norm, x, heard)
        if memory is not None:
            heard = self.cross.ask(self._before(self.cross_norm, x), *memory)
            x = self._add(self.cross_norm, x, heard)
        thought = self.feed_forward(self._before(self.feed_forward_norm, x))
        return self._add(self.feed_forward_norm, x, thought), present

    def _before(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x) if self.norm_first else x

    def _add(self, norm: nn.Module, x: Tensor, change: Tensor) -> Tensor:
        x = x + self.dropout(change)
        return x if self.norm_first else norm(x)
