"""Text and bytes of a token, and its log-probability and rank.

In:  a model and a token id.
Out: `Piece`, `Token`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lmhead.sampling.text import bytes_after


@dataclass(frozen=True)
class Piece:
    """A token's id and text.

    Attributes:
        id: token id.
        bytes: what it adds to a text; empty for a special token.
        special: name of a token that has no text, e.g. `<eos>`; None for text.
    """

    id: int
    bytes: bytes
    special: str | None = None

    @property
    def text(self) -> str:
        r"""The bytes as text; invalid UTF-8 becomes U+FFFD.

        >>> ascii(Piece(9, b" caf\xc3").text)
        "' caf\\ufffd'"
        """
        return self.bytes.decode("utf-8", "replace")

    def to_json(self) -> dict[str, Any]:
        """Return `id`, `text`, `bytes`; a special token has its name as text and no bytes."""
        text = self.text if self.special is None else self.special
        return {"id": self.id, "text": text, "bytes": list(self.bytes)}


@dataclass(frozen=True)
class Token:
    """A token of a next-token distribution.

    Attributes:
        piece: its id and text.
        logit: its score; -inf if the head masks it.
        log_prob: the model's log-probability, in nats.
        processed_p: its probability after the sampler's stages; `p` without a sampler.
        rank: from 0, the most probable token.
        cut_by: the sampler stage that removed it; None if it was kept.
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
        """Return `id`, `text`, `bytes`, and every attribute; null for infinite values."""
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
    """Return the number, or None for infinities and NaN, which JSON cannot hold.

    >>> finite(0.5), finite(-math.inf)
    (0.5, None)
    """
    return x if math.isfinite(x) else None


def piece_of(model: Any, id: int, previous: int | None = None) -> Piece:
    """Return the piece of a token id after another one (some tokenizers drop a first space)."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return Piece(id, b"", f"<{id}>")
    text = bytes_after(tokenizer, previous, id) if id < len(tokenizer) else b""
    if text or tokenizer.token_bytes(id):
        return Piece(id, text)
    return Piece(id, b"", _special_name(model, id))


def pieces_of(model: Any, ids: Iterable[int]) -> Iterator[Piece]:
    """Yield the pieces of ids from the start of a text."""
    previous: int | None = None
    for id in ids:
        yield piece_of(model, id, previous)
        previous = id


def _special_name(model: Any, id: int) -> str:
    """Return the name of a token without text: the tokenizer's, if it has one."""
    name: Any = getattr(model.tokenizer, "token_name", None)
    if name is not None and (found := name(id)):
        return str(found)
    if id == model.tokenizer.bos_token_id and id != model.tokenizer.eos_token_id:
        return "<bos>"
    return "<eos>" if id in model.eos_token_ids else f"<{id}>"


def find_token(model: Any, text: str) -> int | None:
    """Return the id of the token with this text; None if there is none.

    If several tokens have it, such as a letter and its byte: the one that the tokenizer uses, else
    the last, since byte tokens come first.
    """
    wanted = text.encode("utf-8")
    ids = range(min(len(model.tokenizer), model.head.vocab_size))
    found = [id for id in ids if model.tokenizer.token_bytes(id) == wanted]
    if len(found) > 1:
        used = set(model.tokenizer.encode(text))
        found.sort(key=lambda id: id in used)
    return found[-1] if found else None
