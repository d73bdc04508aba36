"""One layer of a Transformer: attention, cross-attention if there is an encoder, feed-forward.

The output of a sublayer f is added to its input (a residual connection):

    pre-norm    x + f(norm(x))      the residual itself is never normalized
    post-norm   norm(x + f(x))      "Add & Norm", as in the paper of 2017
"""

from __future__ import annotations

from torch import Tensor, nn

from lmhead.nn.cache import KeyValue
from lmhead.nn.mlp import FeedForward
from lmhead.nn.multi_head_attention import Attention, AttentionMask
from lmhead.nn.transformer_config import TransformerConfig


def make_norm(config: TransformerConfig) -> nn.Module:
    """Return the LayerNorm or RMSNorm of the configuration."""
    if config.norm == "rms":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.bias)


class Block(nn.Module):
    """A layer of an encoder or, with `cross`, of a decoder with cross-attention.

    >>> import torch
    >>> config = TransformerConfig(vocab_size=9, hidden_size=8, num_attention_heads=2)
    >>> x, (key, value) = Block(config)(torch.randn(1, 5, 8), AttentionMask(causal=True))
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
        mask: AttentionMask,
        past: KeyValue | None = None,
        memory: tuple[KeyValue, AttentionMask] | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """Apply attention, cross-attention and feed-forward.

        Args:
            x: (B, T, D).
            mask: of self-attention, over cached and new tokens.
            past: keys and values of the tokens before x.
            memory: keys and values of the encoder's output from `cross.project`, and their mask.

        Returns:
            (B, T, D); keys and values of all tokens.
        """
        change, present = self.attention(self._before(self.attention_norm, x), mask, past)
        x = self._add(self.attention_norm, x, change)
        if memory is not None:
            change = self.cross.attend(self._before(self.cross_norm, x), *memory)
            x = self._add(self.cross_norm, x, change)
        change = self.feed_forward(self._before(self.feed_forward_norm, x))
        return self._add(self.feed_forward_norm, x, change), present

    def _before(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x) if self.norm_first else x

    def _add(self, norm: nn.Module, x: Tensor, change: Tensor) -> Tensor:
        x = x + self.dropout(change)
        return x if self.norm_first else norm(x)
