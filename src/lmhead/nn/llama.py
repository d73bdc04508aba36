"""The body of a Llama: token ids in, hidden states after the final norm out. The head is not here.

    x = embedding(ids)
    x = x + attention(norm(x))        rotary positions, grouped queries
    x = x + feed_forward(norm(x))     down(silu(gate(x)) · up(x))
    hidden = norm(x)                  after the last block

Letters of the shapes: B rows, T new tokens, S all tokens of a row so far, D hidden size, H query
heads, G key heads (H / G queries share one), d size of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead import checks


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama; the names are those of Hugging Face's `LlamaConfig`.

    Attributes:
        head_dim: d; None for hidden_size / num_attention_heads.
        rotary: which coordinates of a head turn together: "half" pairs i with i + d/2 (Hugging
            Face), "interleaved" pairs 2i with 2i + 1 (the original, and llama2.c). The weights of
            one are those of the other in another order.
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
    rotary: Literal["half", "interleaved"] = "half"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
        ):
            checks.check_whole(name, getattr(self, name), low=1)
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        if heads % shared:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, {shared}; "
                f"got {heads}"
            )
        if self.head_dim is None and self.hidden_size % heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads, {heads}; "
                f"got {self.hidden_size}"
            )
        if self.head_size < 2 or self.head_size % 2:
            raise ValueError(f"head_dim must be even, to be turned in pairs; got {self.head_size}")
        if self.rotary not in ("half", "interleaved"):
            raise ValueError(f"rotary must be 'half' or 'interleaved'; got {self.rotary!r}")

    @property
    def head_size(self) -> int:
        """The size d of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


@dataclass(frozen=True)
class KeyValueCache:
    """Keys and values of the tokens read so far: per layer (B, G, S, d) each.

    A value: reading more tokens makes a new cache and leaves this one as it is, so that several
    texts can go on from one beginning.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def length(self) -> int:
        """The number S of tokens, padding included."""
        return self.keys[0].shape[2]

    def select(self, rows: Tensor) -> KeyValueCache:
        """The cache of the rows (B',), which may repeat or drop some."""
        return KeyValueCache(
            tuple(key.index_select(0, rows) for key in self.keys),
            tuple(value.index_select(0, rows) for value in self.values),
        )


class RMSNorm(nn.Module):
    """Equivalent to: weight · x / √(mean(x²) + eps)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D); squares of half types are summed in float32."""
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return self.weight * wide.to(x.dtype)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor], rotary: str) -> Tensor:
    """Turn every pair (a, b) of coordinates by its angle: (a cos - b sin, a sin + b cos).

    Args:
        x: (B, T, heads, d).
        turn: cos and sin of the angles, (B, T, 1, d/2).
        rotary: which coordinates are a pair, see `LlamaConfig`.
    """
    cos, sin = turn
    axis = -2 if rotary == "half" else -1
    a, b = x.reshape(*x.shape[:-1], *((2, -1) if rotary == "half" else (-1, 2))).unbind(axis)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), axis).flatten(-2)


