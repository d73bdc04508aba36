"""The decoder, and `DecoderLM`: a decoder-only language model for training and generation.

    hidden = body(ids)               (B, T, D), after the final norm
    logits = head(hidden)            lazy

Self-attention is causal, with cross-attention if there is an encoder, and a cache of the tokens
before the given ones.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from lmhead.head import LMHead
from lmhead.lazy import LazyLogits
from lmhead.nn.multi_head_attention import (
    AttentionMask,
    KeyValue,
    KeyValueCache,
    Memory,
    causal_attention_mask,
)
from lmhead.nn.stack import Block, TransformerStack, check_mask, initialise
from lmhead.nn.transformer_config import DecoderConfig, TransformerConfig
from lmhead.sampling.model import Tokenizer


class DecoderBody(TransformerStack):
    """A language model without its head: the `body` of `generate` and `beam_search`.

    Positions count the tokens of a row, not its padding: a row gives the same hidden states alone
    and padded in a batch, up to rounding.

    Args:
        config: the sizes.
        embedding: (V, D), to be shared; None for a new one.
        cross: whether every block has cross-attention to an encoder.

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
        self,
        config: DecoderConfig,
        *,
        embedding: nn.Embedding | None = None,
        cross: bool = False,
    ) -> None:
        super().__init__(config, config.num_hidden_layers, embedding=embedding, cross=cross)
        self.has_cross_attention = cross

    def forward(
        self,
        ids: Tensor,
        cache: KeyValueCache | None = None,
        mask: Tensor | None = None,
        *,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> tuple[Tensor, KeyValueCache]:
        """Process new tokens.

        Args:
            ids: (B, T), the new tokens.
            cache: of the tokens before them; None for none.
            mask: (B, S) bool over cached and new tokens, False for padding; None for no padding.
            memory: (B, U, D), the encoder's output; needed with the first tokens, and kept in the
                cache from then on.
            memory_mask: (B, U) bool, False for padding of the source; None for no padding.

        Returns:
            hidden (B, T, D) after the final norm, undefined at padding; the cache of all S tokens.
        """
        states, cache = self._run(ids, cache, mask, self._memory(ids, cache, memory, memory_mask))
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
            past = None if cache is None else cache.layer(i)
            x, (key, value) = block(x, attention_mask, past, _of_layer(memory, i))
            states = [*states, x] if keep else [x]
            keys.append(key)
            values.append(value)
        return states, KeyValueCache(tuple(keys), tuple(values), memory)

    def _memory(
        self,
        ids: Tensor,
        cache: KeyValueCache | None,
        memory: Tensor | None,
        mask: Tensor | None,
    ) -> Memory | None:
        """Return the encoder's keys and values for all blocks, from the cache if they are there."""
        if cache is not None and cache.memory is not None:
            return cache.memory
        if memory is None and not self.has_cross_attention:
            return None
        if memory is None:
            raise ValueError("memory must be given, for the decoder has cross-attention; got None")
        if not self.has_cross_attention:
            raise ValueError("memory must be None, for the decoder has no cross-attention")
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
        tokenizer: for text prompts; None for ids alone.

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
    if config.tied:
        head = LMHead.tied(
            embedding, bias=config.head_bias, softcap=config.softcap, scale=config.scale
        )
    else:
        head = LMHead(
            config.hidden_size,
            config.vocab_size,
            bias=config.head_bias,
            softcap=config.softcap,
            scale=config.scale,
        )
        if config.init != "torch":
            nn.init.normal_(head.weight, std=config.init_std)
    if head.bias is not None and config.init != "torch":
        nn.init.zeros_(head.bias)
    return head
