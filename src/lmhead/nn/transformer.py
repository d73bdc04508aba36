"""The Transformer: blocks, the stack of an encoder or decoder, the decoder, and `DecoderLM`.

    x = embedding(ids) · scale + position
    x = block(x)                     for each layer
    hidden = norm(x)                 (B, T, D)
    logits = head(hidden)            lazy

A block is attention, cross-attention if there is an encoder, and a feed-forward sublayer. The
output of a sublayer f is added to its input (a residual connection):

    pre-norm    x + f(norm(x))      the residual itself is never normalized
    post-norm   norm(x + f(x))      "Add & Norm", as in the paper of 2017

The feed-forward sublayer is two linear layers at each position, with an activation between:

    relu, gelu    down(activation(up(x)))
    swiglu        down(silu(gate(x)) · up(x))

The self-attention of a decoder is causal, with a cache of the tokens before the given ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead import checks
from lmhead.head import LMHead
from lmhead.lazy import LazyLogits
from lmhead.nn.multi_head_attention import (
    Attention,
    AttentionMask,
    KeyValue,
    KeyValueCache,
    Memory,
    PositionEmbedding,
    RotaryAngles,
    causal_attention_mask,
    rotary_angles,
)
from lmhead.nn.transformer_config import DecoderConfig, TransformerConfig
from lmhead.sampling.model import Tokenizer

if TYPE_CHECKING:
    from lmhead.nn.decode_step import DecodeStep

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
        """Apply attention, cross-attention and feed-forward to x (B, T, D).

        `mask` is that of self-attention, over cached and new tokens; `memory` has the encoder's
        keys and values from `cross.project`, and their mask. Return (B, T, D), and keys and values
        of all tokens.
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


class TransformerStack(nn.Module):
    """Embedding, blocks and norm; `Encoder` and `DecoderBody` define the forward pass."""

    norm: nn.Module

    def __init__(
        self,
        config: TransformerConfig,
        layers: int,
        *,
        embedding: nn.Embedding | None = None,
        cross: bool = False,
    ) -> None:
        super().__init__()
        if embedding is None:
            embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        shape = (config.vocab_size, config.hidden_size)
        if tuple(embedding.weight.shape) != shape:
            raise ValueError(
                f"embedding must have a weight of shape {shape}; "
                f"got {tuple(embedding.weight.shape)}"
            )
        self.sizes = config
        self.embedding = embedding
        self.position = PositionEmbedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, cross=cross) for _ in range(layers))
        self.norm = make_norm(config) if config.norm_first else nn.Identity()

    def embed(
        self, ids: Tensor, before: int = 0, mask: Tensor | None = None
    ) -> tuple[Tensor, RotaryAngles | None]:
        """Embed ids (B, T) with their positions: (B, T, D), and the angles if positions are rotary.

        `before` counts the tokens before them, padding included; `mask` (B, before + T) is False
        for padding.
        """
        if mask is None:
            positions = torch.arange(before, before + ids.shape[1], device=ids.device)[None]
        else:  # padding is not counted
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, before:]
        x = self.embedding(ids)
        if self.sizes.embedding_scale != 1.0:
            x = x * self.sizes.embedding_scale
        x = self.dropout(self.position(x, positions))
        if self.sizes.position != "rotary":
            return x, None
        size, theta = self.sizes.head_size, self.sizes.rope_theta
        return x, rotary_angles(positions, size, theta, x.dtype, self.sizes.rope_factors)

    def check(self, ids: Tensor, before: int, mask: Tensor | None) -> Tensor | None:
        """Validate the inputs; return the mask, or None if it masks nothing."""
        checks.check_ids("ids", ids, self.sizes.vocab_size)
        if ids.dim() != 2:
            raise ValueError(f"ids must have shape (B, T); got {tuple(ids.shape)}")
        mask = check_mask("mask", mask, (ids.shape[0], before + ids.shape[1]))
        max_length = self.sizes.max_length
        if self.sizes.position == "learned" and before + ids.shape[1] > max_length:
            longest = before + ids.shape[1] if mask is None else int(mask.sum(-1).max())
            if longest > max_length:
                raise ValueError(
                    f"ids must be at most max_length, {max_length} tokens with those in the cache, "
                    f"the number of learned positions; got {longest}"
                )
        return mask


