"""An encoder-decoder Transformer, for translation and other sequence-to-sequence tasks.

    memory = encoder(source)                 once, every token attends to all tokens of its text
    hidden = decoder(target, memory)         causal, with cross-attention to the whole source
    logits = head(hidden)

Source, target and, if tied, the head share one embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lmhead.lazy import LazyLogits
from lmhead.nn.multi_head_attention import AttentionMask, KeyValueCache
from lmhead.nn.transformer import DecoderBody, TransformerStack, initialise, make_head
from lmhead.nn.transformer_config import EncoderDecoderConfig
from lmhead.sampling.model import Body, Tokenizer


class Encoder(TransformerStack):
    """Token ids to hidden states with bidirectional attention.

    Args:
        config: the sizes.
        layers: the number of blocks.
        embedding: (V, D), to be shared; None for a new one.

    >>> import torch
    >>> from lmhead.nn import TransformerConfig
    >>> _ = torch.manual_seed(0)
    >>> config = TransformerConfig(vocab_size=50, hidden_size=16, num_attention_heads=4)
    >>> encoder = Encoder(config, 2)
    >>> ids = torch.tensor([[3, 1, 4, 0, 0]])
    >>> states = encoder(ids, ids > 0)  # two tokens of padding, which are masked out
    >>> torch.allclose(states[:, :3], encoder(ids[:, :3]), atol=1e-6)
    True
    """

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Encode whole texts: ids (B, S) to (B, S, D) after the final norm, undefined at padding.

        `mask` (B, S) is False for padding, on either side.
        """
        mask = self.check(ids, 0, mask)
        if mask is not None and not bool(mask.any(-1).all()):
            empty = int((~mask.any(-1)).nonzero()[0])
            raise ValueError(f"mask must leave a token in every row; row {empty} has none")
        x, rotary = self.embed(ids, 0, mask)
        attention_mask = AttentionMask(None if mask is None else mask[:, None, None], rotary=rotary)
        for block in self.blocks:
            x, _ = block(x, attention_mask)
        out: Tensor = self.norm(x)
        return out


class EncoderDecoder(nn.Module):
    """An encoder, a decoder with cross-attention, and a head.

    Args:
        config: the configuration.
        head: hidden states to logits; None for an `LMHead`, tied to the embedding if the
            configuration says so.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model = EncoderDecoder(
    ...     EncoderDecoderConfig(
    ...         vocab_size=50, hidden_size=16, encoder_layers=2, decoder_layers=2,
    ...         num_attention_heads=4,
    ...     )
    ... )
    >>> source, target = torch.tensor([[3, 1, 4, 1]]), torch.tensor([[2, 7, 1]])
    >>> model(source, target).shape
    torch.Size([1, 3, 50])

    The best continuation of token 2, found with four beams:

    >>> from lmhead.sampling import beam_search
    >>> found = beam_search(model.given(source), [[2]], num_beams=4, max_new_tokens=5)
    >>> len(found.best[0])
    5
    """

    def __init__(self, config: EncoderDecoderConfig, *, head: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.encoder = Encoder(config, config.encoder_layers, embedding=self.embedding)
        self.decoder = DecoderBody(config.decoder(), embedding=self.embedding, cross=True)
        initialise(self.encoder)
        initialise(self.decoder)
        self.head = make_head(config, self.embedding) if head is None else head

    def forward(
        self, source: Tensor, target: Tensor, source_mask: Tensor | None = None
    ) -> LazyLogits:
        """Return lazy logits (B, T, V) for the token after each token of the target (B, T).

        `source` is (B, S), `source_mask` (B, S) is False for its padding. Padding of the target on
        the right needs no mask: attention is causal.
        """
        memory = self.encode(source, source_mask)
        hidden, _ = self.decode(target, memory, source_mask)
        logits: LazyLogits = self.head(hidden)
        return logits

    def encode(self, source: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the states (B, S, D) of sources (B, S), undefined at padding."""
        memory: Tensor = self.encoder(source, mask)
        return memory

    def decode(
        self,
        target: Tensor,
        memory: Tensor | None,
        memory_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, KeyValueCache]:
        """Return the hidden states (B, T, D) of new target tokens, and the cache of all tokens.

        `memory` (B, S, D), the result of `encode`, is not needed with a cache, which holds it.
        `mask` (B, tokens so far) is False for padding of the target. See `DecoderBody.forward`.
        """
        out: tuple[Tensor, KeyValueCache] = self.decoder(
            target, cache, mask, memory=memory, memory_mask=memory_mask
        )
        return out

    def given(
        self, source: Tensor, mask: Tensor | None = None, *, eos_token_ids: tuple[int, ...] = ()
    ) -> ConditionedModel:
        """Return the model conditioned on these sources, for `generate` and `beam_search`.

        The prompt has one row per source, e.g. the token that begins a translation.
        """
        memory = self.encode(source, mask)

        def body(ids: Tensor, cache: Any, padding: Tensor) -> tuple[Tensor, KeyValueCache]:
            return self.decode(ids, memory, mask, cache, padding)

        return ConditionedModel(body, self.head, eos_token_ids)


@dataclass(frozen=True)
class ConditionedModel:
    """A `lmhead.sampling.model.Model`: an encoder and decoder with given sources.

    The first call of `body` has one row per source.
    """

    body: Body
    head: Any
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: Tokenizer | None = None
