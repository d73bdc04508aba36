"""Tokens in a terminal: spaces, newlines, control characters and single bytes made legible."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmhead.analysis.tokens import Piece

_NAMED = {" ": "␣", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}
# Kinds of characters that a terminal does not show, or obeys: controls, formats (also those that
# turn the direction of writing), surrogates, what is not assigned, separators.
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}


def legible(says: bytes) -> str:
    r"""The bytes of a token as a terminal can show them; two tokens that differ look different.

    >>> legible(b" caf\xc3\xa9\n"), legible(b"\xe4\xbd"), legible(b"\x1b[2J")
    ('␣café\\n', '<0xE4><0xBD>', '\\x1b[2J')
    """
    shown = "".join(_character(c) for c in says.decode("utf-8", "surrogateescape"))
    # A mark that belongs to a letter before it is given a place to stand on.
    return "◌" + shown if shown and unicodedata.category(shown[0]).startswith("M") else shown


def _character(c: str) -> str:
    if c in _NAMED:
        return _NAMED[c]
    number = ord(c)
    if 0xDC80 <= number <= 0xDCFF:  # a byte that is no part of a character
        return f"<0x{number - 0xDC00:02X}>"
    if unicodedata.category(c) in _UNSEEN:
        return c.encode("unicode_escape").decode("ascii")
    return c


def readable(pieces: Iterable[Piece]) -> str:
    """Several tokens as one line of text: with spaces, and newlines written out."""
    return legible(b"".join(piece.bytes for piece in pieces)).replace("␣", " ")


def shown(piece: Piece) -> str:
    """A token: its text made legible, or the name of a mark."""
    if piece.mark is None:
        return legible(piece.bytes)
    return "".join(_character(c) if c != " " else c for c in piece.mark)


def harmless(text: str) -> str:
    r"""Text for a terminal: as it is, but for what the terminal would obey.

    >>> harmless("one\ttwo\n\x1b[31mred")
    'one\ttwo\n\\x1b[31mred'
    """
    return "".join(_character(c) if _obeyed(c) else c for c in text)


def _obeyed(c: str) -> bool:
    if c in "\n\t":
        return False
    # Joiners inside emoji and Indic words are formats too, and harmless.
    return (
        unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"}
        or "\u202a" <= c <= "\u202e"
        or ("\u2066" <= c <= "\u2069")
    )
