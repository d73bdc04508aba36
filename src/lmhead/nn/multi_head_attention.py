"""Multi-head attention, with its positions and its cache.

    q, k, v = query(x), key(source), value(source)      split into heads of size d
    y = softmax(q · k / √d + mask) v                     one distribution per query and head
    out = output(y)                                      heads concatenated

The source is x itself, or the encoder's output for cross-attention. H / G query heads share one key
head. Shapes: B rows, T query positions, S key positions, D hidden size, H query heads, G key heads,
d head size.

Positions of tokens are vectors added to the embedding, or rotations of queries and keys:

    learned      a trained vector per position            x = embedding(id) + position[t]
    sinusoidal   sines and cosines of t at D/2 speeds     x = embedding(id) + sinusoidal(t)
    rotary       queries and keys are rotated by angles t · speed, so that their product depends
                 only on the distance of two tokens

Positions count the tokens of a row, not its padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead.nn.transformer_config import TransformerConfig

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one layer: (B, G, S, d) each."""


@dataclass(frozen=True)
class Memory:
    """Keys and values of the encoder's output, for cross-attention."""

    # keys, values: per layer (B, G, S, d) each
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor | None = None  # (B, S) bool, False for padding of the source; None for no padding

    def select(self, rows: Tensor) -> Memory:
        """Return the memory of the rows (B',), which may repeat or drop some."""
        mask = None if self.mask is None else self.mask.index_select(0, rows)
        return Memory(_select(self.keys, rows), _select(self.values, rows), mask)


@dataclass(frozen=True)
class KeyValueCache:
    """Keys and values of the tokens processed so far: per layer (B, G, S, d) each.

    Immutable: processing more tokens returns a new cache, so that several continuations can share
    one prefix. `memory` holds the encoder's keys and values in a model with cross-attention.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    memory: Memory | None = None

    @property
    def length(self) -> int:
        """The number S of tokens, padding included."""
        return self.keys[0].shape[2]

    def select(self, rows: Tensor) -> KeyValueCache:
        """Return the cache of the rows (B',), which may repeat or drop some."""
        memory = None if self.memory is None else self.memory.select(rows)
        return KeyValueCache(_select(self.keys, rows), _select(self.values, rows), memory)


def _select(tensors: tuple[Tensor, ...], rows: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.index_select(0, rows) for tensor in tensors)


RotaryAngles = tuple[Tensor, Tensor]
"""Cosine and sine of the angles: (B or 1, T, 1, d/2) each."""


def angles(positions: Tensor, size: int, theta: float) -> Tensor:
    """Return position · theta^(-2i / size) for i in [0, size/2).

    In float64: float32 cannot tell neighbouring positions of a long text apart.

    >>> angles(torch.tensor([0, 1, 2]), 4, 100.0)
    tensor([[0.0000, 0.0000],
            [1.0000, 0.1000],
            [2.0000, 0.2000]], dtype=torch.float64)
    """
    steps = torch.arange(0, size, 2, dtype=torch.float64, device=positions.device)
    return positions[..., None] * theta ** (-steps / size)


def sinusoidal(positions: Tensor, size: int, theta: float = 10000.0) -> Tensor:
    """Return the position vectors of the Transformer of 2017: sin at even, cos at odd indices.

    Shapes: positions (...), result (..., size), float64.

    >>> sinusoidal(torch.tensor([0, 1]), 2)
    tensor([[0.0000, 1.0000],
            [0.8415, 0.5403]], dtype=torch.float64)
    """
    angle = angles(positions, size, theta)
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)


def rotary_angles(
    positions: Tensor,
    size: int,
    theta: float,
    dtype: torch.dtype,
    factors: Sequence[float] | None = None,
) -> RotaryAngles:
    """Return cosine and sine for `rotate`: positions (B or 1, T) to (B or 1, T, 1, size/2) each.

    The angles are divided by `factors`, size/2 numbers, if given.
    """
    angle = angles(positions, size, theta)[..., None, :]
    if factors is not None:
        angle = angle / torch.tensor(factors, dtype=angle.dtype, device=angle.device)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, angles: RotaryAngles, rotary: str) -> Tensor:
    """Rotate pairs (a, b) of coordinates of x (B, T, heads, d): (a cos - b sin, a sin + b cos).

    `rotary` says which coordinates are a pair, see `TransformerConfig`.
    """
    cos, sin = angles
    pairs = x.shape[-1] // 2
    shape, axis = ((2, pairs), -2) if rotary == "half" else ((pairs, 2), -1)
    a, b = x.view(*x.shape[:-1], *shape).unbind(axis)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), axis).flatten(-2)


class PositionEmbedding(nn.Module):
    """Add the vector of each position to the embedding; nothing for rotary positions.

    >>> config = TransformerConfig(vocab_size=9, hidden_size=4, num_attention_heads=1, max_length=8)
    >>> PositionEmbedding(config)(torch.zeros(2, 3, 4), torch.tensor([[0, 1, 2]])).shape
    torch.Size([2, 3, 4])
    """

    weight: Tensor | None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.kind, self.theta = config.position, config.rope_theta
        self.register_parameter("weight", None)
        if self.kind == "learned":
            self.weight = nn.Parameter(torch.empty(config.max_length, config.hidden_size))
            nn.init.normal_(self.weight, std=config.init_std)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x (B, T, D) plus the vectors of positions (B or 1, T)."""
        if self.weight is not None:
            return x + nn.functional.embedding(positions, self.weight)
        if self.kind == "sinusoidal":
            return x + sinusoidal(positions, x.shape[-1], self.theta).to(x.dtype)
        return x


@dataclass(frozen=True)
class AttentionMask:
    """Which positions attend to which, and the rotary angles; computed once for all layers."""

    # (B or 1, 1, T or 1, S) bool, True where attention is allowed; None for everywhere
    mask: Tensor | None = None
    # without a mask, whether position t attends only to positions up to t; then T = S
    causal: bool = False
    rotary: RotaryAngles | None = None  # angles of rotary positions; None for none


def causal_attention_mask(
    before: int,
    new: int,
    padding: Tensor | None,
    *,
    rotary: RotaryAngles | None = None,
    device: torch.device | None = None,
) -> AttentionMask:
    """Return the mask with which a token attends to itself and to the tokens before it.

    No mask tensor is built if none is needed (a text from its beginning, or one new token),
    since attention is faster without a mask. `padding` (B, before + new) is False for padding.
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
        """Apply self-attention to x (B, T, D); return (B, T, D), keys and values of S tokens."""
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
        query = self._split_heads(self.query(x), self.heads, mask.rotary)
        out: Tensor = self.output(self.attended(query, source, mask))
        return out

    def attended(self, query: Tensor, source: KeyValue, mask: AttentionMask) -> Tensor:
        """Return the output of queries (B, H, T, d), heads concatenated: (B, T, H · d)."""
        rows, _, new, _ = query.shape
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
        return attended.transpose(1, 2).flatten(2)

    def _split_heads(self, x: Tensor, heads: int, rotary: RotaryAngles | None = None) -> Tensor:
        """Return (B, T, heads · d) as (B, heads, T, d), rotated if there are angles."""
        x = x.view(*x.shape[:-1], heads, self.head_size)
        return (x if rotary is None else rotate(x, rotary, self.rotary)).transpose(1, 2)
