"""`LanguageModel`: what opening a model gives."""

from __future__ import annotations

from dataclasses import dataclass

from lmhead.head import LMHead
from lmhead.sampling.model import Body, Tokenizer


@dataclass(frozen=True)
class LanguageModel:
    """A body and the head on it.

    Attributes:
        body: token ids to hidden states, see `lmhead.sampling.model.Body`.
        head: hidden states to lazy logits.
        eos_token_ids: the tokens after which there is no more to say.
        tokenizer: text to ids and back; None for a model that speaks in ids.
        max_length: the most tokens it was trained to see at once; None for no bound.
        name: for people, e.g. of the file.
    """

    body: Body
    head: LMHead
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: Tokenizer | None = None
    max_length: int | None = None
    name: str = ""
