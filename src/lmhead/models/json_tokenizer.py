"""Tokenizers in the format of the `tokenizers` library: `tokenizer.json`.

In:  the file.
Out: text to ids, and the bytes of every id.

A token's bytes are not simply its name: a byte-level vocabulary writes every byte as a letter of
its own (a space as Ġ), one in the manner of sentencepiece writes a space as ▁ and bytes as <0x0A>,
BERT's marks what continues a word with ##. The file's `decoder` says which it is; `_Spelling` reads
it. Pieces of characters stay bytes, so that a text can be put together from any tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lmhead.errors import ModelError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class JsonTokenizer:
    r"""Text to ids and back, with a `tokenizer.json`.

    Args:
        path: the file.
        bos_token_id: the id that begins a text, where the model has one.
        eos_token_id: the id that ends a text, where the model has one.

    Raises:
        ModelError: a file that is not what it should be.

    Example::

        tokenizer = JsonTokenizer("SmolLM2/tokenizer.json")
        tokenizer.encode("你好")  # [39990, 224, 27989]: a character may be spread over tokens
        tokenizer.token_bytes(39990)  # b"\xe4\xbd"
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.bos_token_id, self.eos_token_id = bos_token_id, eos_token_id
        try:
            self._tokenizer: Any = Tokenizer.from_str(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(
                f"{self.path} is missing: without it no text can be read. Copy it from where the "
                "model comes from, or write it with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            ) from None
        except Exception as error:  # the library raises bare Exceptions
            raise ModelError(
                f"{self.path} must be a tokenizer of the tokenizers library; it cannot be read: "
                f"{error}"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {id for id, token in added.items() if token.special}
        self._added = {id: token.content for id, token in added.items()}
        decoder = self._tokenizer.decoder
        self._spelling = _Spelling(None if decoder is None else json.loads(decoder.__getstate__()))

    def __len__(self) -> int:
        """The number of ids."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """The ids of a text; with the marks that the model wants in front, unless `bos` is False.

        A mark of the end, which some tokenizers add, is left out: a prompt goes on.
        """
        try:
            ids = list(self._tokenizer.encode(text, add_special_tokens=bos).ids)
        except Exception as error:  # a vocabulary without bytes and without a word for the unknown
            lacking = [c for c in dict.fromkeys(text) if self._tokenizer.token_to_id(c) is None]
            raise ValueError(
                f"text must be made of the vocabulary of {self.path}, which has no "
                f"{', '.join(map(repr, lacking[:5])) or error}"
            ) from error
        if bos and ids and ids[-1] == self.eos_token_id:
            own = self._tokenizer.encode(text, add_special_tokens=False).ids
            if ids.count(ids[-1]) > own.count(ids[-1]):
                ids.pop()
        return ids

    def token_bytes(self, id: int) -> bytes:
        """The bytes of a token; none for marks, and for ids that no token has."""
        return self._piece(id)

    def token_name(self, id: int) -> str:
        """How the vocabulary writes a token, e.g. `Ġthe` or `<|endoftext|>`."""
        name: str | None = self._added.get(id) or self._tokenizer.id_to_token(id)
        return f"<{id}>" if name is None else name

    def bytes_after(self, previous: int | None, id: int) -> bytes:
        """The bytes of a token behind another; None or the beginning's mark begins the text."""
        first = previous is None or previous == self.bos_token_id
        piece = self._piece(id)
        if first and self._spelling.drops_space:
            return piece.removeprefix(b" ")
        if not first and self._spelling.adds_space and piece and id not in self._added:
            return b" " + piece
        return piece

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; what is no UTF-8 becomes U+FFFD, and marks are left out."""
        pieces: list[bytes] = []
        previous: int | None = None
        for id in ids:
            pieces.append(self.bytes_after(previous, id))
            previous = id if id not in self._special else previous
        return b"".join(pieces).decode("utf-8", "replace")

    def _piece(self, id: int) -> bytes:
        if id < 0:
            raise ValueError(f"id must be at least 0; got {id}")
        if id in self._special:
            return b""
        if id in self._added:
            return self._added[id].encode("utf-8")
        name: str | None = self._tokenizer.id_to_token(id)
        return b"" if name is None else self._spelling.bytes_of(name)


class _Spelling:
    """How the names of a vocabulary spell bytes, as the `decoder` of a tokenizer.json says.

    Attributes:
        bytes_of: a token's name to its bytes.
        drops_space: whether a space that begins a text is not part of it.
        adds_space: whether tokens are words, with a space between them.
    """

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        steps = _steps(decoder)
        kinds = {step.get("type") for step in steps}
        self.drops_space = any(map(_strips, steps))
        self.adds_space = not steps
        self.bytes_of: Callable[[str], bytes]
        if "ByteLevel" in kinds:
            self.bytes_of = _from_letters
        elif "WordPiece" in kinds:
            self._prefix = next(s.get("prefix", "##") for s in steps if s["type"] == "WordPiece")
            self.drops_space = True
            self.bytes_of = self._from_word_piece
        else:
            self._bytes = "ByteFallback" in kinds
            self._swaps = [swap for step in steps for swap in _swap(step)]
            self.bytes_of = self._from_piece

    def _from_piece(self, name: str) -> bytes:
        byte = _BYTE.fullmatch(name) if self._bytes else None
        if byte:
            return bytes([int(byte[1], 16)])
        for old, new in self._swaps:
            name = name.replace(old, new)
        return name.encode("utf-8")

    def _from_word_piece(self, name: str) -> bytes:
        goes_on = name.startswith(self._prefix)
        return (name.removeprefix(self._prefix) if goes_on else " " + name).encode("utf-8")


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The decoder's parts, one after the other."""
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", []) for step in _steps(part)]
    return [decoder]


def _strips(step: dict[str, Any]) -> bool:
    """Whether a part of the decoder takes a space from the beginning of a text."""
    if step.get("type") == "Strip":
        return step.get("content") == " " and step.get("start", 0) >= 1
    if step.get("type") == "Metaspace":
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space") else "never")
        return bool(scheme != "never")
    return False


def _swap(step: dict[str, Any]) -> list[tuple[str, str]]:
    """What a part of the decoder writes in place of what."""
    kind = step.get("type")
    if kind == "Metaspace":
        return [(step.get("replacement", "▁"), " ")]
    if kind == "Replace" and "String" in step.get("pattern", {}):
        return [(step["pattern"]["String"], step.get("content", ""))]
    if kind == "BPEDecoder":
        return [(step.get("suffix", "</w>"), " ")]
    return []


@cache
def _letters() -> dict[str, int]:
    """The letter of every byte in a byte-level vocabulary.

    A byte that prints in Latin-1 is its own letter; the others take the letters from U+0100 on.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


def _from_letters(name: str) -> bytes:
    letters = _letters()
    if all(letter in letters for letter in name):
        return bytes(letters[letter] for letter in name)
    return name.encode("utf-8")