def check_mask(name: str, mask: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """Validate a padding mask (B, S); return None if it masks nothing."""
    if mask is None:
        return None
    if mask.dtype != torch.bool or tuple(mask.shape) != shape:
        raise ValueError(
            f"{name} must be bool and of shape {shape}, one entry for each token so far; "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    return None if bool(mask.all()) else mask


def initialise(stack: TransformerStack) -> None:
    """Set the initial values of all matrices and biases, by `config.init`.

    With "normal", the last matrix of each sublayer is divided by √(number of sublayers), so that
    the residual sum of a deep model starts no larger than that of a shallow one.
    """
    config = stack.sizes
    if config.init == "torch":
        return
    for part in stack.modules():
        if isinstance(part, nn.Linear):
            if config.init == "normal":
                nn.init.normal_(part.weight, std=config.init_std)
            else:
                nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding | PositionEmbedding) and part.weight is not None:
            nn.init.normal_(part.weight, std=config.init_std)
    if config.init == "normal":
        sublayers = [m for m in stack.modules() if isinstance(m, Attention | FeedForward)]
        for sublayer in sublayers:
            last = sublayer.output if isinstance(sublayer, Attention) else sublayer.down
            nn.init.normal_(last.weight, std=config.init_std / math.sqrt(len(sublayers)))


class DecoderBody(TransformerStack):
    """A language model without its head: the `body` of `generate` and `beam_search`.

    Positions count the tokens of a row, not its padding: a row gives the same hidden states alone
    and padded in a batch, up to rounding.

    Args:
        config: the sizes.
        embedding: (V, D), to be shared; None for a new one.
        cross: whether every block has cross-attention to an encoder.

    Attributes:
        step: computes a single token after others, see `lmhead.nn.decode_step`; None for torch.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> body = DecoderBody(
    ...     DecoderConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
    ... )
    >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
    >>> hidden, cache = body(ids[:, :3])
    >>> hidden.shape, cache.length
    (torch.Size([1, 3, 16]), 3)
    >>> more, cache = body(ids[:, 3:], cache)  # two new tokens, three cached
    >>> torch.allclose(more, body(ids)[0][:, 3:], atol=1e-6)
    True
    """

    def __init__(
        self, config: DecoderConfig, *, embedding: nn.Embedding | None = None, cross: bool = False
    ) -> None:
        super().__init__(config, config.num_hidden_layers, embedding=embedding, cross=cross)
        self.has_cross_attention = cross
        self.step: DecodeStep | None = None

    def forward(
        self,
        ids: Tensor,
        cache: KeyValueCache | None = None,
        mask: Tensor | None = None,
        *,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        use_cache: bool = True,
    ) -> tuple[Tensor, KeyValueCache]:
        """Process new tokens; return hidden states (B, T, D) after the final norm, and the cache.

        Hidden states are undefined at padding. Without `use_cache` the cache returned is empty.

        Args:
            ids: (B, T), the new tokens.
            cache: of the tokens before them; None for none.
            mask: (B, S) bool over cached and new tokens, False for padding; None for no padding.
            memory: (B, U, D), the encoder's output; needed with the first tokens, then cached.
            memory_mask: (B, U) bool, False for padding of the source; None for no padding.
            use_cache: whether to keep keys and values for the tokens that follow.
        """
        if self.step is not None and cache is not None and self.step.takes(ids, cache, mask):
            self.check(ids, cache.length, mask)
            return self.step(ids, cache)
        source = self._memory(ids, cache, memory, memory_mask)
        states, cache = self._run(ids, cache, mask, source, use_cache=use_cache)
        return self.norm(states[-1]), cache

    def layers(self, ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """Return the states (B, T, D) of the embedding and of each block, after the final norm.

        `head(layers(ids)[i])` are the logits of the model cut off after layer i (the logit lens);
        the last entry is the result of `forward`.
        """
        memory = self._memory(ids, None, None, None)
        states, _ = self._run(ids, None, mask, memory, keep=True)
        return [self.norm(state) for state in states]

    def _run(
        self,
        ids: Tensor,
        cache: KeyValueCache | None,
        mask: Tensor | None,
        memory: Memory | None,
        *,
        keep: bool = False,
        use_cache: bool = True,
    ) -> tuple[list[Tensor], KeyValueCache]:
        """Return the states before the final norm: of the last block, or of all if `keep`."""
        before = 0 if cache is None else cache.length
        mask = self.check(ids, before, mask)
        x, rotary = self.embed(ids, before, mask)
        attention_mask = causal_attention_mask(
            before, ids.shape[1], mask, rotary=rotary, device=ids.device
        )
        states, keys, values = [x], [], []
        for i, block in enumerate(self.blocks):
            past = None if cache is None else (cache.keys[i], cache.values[i])
            x, (key, value) = block(x, attention_mask, past, _of_layer(memory, i))
            states = [*states, x] if keep else [x]
            if use_cache:
                keys.append(key)
                values.append(value)
            del key, value
        return states, KeyValueCache(tuple(keys), tuple(values), memory)

    def _memory(
        self, ids: Tensor, cache: KeyValueCache | None, memory: Tensor | None, mask: Tensor | None
    ) -> Memory | None:
        """Return the encoder's keys and values for all blocks, from the cache if possible."""
        if cache is not None and cache.memory is not None:
            return cache.memory
        if memory is None and not self.has_cross_attention:
            return None
        if memory is None:
            raise ValueError("memory must be given: the decoder has cross-attention; got None")
        if not self.has_cross_attention:
            raise ValueError("memory must be None: the decoder has no cross-attention")
        size = self.sizes.hidden_size
        if memory.dim() != 3 or memory.shape[::2] != (ids.shape[0], size):
            raise ValueError(
                f"memory must have shape ({ids.shape[0]}, U, {size}); got {tuple(memory.shape)}"
            )
        mask = check_mask("memory_mask", mask, (memory.shape[0], memory.shape[1]))
        projected = [cast(Block, block).cross.project(memory) for block in self.blocks]
        keys, values = zip(*projected, strict=True)
        return Memory(keys, values, mask)


def _of_layer(memory: Memory | None, index: int) -> tuple[KeyValue, AttentionMask] | None:
    if memory is None:
        return None
    mask = AttentionMask(None if memory.mask is None else memory.mask[:, None, None])
    return (memory.keys[index], memory.values[index]), mask


class DecoderLM(nn.Module):
    """A language model like GPT or Llama: `body` and `head`.

    It is a `lmhead.sampling.model.Model`, for `generate` and `beam_search`.

    Args:
        config: the configuration.
        head: hidden states to logits; None for an `LMHead`, tied to the embedding if the
            configuration says so.

    Attributes:
        body: ids (B, T) to hidden states (B, T, D) and a cache.
        head: hidden states (..., D) to logits (..., V).
        eos_token_ids: the ids that end generation.
        tokenizer: for text prompts; None if only ids are supported.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model = DecoderLM(
    ...     DecoderConfig(vocab_size=65, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    ... )
    >>> text = torch.randint(65, (2, 9))
    >>> loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    >>> loss.backward()
    >>> model.head.weight is model.body.embedding.weight
    True
    """

    def __init__(self, config: DecoderConfig, *, head: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.eos_token_ids: tuple[int, ...] = ()
        self.tokenizer: Tokenizer | None = None
        self.body = DecoderBody(config)
        initialise(self.body)
        self.head = make_head(config, self.body.embedding) if head is None else head

    def forward(self, ids: Tensor) -> LazyLogits:
        """Return lazy logits (B, T, V) for the token after each of ids (B, T)."""
        logits: LazyLogits = self.head(self.hidden(ids))
        return logits

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the hidden states (B, T, D) after the final norm."""
        hidden: Tensor = self.body(ids)[0]
        return hidden

    def layers(self, ids: Tensor) -> list[Tensor]:
        """Return (B, T, D) per layer, starting with the embedding; see `DecoderBody.layers`."""
        return self.body.layers(ids)


def make_head(config: TransformerConfig, embedding: nn.Embedding) -> LMHead:
    """Return the `LMHead` of a configuration; an untied weight starts like the embedding."""
    options: Any = {"bias": config.head_bias, "softcap": config.softcap, "scale": config.scale}
    if config.tied:
        head = LMHead.tied(embedding, **options)
    else:
        head = LMHead(config.hidden_size, config.vocab_size, **options)
    if config.init != "torch":
        if not config.tied:
            nn.init.normal_(head.weight, std=config.init_std)
        if head.bias is not None:
            nn.init.zeros_(head.bias)
    return head
