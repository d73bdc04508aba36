"""A model that reads one text and writes another, as translation does.

    memory = encoder(source)                     read once, all of it at once
    hidden = decoder(target, memory)             written word by word: each sees the words before it
    logits = head(hidden)                        and, by cross-attention, the whole source

One embedding serves the source, the target and, if tied, the head.
"""

from __future__ import annotations

from torch import Tensor, nn

from lmhead.logits import LazyLogits
from lmhead.nn.cache import KeyValueCache
from lmhead.nn.config import EncoderDecoderConfig
from lmhead.nn.decoder import DecoderBody
from lmhead.nn.encoder import Encoder
from lmhead.nn.init import initialise
from lmhead.nn.language_model import make_head
from lmhead.sampling.model import Tokenizer


class EncoderDecoder(nn.Module):
    """An encoder, a decoder with cross-attention, and a head.

    Args:
        config: the sizes and kinds.
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

    The best continuation of the word 2, found with four beams:

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
        initialise(self.encoder, config)
        initialise(self.decoder, config)
        self.head = make_head(config, self.embedding) if head is None else head

    def forward(
        self, source: Tensor, target: Tensor, source_mask: Tensor | None = None
    ) -> LazyLogits:
        """Logits for the word after each word of the target; they compute nothing yet.

        Args:
            source: (B, S).
            target: (B, T). Padding on its right needs no mask: no word sees what comes after it.
            source_mask: (B, S) bool, False for padding; None for no padding.

        Returns:
            (B, T, V).
        """
        memory = self.encode(source, source_mask)
        hidden, _ = self.decode(target, memory, source_mask)
        logits: LazyLogits = self.head(hidden)
        return logits

    def encode(self, source: Tensor, mask: Tensor | None = None) -> Tensor:
        """Read sources (B, S): states (B, S, D), undefined at padding."""
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
        """Hidden states of new target words, see `DecoderBody.forward`.

        Args:
            target: (B, T), the new words.
            memory: (B, S, D), what `encode` gave; not needed with a cache, which holds it.
            memory_mask: (B, S) bool, as for `encode`.
            cache: of the words before them.
            mask: (B, words so far) bool, False for padding of the target.

        Returns:
            (B, T, D), and the cache of all words so far.
        """
        out: tuple[Tensor, KeyValueCache] = self.decoder(
            target, cache, mask, memory=memory, memory_mask=memory_mask
        )
        return out

    def given(
        self,
        source: Tensor,
        mask: Tensor | None = None,
        *,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Tokenizer | None = None,
    ) -> Writer:
        """What `generate` and `beam_search` take: the model that has read these sources.

        Their prompt has one row per source, e.g. the word that begins a translation.
        """
        return Writer(self, source, mask, eos_token_ids=eos_token_ids, tokenizer=tokenizer)


class Writer:
    """A `lmhead.sampling.model.Model` that writes with given sources in mind."""

    def __init__(
        self,
        model: EncoderDecoder,
        source: Tensor,
        mask: Tensor | None = None,
        *,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.model, self.mask = model, mask
        self.memory = model.encode(source, mask)
        self.head = model.head
        self.eos_token_ids, self.tokenizer = eos_token_ids, tokenizer

    def body(
        self, ids: Tensor, cache: KeyValueCache | None, mask: Tensor
    ) -> tuple[Tensor, KeyValueCache]:
        """As `lmhead.sampling.model.Body`; the first call has one row per source."""
        return self.model.decode(ids, self.memory, self.mask, cache, mask)
