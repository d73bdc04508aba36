"""`LanguageModel`: what opening a model gives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lmhead.head import LMHead
from lmhead.models.chat import Chat
from lmhead.sampling.model import Body, Tokenizer


class TextTokenizer(Tokenizer, Protocol):
    """A tokenizer with its way back: ids to text, and the ids that begin and end one."""

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text; None for none."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text; None for none."""
        ...

    def decode(self, ids: Iterable[int], /) -> str:
        """The text of ids; what is no UTF-8 becomes U+FFFD."""
        ...

    def __len__(self) -> int:
        """The number of ids."""
        ...


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
        chat: its chat template; None for a model that was not trained to answer.
    """

    body: Body
    head: LMHead
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: TextTokenizer | None = None
    max_length: int | None = None
    name: str = ""
    chat: Chat | None = None

    def hidden(self, ids: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Read ids, without padding.

        Args:
            ids: (B, T) int64, the new ids.
            cache: what the last call gave back; None at the start.

        Returns:
            Hidden states (B, T, D) after the final norm, for `head`; and the cache of all ids so
            far.
        """
        before = 0 if cache is None else int(cache.length)
        shape = (ids.shape[0], before + ids.shape[-1])
        return self.body(ids, cache, torch.ones(shape, dtype=torch.bool, device=ids.device))

    def layers(self, ids: Tensor) -> list[Tensor]:
        """What the head would see after each layer: the logit lens.

        Args:
            ids: (B, T) int64.

        Returns:
            One (B, T, D) per layer, beginning with the embedding, each after the final norm, so
            that `head(layer)` are its logits; the last is what `hidden` gives.
        """
        read: Any = getattr(self.body, "layers", None)
        if read is None:
            raise TypeError(
                f"the body of {self.name or 'this model'} must have layers(ids), to be looked "
                f"into; got a {type(self.body).__name__}"
            )
        found: list[Tensor] = read(ids)
        return found