class Attention(nn.Module):
    """Every token looks back: softmax(q · k / √d) v, with H / G queries to a key."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, d = config.hidden_size, config.head_size
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.rotary = config.rotary
        self.query = nn.Linear(size, self.heads * d, bias=False)
        self.key = nn.Linear(size, self.groups * d, bias=False)
        self.value = nn.Linear(size, self.groups * d, bias=False)
        self.output = nn.Linear(self.heads * d, size, bias=False)

    def forward(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        seen: Tensor,
        past: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, D), seen (B, T, S) bool; gives (B, T, D), all keys and values (B, G, S, d)."""
        rows, new = x.shape[:2]
        shape = (rows, new, -1, self.query.out_features // self.heads)
        query = rotate(self.query(x).view(shape), turn, self.rotary).transpose(1, 2)
        key = rotate(self.key(x).view(shape), turn, self.rotary).transpose(1, 2)
        value = self.value(x).view(shape).transpose(1, 2)
        if past is not None:
            key, value = torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)
        # The queries of a group ask the same keys: lay them out as more tokens, (B, G, H/G · T, d),
        # and no key need be copied.
        share = self.heads // self.groups
        query = query.reshape(rows, self.groups, share * new, -1)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen.repeat(1, share, 1)[:, None]
        )
        mixed = mixed.reshape(rows, self.heads, new, -1)
        return self.output(mixed.transpose(1, 2).flatten(2)), key, value


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate = nn.Linear(size, inner, bias=False)
        self.up = nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D)."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on the normed sum of all before."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        seen: Tensor,
        past: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Attention.forward`."""
        mixed, key, value = self.attention(self.attention_norm(x), turn, seen, past)
        x = x + mixed
        return x + self.feed_forward(self.feed_forward_norm(x)), key, value


class LlamaBody(nn.Module):
    """A Llama without its head, for generation.

    Positions count the tokens of a row, not its padding: a row gives the same hidden states alone
    and padded in a batch, up to rounding.

    Args:
        config: the sizes.
        embedding: (V, D), to be shared; None for a new one.

    >>> _ = torch.manual_seed(0)
    >>> body = LlamaBody(LlamaConfig(50, 16, 24, 2, 4, 2))
    >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
    >>> hidden, cache = body(ids[:, :3])
    >>> hidden.shape, cache.length
    (torch.Size([1, 3, 16]), 3)
    >>> more, cache = body(ids[:, 3:], cache)  # reads two tokens, sees five
    >>> torch.allclose(more, body(ids)[0][:, 3:], atol=1e-6)
    True
    """

    def __init__(self, config: LlamaConfig, *, embedding: nn.Embedding | None = None) -> None:
        super().__init__()
        self.config = config
        if embedding is None:
            embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        shape = (config.vocab_size, config.hidden_size)
        if tuple(embedding.weight.shape) != shape:
            raise ValueError(
                f"embedding must have a weight of shape {shape}; "
                f"got {tuple(embedding.weight.shape)}"
            )
        self.embedding = embedding
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, ids: Tensor, cache: KeyValueCache | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, KeyValueCache]:
        """Read new tokens.

        Args:
            ids: (B, T), the new tokens.
            cache: of the tokens already read; None for none.
            mask: (B, S) bool over all tokens, old and new, False for padding; None for no padding.

        Returns:
            hidden (B, T, D) after the final norm, undefined at padding; the cache of all S tokens.
        """
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for x, key, value in self._read(ids, cache, mask):  # noqa: B007 - the last x is the result
            keys.append(key)
            values.append(value)
        return self.norm(x), KeyValueCache(tuple(keys), tuple(values))

    def layers(self, ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """What a head would see after each layer: the embedding's and each block's output, normed.

        Args:
            ids: (B, T).
            mask: (B, T) bool, False for padding; None for no padding.

        Returns:
            One (B, T, D) per layer, beginning with the embedding, each after the final norm; the
            last is what `forward` gives.

        >>> _ = torch.manual_seed(0)
        >>> body = LlamaBody(LlamaConfig(50, 16, 24, 2, 4, 2))
        >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
        >>> layers = body.layers(ids)
        >>> len(layers), bool((layers[-1] == body(ids)[0]).all())
        (3, True)
        """
        read = [self.norm(x) for x, _, _ in self._read(ids, None, mask)]
        return [self.norm(self.embedding(ids)), *read]

    def _read(
        self, ids: Tensor, cache: KeyValueCache | None, mask: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Per block: its output (B, T, D), not normed, and its keys and values (B, G, S, d)."""
        checks.check_ids("ids", ids, self.config.vocab_size)
        if ids.dim() != 2:
            raise ValueError(f"ids must have shape (B, T); got {tuple(ids.shape)}")
        before = 0 if cache is None else cache.length
        shape = (ids.shape[0], before + ids.shape[1])
        if mask is None:
            mask = torch.ones(shape, dtype=torch.bool, device=ids.device)
        if mask.dtype != torch.bool or tuple(mask.shape) != shape:
            raise ValueError(
                f"mask must be bool and of shape {shape}, one entry for each token so far; "
                f"got {mask.dtype} {tuple(mask.shape)}"
            )
        x = self.embedding(ids)
        turn = self._turn((mask.cumsum(-1) - 1).clamp(min=0)[:, before:], x.dtype)
        seen = _seen(mask, before)
        for i, block in enumerate(self.blocks):
            past = None if cache is None else (cache.keys[i], cache.values[i])
            x, key, value = block(x, turn, seen, past)
            yield x, key, value

    def _turn(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cos and sin of position · theta^(-2i/d), for i in [0, d/2): (B, T, 1, d/2)."""
        d = self.config.head_size
        steps = torch.arange(0, d, 2, dtype=torch.float64, device=positions.device)
        angles = positions[..., None, None] * self.config.rope_theta ** (-steps / d)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _seen(mask: Tensor, before: int) -> Tensor:
    """Which tokens a new one sees: those up to itself that are no padding, (B, T, S)."""
    place = torch.arange(mask.shape[1], device=mask.device)
    new = place[before:, None]
    # Each token sees itself, also padding, which would see nothing at all and give NaN.
    return ((place <= new) & mask[:, None]) | (place == new)
