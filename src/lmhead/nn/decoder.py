"""A language model: token ids in, hidden states after the final norm out, and a head on them.

x = embedding(ids) + position
x = block(x)                     as often as there are layers
hidden = norm(x)
logits = head(hidden)            lazy: nothing of size V until it is asked for
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmhead import checks
from lmhead.head import LMHead
from lmhead.logits import LazyLogits
from lmhead.nn.attention import look_back
from lmhead.nn.block import Block, make_norm
from lmhead.nn.cache import KeyValueCache
from lmhead.nn.config import DecoderConfig
from lmhead.nn.embedding import PositionEmbedding, turn_of
from lmhead.nn.init import initialise
from lmhead.sampling.model import Tokenizer


class DecoderBody(nn.Module):
    """A language model without its head; what `generate` and `beam_search` call a body.

    Positions count the tokens of a row, not its padding: a row gives the same hidden states alone
    and padded in a batch, up to rounding.

    Args:
        config: the sizes.
        embedding: (V, D), to be shared; None for a new one.

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

    norm: nn.Module

    def __init__(self, config: DecoderConfig, *, embedding: nn.Embedding | None = None) -> None:
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
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = make_norm(config) if config.norm_first else nn.Identity()

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
        states, cache = self._run(ids, cache, mask)
        return self.norm(states[-1]), cache

    def layers(self, ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """The states (B, T, D) of the embedding and of each block, all through the final norm.

        `head(layers(ids)[i])` is what the model would say if it ended at layer i (the logit lens);
        the last entry is what `forward` gives.
        """
        states, _ = self._run(ids, None, mask, keep=True)
        return [self.norm(state) for state in states]

    def _run(
        self,
        ids: Tensor,
        cache: KeyValueCache | None,
        mask: Tensor | None,
        *,
        keep: bool = False,
    ) -> tuple[list[Tensor], KeyValueCache]:
        """The states before the final norm: of the last block, or of all if `keep`."""
        sizes, before = self.sizes, 0 if cache is None else cache.length
        mask = self._check(ids, before, mask)
        new = torch.arange(before, before + ids.shape[1], device=ids.device)
        positions = new[None] if mask is None else _count(mask)[:, before:]
        x = self.embedding(ids)
        if sizes.embedding_scale != 1.0:
            x = x * sizes.embedding_scale
        x = self.dropout(self.position(x, positions))
        turn = None
        if sizes.position == "rotary":
            turn = turn_of(positions, sizes.head_size, sizes.rope_theta, x.dtype)
        look = look_back(before, ids.shape[1], mask, turn=turn, device=ids.device)
        states, keys, values = [x], [], []
        for i, block in enumerate(self.blocks):
            x, (key, value) = block(x, look, None if cache is None else cache.layer(i))
            states = [*states, x] if keep else [x]
            keys.append(key)
            values.append(value)
        return states, KeyValueCache(tuple(keys), tuple(values))

    def _check(self, ids: Tensor, before: int, mask: Tensor | None) -> Tensor | None:
        """The door; gives None for a mask that masks nothing."""
        checks.check_ids("ids", ids, self.sizes.vocab_size)
        if ids.dim() != 2:
            raise ValueError(f"ids must have shape (B, T); got {tuple(ids.shape)}")
        shape = (ids.shape[0], before + ids.shape[1])
        if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != shape):
            raise ValueError(
                f"mask must be bool and of shape {shape}, one entry for each token so far; "
                f"got {mask.dtype} {tuple(mask.shape)}"
            )
        if mask is not None and bool(mask.all()):
            mask = None
        most = self.sizes.max_length
        if self.sizes.position == "learned" and shape[1] > most:
            longest = shape[1] if mask is None else int(mask.sum(-1).max())
            if longest > most:
                raise ValueError(
                    f"ids must be at most max_length, {most} tokens, with those in the cache, for "
                    f"there are no more learned positions; got {longest}"
                )
        return mask


def _count(mask: Tensor) -> Tensor:
    """The place of every token among those that are no padding; 0 for padding before them."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


class DecoderLM(nn.Module):
    """A language model of the GPT or Llama kind: `body` and `head`.

    It is a `lmhead.sampling.model.Model`: `generate` and `beam_search` take it as it is.

    Args:
        config: the sizes and kinds.
        head: hidden states to logits; None for an `LMHead`, tied to the embedding if the
            configuration says so.

    Attributes:
        body: ids (B, T) to hidden states (B, T, D) and a cache.
        head: hidden states (..., D) to logits (..., V).
        eos_token_ids: the ids that end a text, for generation.
        tokenizer: text to ids and back, for generation; None for ids alone.

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
        initialise(self.body, config)
        self.head = make_head(config, self.body.embedding) if head is None else head

    def forward(self, ids: Tensor) -> LazyLogits:
        """Logits (B, T, V) for the word after each of ids (B, T); they compute nothing yet."""
        logits: LazyLogits = self.head(self.hidden(ids))
        return logits

    def hidden(self, ids: Tensor) -> Tensor:
        """Hidden states (B, T, D) after the final norm."""
        hidden: Tensor = self.body(ids)[0]
        return hidden

    def layers(self, ids: Tensor) -> list[Tensor]:
        """Per layer (B, T, D), beginning with the embedding; see `DecoderBody.layers`."""
        return self.body.layers(ids)


def make_head(config: DecoderConfig, embedding: nn.Embedding) -> LMHead:
    """The head that the configuration asks for; an own weight begins as the embedding does."""
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
