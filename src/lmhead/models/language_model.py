"""`LanguageModel`: the result of opening a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from lmhead.head import LMHead
from lmhead.models.chat import Chat
from lmhead.models.llama_cpp import LlamaCppBody
from lmhead.nn import DecoderBody
from lmhead.sampling.model import Body, Tokenizer

Engine = Literal["core", "torch", "llama.cpp"]
ENGINES: tuple[Engine, ...] = get_args(Engine)


class TextTokenizer(Tokenizer, Protocol):
    """A tokenizer that also decodes, with the ids that begin and end a text."""

    def encode(self, text: str, /, *, bos: bool = True) -> list[int]:
        """Return the ids of a text, without the leading special tokens if `bos` is False."""
        ...

    def bytes_after(self, previous: int | None, id: int, /) -> bytes:
        """Return the bytes of an id that follows another; None at the beginning of a text."""
        ...

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text; None for none."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text; None for none."""
        ...

    def decode(self, ids: Iterable[int], /) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD."""
        ...

    def __len__(self) -> int:
        """Return the number of ids."""
        ...


@dataclass(frozen=True)
class LanguageModel:
    """A body and its head.

    Attributes:
        body: token ids to hidden states, see `lmhead.sampling.model.Body`.
        head: hidden states to lazy logits.
        eos_token_ids: the tokens that end a text.
        tokenizer: text to ids and back; None if only ids are supported.
        max_length: the maximum number of tokens it was trained on at once; None for no bound.
        name: for display, e.g. of the file.
        chat: its chat template; None if it has none.
    """

    body: Body
    head: LMHead
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: TextTokenizer | None = None
    max_length: int | None = None
    name: str = ""
    chat: Chat | None = None

    @property
    def engine(self) -> Engine:
        """The engine that computes the body: see `open_model`."""
        if isinstance(self.body, LlamaCppBody):
            return "llama.cpp"
        return "torch" if getattr(self.body, "step", None) is None else "core"

    def hidden(
        self, ids: Tensor, cache: Any = None, *, use_cache: bool = True
    ) -> tuple[Tensor, Any]:
        """Process ids without padding.

        Args:
            ids: (B, T) int64, the new ids.
            cache: the result of the last call; None at the start.
            use_cache: False if no ids follow: a body of `lmhead.nn` then keeps no keys and values,
                and the cache that is returned must not be used.

        Returns:
            Hidden states (B, T, D) after the final norm, for `head`; and the cache of all ids so
            far.
        """
        before = 0 if cache is None else int(cache.length)
        shape = (ids.shape[0], before + ids.shape[-1])
        mask = torch.ones(shape, dtype=torch.bool, device=ids.device)
        if not use_cache and isinstance(self.body, DecoderBody):
            return self.body(ids, cache, mask, use_cache=False)  # type: ignore[no-any-return]
        return self.body(ids, cache, mask)

    def layers(self, ids: Tensor) -> list[Tensor]:
        """Return the input (B, T, D) of the head after each layer for ids (B, T), for a logit lens.

        Starts with the embedding; each is after the final norm, so that `head(layer)` are its
        logits. The last is the result of `hidden`.
        """
        method: Any = getattr(self.body, "layers", None)
        if method is None:
            raise TypeError(
                f"the body of {self.name or 'this model'} must have a method layers(ids); "
                f"got a {type(self.body).__name__}"
            )
        states: list[Tensor] = method(ids)
        return states
