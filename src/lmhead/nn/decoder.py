"""The decoder: every token sees itself and those before it, and perhaps what an encoder read.

In:  token ids, and a cache of those that came before.
Out: hidden states after the final norm; a head turns them into words.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from lmhead.nn.attention import Look, look_back
from lmhead.nn.block import Block
from lmhead.nn.cache import KeyValue, KeyValueCache, Memory
from lmhead.nn.config import DecoderConfig
from lmhead.nn.stack import Stack, check_mask


class DecoderBody(Stack):
    """A language model without its head; what `generate` and `beam_search` call a body.

    Positions count the tokens of a row, not its padding: a row gives the same hidden states alone
    and padded in a batch, up to rounding.

    Args:
        config: the sizes.
        embedding: (V, D), to be shared; None for a new one.
        cross: whether it hears an encoder, by cross-attention in every block.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> body = DecoderBody(
    ...     DecoderConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
    ... )
    >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
    >>> hidden, cache = body(ids[:, :3])
    >>> hidden.shape, cache.length
    (torch.Size([1, 3, 16]), 3)
    >>> more, cache = body(ids[:, 3:], cache)  # reads two tokens, sees five
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
        self.hears = cross

    def forward(
        self,
        ids: Tensor,
        cache: KeyValueCache | None = None,
        mask: Tensor | None = None,
        *,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> tuple[Tensor, KeyValueCache]:
        """Read new tokens.

        Args:
            ids: (B, T), the new tokens.
            cache: of the tokens already read; None for none.
            mask: (B, S) bool over all tokens, old and new, False for padding; None for no padding.
            memory: (B, U, D), what the encoder gave; needed with the first tokens, and kept in the
                cache from then on.
            memory_mask: (B, U) bool, False for padding of the source; None for no padding.

        Returns:
            hidden (B, T, D) after the final norm, undefined at padding; the cache of all S tokens.
        """
        states, cache = self._run(ids, cache, mask, self._heard(ids, cache, memory, memory_mask))
        return self.norm(states[-1]), cache

    def layers(self, ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """The states (B, T, D) of the embedding and of each block, all through the final norm.

        `head(layers(ids)[i])` is what the model would say if it ended at layer i (the logit lens);
        the last entry is what `forward` gives.
        """
        heard = self._heard(ids, None, None, None)
        states, _ = self._run(ids, None, mask, heard, keep=True)
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
        """The states before the final norm: of the last block, or of all if `keep`."""
        before = 0 if cache is None else cache.length
        mask = self.check(ids, before, mask)
        x, turn = self.embed(ids, before, mask)
        look = look_back(before, ids.shape[1], mask, turn=turn, device=ids.device)
        states, keys, values = [x], [], []
        for i, block in enumerate(self.blocks):
            past = None if cache is None else cache.layer(i)
            x, (key, value) = block(x, look, past, _of_layer(memory, i))
            states = [*states, x] if keep else [x]
            keys.append(key)
            values.append(value)
        return states, KeyValueCache(tuple(keys), tuple(values), memory)

    def _heard(
        self,
        ids: Tensor,
        cache: KeyValueCache | None,
        memory: Tensor | None,
        mask: Tensor | None,
    ) -> Memory | None:
        """What all blocks make of the encoder's states, or made of them before."""
        if cache is not None and cache.memory is not None:
            return cache.memory
        if memory is None and not self.hears:
            return None
        if memory is None or not self.hears:
            wanted = "given, for it hears an encoder" if self.hears else "None, for it hears none"
            raise ValueError(f"memory must be {wanted}; got {'None' if memory is None else 'one'}")
        size = self.sizes.hidden_size
        if memory.dim() != 3 or memory.shape[::2] != (ids.shape[0], size):
            raise ValueError(
                f"memory must have shape ({ids.shape[0]}, U, {size}); got {tuple(memory.shape)}"
            )
        mask = check_mask("memory_mask", mask, (memory.shape[0], memory.shape[1]))
        read = [cast(Block, block).cross.read(memory) for block in self.blocks]
        return Memory(tuple(key for key, _ in read), tuple(value for _, value in read), mask)


def _of_layer(memory: Memory | None, index: int) -> tuple[KeyValue, Look] | None:
    if memory is None:
        return None
    look = Look(None if memory.mask is None else memory.mask[:, None, None])
    return (memory.keys[index], memory.values[index]), look
