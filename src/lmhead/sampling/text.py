"""Decode the bytes of tokens incrementally, and find stop strings.

A token may end in the middle of a character, and a stop string may begin in one token and end in
another. `TextStream` therefore returns text only when it can no longer change: the bytes of an
unfinished character are held back until the rest of it, and text that may be the start of a stop
string is held back until it is decided.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from lmhead.sampling.model import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class TextStream:
    r"""Text from bytes, up to the first stop string.

    The text does not depend on how the bytes are split into pieces. It is
    `b"".join(pieces).decode("utf-8", "replace")`, up to the stop string that ends first (of several
    that end together, the longest); the stop string and what follows it are not returned.

    Args:
        stops: the stop strings.
        before: bytes before the text, not part of it. A character that starts in them and ends in
            the text belongs to the text.

    Attributes:
        stopped_by: the stop string that was found; None if there is none so far.

    >>> stream = TextStream(["END"])
    >>> [stream.push(piece) for piece in (b"\xe4\xbd", b"\xa0 E", b"Z E", b"ND or")]
    ['', '你 ', 'EZ ', '']
    >>> stream.stopped_by
    'END'
    """

    def __init__(self, stops: Iterable[str] = (), *, before: bytes = b"") -> None:
        self.stops = tuple(stops)
        assert all(self.stops), "an empty stop string would stop everything"
        self.stopped_by: str | None = None
        self._decoder = _UTF8("replace")
        self._decoder.decode(before)
        self._begun = False
        self._held = ""

    def push(self, piece: bytes) -> str:
        """Return the text that is complete after more bytes."""
        self._begun = self._begun or piece != b""
        return self._take(self._decoder.decode(piece))

    def finish(self) -> str:
        """Return the text held back so far, at the end of the input; broken bytes become U+FFFD."""
        if not self._begun:
            return ""
        text = self._take(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _take(self, text: str) -> str:
        if self.stopped_by is not None:
            return ""
        text = self._held + text
        matches = [
            (at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0
        ]
        if matches:
            _, at, self.stopped_by = min(matches)
            self._held = ""
            return text[:at]
        held = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` begin `stop`, without completing it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def bytes_after(tokenizer: Tokenizer, previous: int | None, token: int) -> bytes:
    """Return the bytes of a token that follows another.

    A tokenizer whose tokens change with the one before (no space at the beginning of a text, say)
    has a method of this name; for the others it is `token_bytes`.
    """
    method: Any = getattr(tokenizer, "bytes_after", None)
    piece: bytes = method(previous, token) if method else tokenizer.token_bytes(token)
    return piece


def bytes_of(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """Return the bytes of ids that begin a text."""
    pairs = zip([None, *ids], ids, strict=False)
    return b"".join(bytes_after(tokenizer, previous, token) for previous, token in pairs)
