"""`DecoderLM`: a decoder-only language model for training and generation.

hidden = body(ids)               (B, T, D)
logits = head(hidden)            lazy
"""

from __future__ import annotations

from torch import Tensor, nn

from lmhead.head import LMHead
from lmhead.lazy import LazyLogits
from lmhead.nn.decoder import DecoderBody
from lmhead.nn.stack import initialise
from lmhead.nn.transformer_config import DecoderConfig, TransformerConfig
from lmhead.sampling.model import Tokenizer


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
