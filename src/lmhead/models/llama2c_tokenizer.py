"""The vocabulary files of llama2.c: tokens with scores, merged best first.

file     int32 length of the longest token, then for every id
         float32 score, int32 length, `length` bytes
ids      0 unknown, 1 beginning, 2 end of a text; `<0x00>` to `<0xFF>` are single bytes
encode   " " + text, split into characters (bytes where a character has no id); as long as two
         neighbours form a token, merge the pair with the best score, the first of equals
decode   the concatenated tokens, without the leading space that `encode` added
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from pathlib import Path

from lmhead.errors import ModelError
from lmhead.models.model_files import StrPath, read_bytes

_BOS, _EOS = 1, 2
_ENTRY = struct.Struct("<fi")
_BYTE = re.compile(rb"<0x([0-9A-F]{2})>")


class Llama2cTokenizer:
    """Text to ids and back, with a vocabulary file of llama2.c, of `vocab_size` tokens if given."""

    bos_token_id = _BOS
    eos_token_id = _EOS

    def __init__(self, path: StrPath, vocab_size: int | None = None) -> None:
        entries = list(_read(Path(path)))
        if vocab_size is not None and len(entries) != vocab_size:
            raise ModelError(
                f"{path} must have {vocab_size} tokens, as the model has; got {len(entries)}"
            )
        self._pieces = [piece for piece, _ in entries]
        self._scores = [score for _, score in entries]
        self._bytes = list(self._pieces)
        self._ids: dict[bytes, int] = {}
        self._byte_ids: dict[int, int] = {}
        for id, piece in enumerate(self._pieces):
            if id in (_BOS, _EOS):
                self._bytes[id] = b""  # special tokens, not text
            elif byte := _BYTE.fullmatch(piece):
                value = int(byte[1], 16)
                self._bytes[id] = bytes([value])
                self._byte_ids[value] = id
            else:
                self._ids.setdefault(piece, id)
        if len(self._byte_ids) < 256:
            raise ModelError(
                f"{path} must have the 256 tokens <0x00> to <0xFF>; got {len(self._byte_ids)}"
            )

    def __len__(self) -> int:
        """Return the number of ids."""
        return len(self._bytes)

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Return the ids of a text, after the bos token unless `bos` is False."""
        return [_BOS] * bos + (self._merge(list(self._characters(" " + text))) if text else [])

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of a token; b"" for the bos and eos tokens."""
        return self._bytes[id]

    def bytes_after(self, previous: int | None, id: int) -> bytes:
        """Return the bytes of a token after another, without the leading space of a text."""
        piece = self._bytes[id]
        return piece.removeprefix(b" ") if previous == _BOS else piece

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD."""
        ids = list(ids)
        previous = [None, *ids[:-1]]
        pieces = (self.bytes_after(*pair) for pair in zip(previous, ids, strict=True))
        return b"".join(pieces).decode("utf-8", "replace")

    def _characters(self, text: str) -> Iterator[int]:
        for character in text:
            piece = character.encode("utf-8")
            if piece in self._ids:
                yield self._ids[piece]
            else:
                yield from (self._byte_ids[byte] for byte in piece)

    def _merge(self, ids: list[int]) -> list[int]:
        """Merge pairs, best score first and the leftmost of equals, until none forms a token.

        A heap holds the pairs that form a token: (-score, both positions, both ids, merged id). A
        pair one of whose members has been merged meanwhile is skipped.
        """
        after = [*range(1, len(ids)), -1]
        before = [*range(-1, len(ids) - 1)]

        def pair(left: int, right: int) -> Iterator[tuple[float, int, int, int, int, int]]:
            if left >= 0 and right >= 0:
                joined = self._ids.get(self._pieces[ids[left]] + self._pieces[ids[right]])
                if joined is not None:
                    yield -self._scores[joined], left, right, ids[left], ids[right], joined

        heap = [entry for left, right in enumerate(after) for entry in pair(left, right)]
        heapify(heap)
        while heap:
            _, left, right, left_id, right_id, joined = heappop(heap)
            if ids[left] != left_id or ids[right] != right_id or after[left] != right:
                continue
            ids[left], ids[right] = joined, -1
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            for neighbours in ((before[left], left), (left, after[left])):
                for entry in pair(*neighbours):
                    heappush(heap, entry)
        return [id for id in ids if id >= 0]


def _read(path: Path) -> Iterator[tuple[bytes, float]]:
    """Yield bytes and score of every id."""
    data = read_bytes(path)
    offset = 4
    if len(data) < offset:
        raise ModelError(f"{path} must be a vocabulary of llama2.c; got {len(data)} bytes")
    while offset < len(data):
        begin = offset + _ENTRY.size
        score, length = _ENTRY.unpack(data[offset:begin]) if begin <= len(data) else (0.0, -1)
        offset = begin + length
        if length < 0 or offset > len(data):
            raise ModelError(
                f"{path} must be a vocabulary of llama2.c, tokens with score, length and bytes; "
                f"got a truncated or invalid one at byte {begin - _ENTRY.size}"
            )
        yield data[begin:offset], score
