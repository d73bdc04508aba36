"""From text to token ids to hidden states.

In:  a model, and text or ids.
Out: `prompt_ids`, `hidden_states`; for long texts `stream_ids`, in bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lmhead import checks
from lmhead.models import LanguageModel
from lmhead.sampling.model import Tokenizer
from lmhead.sampling.text import bytes_after

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
    hidden, _ = model.hidden(torch.tensor([list(ids)]))
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
    tokenizer: Tokenizer, left: list[int], right: list[int], shared: bytes
) -> tuple[int, int] | None:
    """Return (i, j) such that left[:i] continues with right[j:]; None if there is no safe place.

    The text of `right` starts with `shared`, the last bytes of the text of `left`.
    """
    lefts = _starts_from_right(tokenizer, left, shared)
    rights = _starts_from_left(tokenizer, right, shared)
    both = sorted(lefts.keys() & rights.keys(), key=lambda place: abs(2 * place - len(shared)))
    for place in both:
        i, j = lefts[place], rights[place]
        before = left[max(i - _AGREE, 0) : i] == right[max(j - _AGREE, 0) : j]
        if before and left[i : i + _AGREE] == right[j : j + _AGREE]:
            return i, j
    return None


def _starts_from_right(tokenizer: Tokenizer, ids: list[int], shared: bytes) -> dict[int, int]:
    """Return where tokens start in the shared bytes, the last of its text: {place: index}."""
    found: dict[int, int] = {}
    place = len(shared)
    for index in range(len(ids) - 1, 0, -1):
        text = bytes_after(tokenizer, ids[index - 1], ids[index])
        place -= len(text)
        if place < 0 or not text or shared[place : place + len(text)] != text:
            break
        found[place] = index
    return found


def _starts_from_left(tokenizer: Tokenizer, ids: list[int], shared: bytes) -> dict[int, int]:
    """Return where tokens start in the shared bytes, the first of its text: {place: index}."""
    found: dict[int, int] = {}
    place, previous = 0, None
    for index, id in enumerate(ids):
        text = bytes_after(tokenizer, previous, id)
        previous = id
        if place == 0:  # a start token or an added space is not part of the text
            text = text if shared.startswith(text) else text.removeprefix(b" ")
        elif not text:
            break
        if shared[place : place + len(text)] != text:
            break
        found[place] = index
        place += len(text)
    return found


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
