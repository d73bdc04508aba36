"""From text to token ids to hidden states, and from token ids back to text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmhead import checks
from lmhead.models import LanguageModel
from lmhead.models.language_model import TextTokenizer

Text = str | Sequence[int]

_AGREE = 8  # tokens that must be equal before and after a join


def prompt_ids(model: LanguageModel, prompt: Text, name: str = "prompt") -> list[int]:
    """Return the ids of a prompt, checked against vocabulary and context length."""
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError(f"{name} must be ids for a model without a tokenizer; got text")
        ids = model.tokenizer.encode(prompt)
    else:
        ids = list(prompt)
        checks.check_ids(name, torch.tensor(ids or [0]), model.head.vocab_size)
    if not ids:
        raise ValueError(f"{name} must have at least one token; got none")
    if model.max_length is not None and len(ids) > model.max_length:
        raise ValueError(
            f"{name} must have at most {model.max_length:,} tokens, the model's context length; "
            f"got {len(ids):,}"
        )
    return ids


@torch.no_grad()
def hidden_states(model: LanguageModel, ids: Sequence[int]) -> Tensor:
    """Return the hidden states of ids, (T, D)."""
    hidden, _ = model.hidden(torch.tensor([list(ids)]), use_cache=False)
    return hidden[0]


def stream_ids(
    model: LanguageModel, pieces: Iterable[str], *, portion: int = 1 << 16, overlap: int = 1 << 11
) -> Iterator[list[int]]:
    """Yield the ids of a long text in portions, equal to those of the whole text.

    Equivalent to: model.tokenizer.encode("".join(pieces)), cut into lists

    Args:
        model: a model with a tokenizer.
        pieces: the text, in pieces of any length.
        portion: characters encoded at a time.
        overlap: characters that two neighbouring portions share.

    A portion may be encoded differently at its ends than within the whole text, but not in the
    middle of the shared part. There two portions are joined: at a byte where both start a token and
    agree on the tokens before and after. (A tokenizer that splits words from the left and merges
    letters within a word gives the same ids from a common boundary on.) If there is no such place,
    for instance because the bytes of the tokens are not the text, both are encoded as one portion,
    and the next one is twice as long: in the worst case the whole text at once.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError("the model must have a tokenizer to read a text; it has none")
    source = _Reader(pieces)
    text, done, size = source.take(portion), 0, portion
    ids = tokenizer.encode(text)
    while more := source.take(size):
        shared = text[-overlap:]
        following = tokenizer.encode(shared + more)
        join = _join(tokenizer, ids, following, shared.encode("utf-8"))
        if join is None or join[0] < done:
            text, size = text + more, 2 * size
            ids = tokenizer.encode(text)
            continue
        yield ids[done : join[0]]
        text, ids, done, size = shared + more, following, join[1], portion
    yield ids[done:]


def _join(
    tokenizer: TextTokenizer, left: list[int], right: list[int], shared: bytes
) -> tuple[int, int] | None:
    """Return (i, j) such that left[:i] continues with right[j:]; None if there is no safe place.

    The text of `right` starts with `shared`, the last bytes of the text of `left`.
    """
    lefts = _starts_from_right(tokenizer, left, shared)
    rights = _starts_from_left(tokenizer, right, shared)
    candidates = sorted(
        lefts.keys() & rights.keys(), key=lambda offset: abs(2 * offset - len(shared))
    )
    for offset in candidates:
        i, j = lefts[offset], rights[offset]
        before = left[max(i - _AGREE, 0) : i] == right[max(j - _AGREE, 0) : j]
        if before and left[i : i + _AGREE] == right[j : j + _AGREE]:
            return i, j
    return None


def _starts_from_right(tokenizer: TextTokenizer, ids: list[int], shared: bytes) -> dict[int, int]:
    """Return the starts of tokens in the shared bytes, the last of their text: {offset: index}."""
    starts: dict[int, int] = {}
    offset = len(shared)
    for index in range(len(ids) - 1, 0, -1):
        text = tokenizer.bytes_after(ids[index - 1], ids[index])
        offset -= len(text)
        if offset < 0 or not text or shared[offset : offset + len(text)] != text:
            break
        starts[offset] = index
    return starts


