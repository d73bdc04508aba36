"""Multi-head attention.

    q, k, v = query(x), key(source), value(source)      split into heads of size d
    y = softmax(q · k / √d + mask) v                     one distribution per query and head
    out = output(y)                                      heads concatenated

The source is x itself, or the encoder's output for cross-attention. H / G query heads share one key
head. Shapes: B rows, T query positions, S key positions, D hidden size, H query heads, G key heads,
d head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead.nn.cache import KeyValue
from lmhead.nn.position_embedding import RotaryAngles, rotate
from lmhead.nn.transformer_config import TransformerConfig


@dataclass(frozen=True)
class AttentionMask:
    """Which positions attend to which, and the rotary angles; made once, used by every layer.

    Attributes:
        mask: (B or 1, 1, T or 1, S) bool, True where attention is allowed; None for everywhere.
        causal: without a mask, whether position t attends only to positions up to t; then T = S.
        rotary: angles of rotary positions; None for none.
    """

    mask: Tensor | None = None
    causal: bool = False
    rotary: RotaryAngles | None = None


def causal_attention_mask(
    before: int,
    new: int,
    padding: Tensor | None,
    *,
    rotary: RotaryAngles | None = None,
    device: torch.device | None = None,
) -> AttentionMask:
    """Return the mask with which a token attends to itself and to the tokens before it.

    No mask tensor is built where none is needed (a text from its beginning, or one new token),
    since attention is faster without.

    Args:
        before: the number of cached tokens.
        new: T, the number of new tokens.
        padding: (B, before + T) bool, False for padding; None for no padding.
        rotary: angles of rotary positions.
        device: of the mask.
    """
    if padding is None and (before == 0 or new == 1):
        return AttentionMask(None, new > 1, rotary)
    position = torch.arange(before + new, device=device)
    query = position[before:, None]
    allowed = (position <= query)[None]
    if padding is not None:
        # Padding attends to itself: a row of attention with no key at all would be NaN.
        allowed = (allowed & padding[:, None]) | (position == query)
    return AttentionMask(allowed[:, None], False, rotary)


class Attention(nn.Module):
    """Attention with query, key, value and output projections.

    >>> _ = torch.manual_seed(0)
    >>> config = TransformerConfig(vocab_size=9, hidden_size=8, num_attention_heads=2)
    >>> attention = Attention(config)
    >>> x = torch.randn(1, 5, 8)
    >>> out, (key, value) = attention(x, AttentionMask(causal=True))
    >>> out.shape, key.shape
    (torch.Size([1, 5, 8]), torch.Size([1, 2, 5, 4]))
    >>> first, _ = attention(x[:, :3], AttentionMask(causal=True))  # later tokens change nothing
    >>> torch.allclose(first, out[:, :3], atol=1e-6)
    True
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        size, d = config.hidden_size, config.head_size
        self.heads, self.key_heads, self.head_size = config.num_attention_heads, config.key_heads, d
        self.rotary, self.dropout = config.rotary, config.attention_dropout
        self.query = nn.Linear(size, self.heads * d, bias=config.bias)
        self.key = nn.Linear(size, self.key_heads * d, bias=config.bias)
        self.value = nn.Linear(size, self.key_heads * d, bias=config.bias)
        self.output = nn.Linear(self.heads * d, size, bias=config.bias)

    def forward(
        self, x: Tensor, mask: AttentionMask, past: KeyValue | None = None
    ) -> tuple[Tensor, KeyValue]:
        """Apply self-attention to new tokens.

        Args:
            x: (B, T, D).
            mask: which positions attend to which.
            past: keys and values of the tokens before x; None for none.

        Returns:
            (B, T, D); keys and values of all S tokens.
        """
        key, value = self.project(x, mask.rotary)
        if past is not None:
            key, value = torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)
        return self.attend(x, (key, value), mask), (key, value)

    def project(self, source: Tensor, rotary: RotaryAngles | None = None) -> KeyValue:
        """Return the keys and values of tokens (B, S, D): (B, G, S, d) each."""
        key, value = self.key(source), self.value(source)
        return self._split_heads(key, self.key_heads, rotary), self._split_heads(
            value, self.key_heads
        )

    def attend(self, x: Tensor, source: KeyValue, mask: AttentionMask) -> Tensor:
        """Return the output (B, T, D) of queries from x (B, T, D) over keys and values."""
        rows, new = x.shape[:2]
        query = self._split_heads(self.query(x), self.heads, mask.rotary)
        key, value = source
        allowed, share = mask.mask, self.heads // self.key_heads
        if share > 1 and mask.causal:
            key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
        elif share > 1:
            # Queries that share a key head become more query positions, (B, G, H/G · T, d), so
            # that no key is copied.
            query = query.reshape(rows, self.key_heads, share * new, self.head_size)
            if allowed is not None and allowed.shape[2] > 1:
                allowed = allowed.repeat(1, 1, share, 1)
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=allowed,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask.causal,
        )
        attended = attended.reshape(rows, self.heads, new, self.head_size)
        out: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return out

    def _split_heads(self, x: Tensor, heads: int, rotary: RotaryAngles | None = None) -> Tensor:
        """Return (B, T, heads · d) as (B, heads, T, d), rotated if there are angles."""
        x = x.view(*x.shape[:-1], heads, self.head_size)
        return (x if rotary is None else rotate(x, rotary, self.rotary)).transpose(1, 2)
