"""Multi-head attention: every token asks, the tokens it may see answer.

    q, k, v = query(x), key(source), value(source)      cut into heads of size d
    y = softmax(q · k / √d + mask) v                     one distribution per token and head
    out = output(y)                                      heads side by side

The source is x itself, or for cross-attention what the encoder gave. H / G queries share a key.
Letters of the shapes: B rows, T tokens that ask, S tokens that may answer, D hidden size, H query
heads, G key heads, d size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead.nn.cache import KeyValue
from lmhead.nn.config import TransformerConfig
from lmhead.nn.embedding import Turn, rotate


@dataclass(frozen=True)
class Look:
    """Who sees whom, and by what angles heads are turned; made once, used by every layer.

    Attributes:
        mask: (B or 1, 1, T or 1, S) bool, True where a token may look; None for everywhere.
        causal: with no mask, whether token t sees only the tokens up to t; T and S are the same.
        turn: for rotary positions.
    """

    mask: Tensor | None = None
    causal: bool = False
    turn: Turn | None = None


def look_back(
    before: int,
    new: int,
    padding: Tensor | None,
    *,
    turn: Turn | None = None,
    device: torch.device | None = None,
) -> Look:
    """A token sees itself and those before it that are no padding.

    Where the answer needs no mask there is none, which is faster: a text from its beginning, and
    one token more.

    Args:
        before: how many tokens have been read.
        new: T, how many there are now.
        padding: (B, before + T) bool, False for padding; None for no padding.
        turn: for rotary positions.
        device: where a mask is made.
    """
    if padding is None and (before == 0 or new == 1):
        return Look(None, new > 1, turn)
    place = torch.arange(before + new, device=device)
    now = place[before:, None]
    seen = (place <= now)[None]
    if padding is not None:
        # Each token sees itself, also padding, which would see nothing at all and give NaN.
        seen = (seen & padding[:, None]) | (place == now)
    return Look(seen[:, None], False, turn)


class Attention(nn.Module):
    """Attention with query, key, value and output projections.

    >>> _ = torch.manual_seed(0)
    >>> config = TransformerConfig(vocab_size=9, hidden_size=8, num_attention_heads=2)
    >>> attention = Attention(config)
    >>> x = torch.randn(1, 5, 8)
    >>> out, (key, value) = attention(x, Look(causal=True))
    >>> out.shape, key.shape
    (torch.Size([1, 5, 8]), torch.Size([1, 2, 5, 4]))
    >>> first, _ = attention(x[:, :3], Look(causal=True))  # nobody looks into the future
    >>> torch.allclose(first, out[:, :3], atol=1e-6)
    True
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        size, d = config.hidden_size, config.head_size
        self.heads, self.groups, self.head_size = config.num_attention_heads, config.key_heads, d
        self.rotary, self.dropout = config.rotary, config.attention_dropout
        self.query = nn.Linear(size, self.heads * d, bias=config.bias)
        self.key = nn.Linear(size, self.groups * d, bias=config.bias)
        self.value = nn.Linear(size, self.groups * d, bias=config.bias)
        self.output = nn.Linear(self.heads * d, size, bias=config.bias)

    def forward(
        self, x: Tensor, look: Look, past: KeyValue | None = None
    ) -> tuple[Tensor, KeyValue]:
        """Self-attention of new tokens.

        Args:
            x: (B, T, D).
            look: who sees whom.
            past: keys and values of the tokens before x; None for none.

        Returns:
            (B, T, D); keys and values of all S tokens.
        """
        key, value = self.read(x, look.turn)
        if past is not None:
            key, value = torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)
        return self.ask(x, (key, value), look), (key, value)

    def read(self, source: Tensor, turn: Turn | None = None) -> KeyValue:
        """What tokens (B, S, D) have to say: keys and values, (B, G, S, d) each."""
        key, value = self.key(source), self.value(source)
        return self._cut(key, self.groups, turn), self._cut(value, self.groups)

    def ask(self, x: Tensor, source: KeyValue, look: Look) -> Tensor:
        """What the tokens x (B, T, D) hear from a source that was read: (B, T, D)."""
        rows, new = x.shape[:2]
        query = self._cut(self.query(x), self.heads, look.turn)
        key, value = source
        mask, share = look.mask, self.heads // self.groups
        if share > 1 and look.causal:
            key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
        elif share > 1:
            # The queries of a group ask the same keys: lay them out as more tokens,
            # (B, G, H/G · T, d), and no key need be copied.
            query = query.reshape(rows, self.groups, share * new, self.head_size)
            if mask is not None and mask.shape[2] > 1:
                mask = mask.repeat(1, 1, share, 1)
        heard = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=look.causal,
        )
        heard = heard.reshape(rows, self.heads, new, self.head_size)
        out: Tensor = self.output(heard.transpose(1, 2).flatten(2))
        return out

    def _cut(self, x: Tensor, heads: int, turn: Turn | None = None) -> Tensor:
        """(B, T, heads · d) to (B, heads, T, d), turned if there is a turn."""
        x = x.view(*x.shape[:-1], heads, self.head_size)
        return (x if turn is None else rotate(x, turn, self.rotary)).transpose(1, 2)