def _starts_from_left(tokenizer: TextTokenizer, ids: list[int], shared: bytes) -> dict[int, int]:
    """Return the starts of tokens in the shared bytes, the first of their text: {offset: index}."""
    starts: dict[int, int] = {}
    offset, previous = 0, None
    for index, id in enumerate(ids):
        text = tokenizer.bytes_after(previous, id)
        previous = id
        if offset == 0:  # a start token or an added space is not part of the text
            text = text if shared.startswith(text) else text.removeprefix(b" ")
        elif not text:
            break
        if shared[offset : offset + len(text)] != text:
            break
        starts[offset] = index
        offset += len(text)
    return starts


class _Reader:
    """Pieces of text, read in blocks of a given number of characters."""

    def __init__(self, pieces: Iterable[str]) -> None:
        self._pieces, self._held = iter(pieces), ""

    def take(self, count: int) -> str:
        held = [self._held]
        size = len(self._held)
        while size < count and (piece := next(self._pieces, None)) is not None:
            held.append(piece)
            size += len(piece)
        text = "".join(held)
        self._held = text[count:]
        return text[:count]


@dataclass(frozen=True)
class Piece:
    """A token's id and text."""

    id: int  # token id
    bytes: bytes  # its bytes in a text; empty for a special token
    special: str | None = None  # name of a token that has no text, e.g. `<eos>`; None for text

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
    """A token of a next-token distribution."""

    piece: Piece  # its id and text
    logit: float  # its score; -inf if the head masks it
    log_prob: float  # the model's log-probability, in nats
    processed_p: float  # its probability after the sampler's stages; `p` without a sampler
    rank: int  # from 0, the most probable token
    cut_by: str | None = None  # the sampler stage that removed it; None if it was kept

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
    text = tokenizer.bytes_after(previous, id) if id < len(tokenizer) else b""
    if text or tokenizer.token_bytes(id):
        return Piece(id, text)
    return Piece(id, b"", _special_name(model, id))


def pieces_of(model: Any, ids: Iterable[int], previous: int | None = None) -> Iterator[Piece]:
    """Yield the pieces of ids after another one; None at the start of a text."""
    for id in ids:
        yield piece_of(model, id, previous)
        previous = id


def text_of(model: Any, ids: Iterable[int], previous: int | None = None) -> str:
    """Return the text of ids after another one; invalid UTF-8 becomes U+FFFD."""
    pieces = pieces_of(model, ids, previous)
    return b"".join(piece.bytes for piece in pieces).decode("utf-8", "replace")


def top_log_probs(answers: Any) -> list[tuple[tuple[int, float], ...]]:
    """Return (id, log-probability) of the top k of each row, of answers with `logsumexp`."""
    values = (answers.top_k.values - answers.logsumexp[:, None]).tolist()
    pairs = zip(answers.top_k.indices.tolist(), values, strict=True)
    return [tuple(zip(*pair, strict=True)) for pair in pairs]


def _special_name(model: Any, id: int) -> str:
    """Return the name of a token without text: the tokenizer's, if it has one."""
    name: Any = getattr(model.tokenizer, "token_name", None)
    if name is not None and (token_name := name(id)):
        return str(token_name)
    if id == model.tokenizer.bos_token_id and id != model.tokenizer.eos_token_id:
        return "<bos>"
    return "<eos>" if id in model.eos_token_ids else f"<{id}>"


def find_token(model: Any, text: str) -> int | None:
    """Return the id of the token with this text; None if there is none.

    If several tokens have it, such as a letter and its byte: the one that the tokenizer uses, else
    the last, since byte tokens come first.
    """
    text_bytes = text.encode("utf-8")
    ids = range(min(len(model.tokenizer), model.head.vocab_size))
    matches = [id for id in ids if model.tokenizer.token_bytes(id) == text_bytes]
    if len(matches) > 1:
        used = set(model.tokenizer.encode(text))
        matches.sort(key=lambda id: id in used)
    return matches[-1] if matches else None
