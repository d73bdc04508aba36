"""`DecoderLM`: a language model, ready to be trained and to generate.

hidden = body(ids)               (B, T, D)
logits = head(hidden)            lazy: nothing of size V until it is asked for
"""

from __future__ import annotations

from torch import Tensor, nn

from lmhead.head import LMHead
from lmhead.logits import LazyLogits
from lmhead.nn.config import DecoderConfig, TransformerConfig
from lmhead.nn.decoder import DecoderBody
from lmhead.nn.init import initialise
from lmhead.sampling.model import Tokenizer


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


def make_head(config: TransformerConfig, embedding: nn.Embedding) -> LMHead:
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
