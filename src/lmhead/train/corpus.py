"""Text files as a stream of pieces, in bounded memory.

In:  paths of UTF-8 files.
Out: pieces of text that can be turned into tokens one by one, as if it were the whole text.

Where may a text be cut? Between a character that is no white space and white space: no word of the
vocabularies here, and none of GPT-2's pre-tokenizer, has white space behind something else.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

END = "<|endoftext|>"  # between two files, where the vocabulary has it

_PIECE = 1 << 20  # characters
_CUT = re.compile(r"\S(?=\s)")


class CorpusError(ValueError):
    """A file that cannot be read, or is no text."""


def read_pieces(path: Path, size: int = _PIECE) -> Iterator[str]:
    """The text of a file, in pieces of about `size` characters that end before white space."""
    rest = ""
    try:
        # Ends of lines stay as they are; a byte-order mark is no text.
        with path.open(encoding="utf-8-sig", newline="") as file:
            while block := file.read(size):
                rest += block
                cut = last_cut(rest)
                if cut:
                    yield rest[:cut]
                    rest = rest[cut:]
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} must be text in UTF-8; {error.reason} in it") from None
    if rest:
        yield rest


def last_cut(text: str) -> int:
    """The last place where a text may be cut; 0 for none.

    >>> last_cut("the cat  sat"), last_cut("猫"), last_cut("cat ")
    (7, 0, 3)
    """
    start, width = len(text), 64
    while start > 0:  # looking from the end, more each time: texts are long, words are short
        start, width = max(0, start - width), 2 * width
        if found := list(_CUT.finditer(text, start)):
            return found[-1].end()
    return 0


def pieces_of(paths: Sequence[Path], between: str = "") -> Iterator[str]:
    """The text of several files one after the other, with a mark between them."""
    for number, path in enumerate(paths):
        if number and between:
            yield between
        yield from read_pieces(path)


def split(pieces: Iterable[str], characters: int) -> tuple[Iterator[str], Iterator[str]]:
    """The first `characters` of a text, and the rest; to be read in this order.

    >>> first, rest = split(["one", " two", " three"], 5)
    >>> list(first), list(rest)
    (['one', ' t'], ['wo', ' three'])
    """
    source = iter(pieces)
    left_over: list[str] = []

    def first() -> Iterator[str]:
        missing = characters
        for piece in source:
            if len(piece) > missing:
                left_over.append(piece[missing:])
                if missing:
                    yield piece[:missing]
                return
            missing -= len(piece)
            yield piece

    return first(), (piece for part in (left_over, source) for piece in part)


def count(paths: Sequence[Path], between: str = "") -> tuple[int, str]:
    """How many characters there are, and a fingerprint of them (SHA-256)."""
    digest, characters = hashlib.sha256(), 0
    for piece in pieces_of(paths, between):
        digest.update(piece.encode("utf-8", "surrogatepass"))
        characters += len(piece)
    return characters, digest.hexdigest()
