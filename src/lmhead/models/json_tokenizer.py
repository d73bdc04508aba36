"""Tokenizers of the `tokenizers` library: `tokenizer.json`.

A token's bytes are not simply its name: a byte-level vocabulary writes every byte as one character
(a space as Ġ), a sentencepiece one writes a space as ▁ and bytes as <0x0A>, BERT's prefixes the
continuation of a word with ##. The file's `decoder` tells which; `_TokenBytes` interprets it. Parts
of characters stay bytes, so that text can be assembled from any tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lmhead.errors import ModelError
from lmhead.models.model_files import StrPath, exists, one_line, read_text, reject_panics

_MAX_GROWTH = 1000
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class JsonTokenizer:
    r"""Text to ids and back, with a `tokenizer.json`.

    Example::

        tokenizer = JsonTokenizer("SmolLM2/tokenizer.json")
        tokenizer.encode("你好")  # [39990, 224, 27989]: a character may span tokens
        tokenizer.token_bytes(39990)  # b"\xe4\xbd"
    """

    def __init__(
        self, path: StrPath, *, bos_token_id: int | None = None, eos_token_id: int | None = None
    ) -> None:
        self.path = Path(path)
        self.bos_token_id, self.eos_token_id = bos_token_id, eos_token_id
        self._tokenizer = read_tokenizer(self.path)
        self.max_id = max_token_id(self._tokenizer, self.path)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {id for id, token in added.items() if token.special}
        self._added: dict[int, str] = {id: token.content for id, token in added.items()}
        decoder = self._tokenizer.decoder
        state = None if decoder is None else json.loads(decoder.__getstate__())
        self._token_bytes = _TokenBytes(state)

    def __len__(self) -> int:
        """Return the number of ids."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Return the ids of a text, with leading special tokens unless `bos` is False.

        A trailing end-of-text token, which some tokenizers add, is dropped: a prompt continues.
        """
        try:
            ids = list(self._tokenizer.encode(text, add_special_tokens=bos).ids)
        except BaseException as error:
            if type(error).__name__ == "PanicException":  # a pattern that takes exponential time
                raise ModelError(
                    f"{self.path} cannot encode this text: {one_line(error)}"
                ) from error
            if not isinstance(error, Exception):
                raise
            # A vocabulary without bytes and without an unknown token.
            missing = [c for c in dict.fromkeys(text) if self._tokenizer.token_to_id(c) is None]
            raise ValueError(
                f"text must consist of tokens in {self.path}, which has no "
                f"{', '.join(map(repr, missing[:5])) or error}"
            ) from error
        if bos and ids and ids[-1] == self.eos_token_id:
            plain_ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if ids.count(ids[-1]) > plain_ids.count(ids[-1]):
                ids.pop()
        return ids

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of a token; b"" for special tokens and unused ids."""
        if id < 0:
            raise ValueError(f"id must be at least 0; got {id}")
        if id in self._special:
            return b""
        if id in self._added:
            return self._added[id].encode("utf-8")
        name: str | None = self._tokenizer.id_to_token(id)
        return b"" if name is None else self._token_bytes.bytes_of(name)

    def token_name(self, id: int) -> str:
        """Return the name of a token in the vocabulary, e.g. `Ġthe` or `<|endoftext|>`."""
        name: str | None = self._added.get(id) or self._tokenizer.id_to_token(id)
        return f"<{id}>" if name is None else name

    def bytes_after(self, previous: int | None, id: int) -> bytes:
        """Return the bytes of a token after another; None or the bos token for the first."""
        first = previous is None or previous == self.bos_token_id
        piece = self.token_bytes(id)
        if first and self._token_bytes.drops_space:
            return piece.removeprefix(b" ")
        if not first and self._token_bytes.adds_space and piece and id not in self._added:
            return b" " + piece
        return piece

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids without special tokens; invalid UTF-8 becomes U+FFFD."""
        pieces: list[bytes] = []
        previous: int | None = None
        for id in ids:
            pieces.append(self.bytes_after(previous, id))
            previous = id if id not in self._special else previous
        return b"".join(pieces).decode("utf-8", "replace")


def read_tokenizer(path: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a file, without truncation and padding."""
    if not exists(path):
        raise ModelError(
            f"{path} is missing: without it no text can be encoded. Copy it from the source of the "
            "model, or write it with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    text = read_text(path)
    _check_growth(text, path)
    with reject_panics(f"{path} must be a tokenizer of the tokenizers library; it cannot be read"):
        tokenizer: Any = Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def _check_growth(text: str, path: Path) -> None:
    """Validate that a text cannot become many times as long: replacements multiply."""
    try:
        file = json.loads(text)
        parts = [file.get(name) for name in ("normalizer", "decoder")]
    except (ValueError, AttributeError, RecursionError):
        return  # not a tokenizer: the library raises an error
    growth = 1
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            parts += [part.get(name) for name in ("normalizers", "decoders")]
            added = [part.get(name) for name in ("content", "prepend", "append")]
            growth *= max([1, *(len(text) for text in added if isinstance(text, str))])
    if growth > _MAX_GROWTH:
        raise ModelError(
            f"{path}: the replacements of normalizer and decoder must make a text at most "
            f"{_MAX_GROWTH} times as long; got {growth:.2g}"
        )


def max_token_id(tokenizer: Any, path: Path) -> int:
    """Return the largest id of a tokenizer, special tokens that it adds to a text included."""
    with reject_panics(f"{path} must encode an empty text"):
        added = tokenizer.encode("", add_special_tokens=True).ids
    return max([*tokenizer.get_vocab().values(), *added], default=-1)


class _TokenBytes:
    """Convert a token's name to its bytes, `bytes_of`, by the `decoder` of a tokenizer.json.

    `drops_space`: a leading space of a text is removed; `adds_space`: tokens are joined by spaces.
    """

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        steps = _steps(decoder)
        kinds = {step.get("type") for step in steps}
        self.drops_space = any(map(_strips, steps))
        self.adds_space = not steps
        self.bytes_of: Callable[[str], bytes]
        if "ByteLevel" in kinds:
            self.bytes_of = _from_byte_characters
        elif "WordPiece" in kinds:
            self._prefix = next(s.get("prefix", "##") for s in steps if s["type"] == "WordPiece")
            self.drops_space = True
            self.bytes_of = self._from_word_piece
        else:
            self._bytes = "ByteFallback" in kinds
            self._replacements = [pair for step in steps for pair in _replacements(step)]
            self.bytes_of = self._from_piece

    def _from_piece(self, name: str) -> bytes:
        byte = _BYTE.fullmatch(name) if self._bytes else None
        if byte:
            return bytes([int(byte[1], 16)])
        for old, new in self._replacements:
            name = name.replace(old, new)
        return name.encode("utf-8")

    def _from_word_piece(self, name: str) -> bytes:
        continues = name.startswith(self._prefix)
        return (name.removeprefix(self._prefix) if continues else " " + name).encode("utf-8")


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a decoder in order."""
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", []) for step in _steps(part)]
    return [decoder]


def _strips(step: dict[str, Any]) -> bool:
    """Return whether a step of the decoder removes a leading space of a text."""
    if step.get("type") == "Strip":
        return step.get("content") == " " and step.get("start", 0) >= 1
    if step.get("type") == "Metaspace":
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space") else "never")
        return bool(scheme != "never")
    return False


def _replacements(step: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the replacements (old, new) of a step of the decoder."""
    kind = step.get("type")
    if kind == "Metaspace":
        return [(step.get("replacement", "▁"), " ")]
    if kind == "Replace" and "String" in step.get("pattern", {}):
        return [(step["pattern"]["String"], step.get("content", ""))]
    if kind == "BPEDecoder":
        return [(step.get("suffix", "</w>"), " ")]
    return []


@cache
def _byte_characters() -> dict[str, int]:
    """Return the byte of every character in a byte-level vocabulary.

    A byte that is printable in Latin-1 is its own character; the others are U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


def _from_byte_characters(name: str) -> bytes:
    characters = _byte_characters()
    if all(character in characters for character in name):
        return bytes(characters[character] for character in name)
    return name.encode("utf-8")
