"""A token as people and programs see it: id, text, bytes, and its figures.

In:  a tokenizer and an id.
Out: `Token`, `spelled`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lmhead.sampling.text import bytes_after


@dataclass(frozen=True)
class Piece:
    """A token without figures: what it is and what it says.

    Attributes:
        id: its number.
        bytes: what it adds to a text; none for a mark such as the end of a text.
        mark: the name of a token that is no text, e.g. `<eos>`; None for text.
    """

    id: int
    bytes: bytes
    mark: str | None = None

    @property
    def text(self) -> str:
        r"""The bytes as text; what is no UTF-8 becomes U+FFFD.

        >>> ascii(Piece(9, b" caf\xc3").text)
        "' caf\\ufffd'"
        """
        return self.bytes.decode("utf-8", "replace")

    def to_json(self) -> dict[str, Any]:
        """`id`, `text`, `bytes`; a mark has its name as text and no bytes."""
        text = self.text if self.mark is None else self.mark
        return {"id": self.id, "text": text, "bytes": list(self.bytes)}


@dataclass(frozen=True)
class Token:
    """A token of a next-word distribution.

    Attributes:
        piece: what it says.
        logit: its score; -inf for a word that the head masks.
        log_prob: of the model, in nats.
        processed_p: its probability after a sampler's stages; p itself where there is none.
        rank: how many words come before it; 0 is the best one.
        cut_by: the sampler's stage that struck it out; None where none did.
    """

    piece: Piece
    logit: float
    log_prob: float
    processed_p: float
    rank: int
    cut_by: str | None = field(default=None)

    @property
    def p(self) -> float:
        """The model's probability."""
        return math.exp(self.log_prob)

    def to_json(self) -> dict[str, Any]:
        """`id`, `text`, `bytes`, `logit`, `p`, `processed_p`, `log_prob`, `rank`, `cut_by`."""
        return {
            **self.piece.to_json(),
            "logit": finite(self.logit),
            "p": self.p,
            "processed_p": self.processed_p,
            "log_prob": finite(self.log_prob),
            "rank": self.rank,
            "cut_by": self.cut_by,
        }


def finite(x: float) -> float | None:
    """The number, or None where JSON has none: infinities and NaN.

    >>> finite(0.5), finite(-math.inf)
    (0.5, None)
    """
    return x if math.isfinite(x) else None


def piece_of(model: Any, id: int, previous: int | None = None) -> Piece:
    """The token of an id, behind another: a space that begins a text may not be part of it."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return Piece(id, b"", f"<{id}>")
    says = bytes_after(tokenizer, previous, id) if id < len(tokenizer) else b""
    if says or tokenizer.token_bytes(id):
        return Piece(id, says)
    return Piece(id, b"", _mark(model, id))


def pieces_of(model: Any, ids: Iterable[int]) -> Iterator[Piece]:
    """The tokens of ids that begin a text."""
    previous: int | None = None
    for id in ids:
        yield piece_of(model, id, previous)
        previous = id


def _mark(model: Any, id: int) -> str:
    """A name for a token that says nothing: its own, where the tokenizer knows it."""
    name: Any = getattr(model.tokenizer, "token_name", None)
    if name is not None and (found := name(id)):
        return str(found)
    if id == model.tokenizer.bos_token_id and id != model.tokenizer.eos_token_id:
        return "<bos>"
    return "<eos>" if id in model.eos_token_ids else f"<{id}>"


def find_token(model: Any, text: str) -> int | None:
    """The id of a text that is one token; None if it is not one.

    Where several tokens say it, such as a letter and the byte that it is made of: the one that the
    tokenizer itself uses, else the last, since bytes come first.
    """
    wanted = text.encode("utf-8")
    ids = range(min(len(model.tokenizer), model.head.vocab_size))
    found = [id for id in ids if model.tokenizer.token_bytes(id) == wanted]
    if len(found) > 1:
        used = set(model.tokenizer.encode(text))
        found.sort(key=lambda id: id in used)
    return found[-1] if found else None
