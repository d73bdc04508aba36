"""From text to ids to hidden states: what every analysis begins with.

In:  a model, and text or ids.
Out: `prompt_ids`, `read_hidden`; for long texts `stream_ids`, which never holds the whole.
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

_AGREE = 8  # tokens that must be the same before and behind a seam


def prompt_ids(model: LanguageModel, prompt: Text, name: str = "prompt") -> list[int]:
    """The ids of a prompt that the model can see at once."""
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
            f"{name} must have at most {model.max_length:,} tokens, what the model can see at "
            f"once; got {len(ids):,}"
        )
    return ids


@torch.no_grad()
def read_hidden(model: LanguageModel, ids: Sequence[int]) -> Tensor:
    """The hidden states of ids, (T, D)."""
    hidden, _ = model.hidden(torch.tensor([list(ids)]))
    return hidden[0]


def stream_ids(
    model: LanguageModel, pieces: Iterable[str], *, portion: int = 1 << 16, overlap: int = 1 << 11
) -> Iterator[list[int]]:
    """The ids of a long text, portion by portion, the same as those of the whole text.

    Equivalent to: model.tokenizer.encode("".join(pieces)), cut into lists

    Args:
        model: whose tokenizer.
        pieces: the text, in pieces of any length.
        portion: how many characters are encoded at a time.
        overlap: how many of them a portion shares with the next one.

    At its ends a portion may be encoded otherwise than in the whole text, in the middle of the
    shared part it is not. There two portions are joined: where both have a token begin, and agree
    about the tokens before and behind. (A tokenizer that cuts words from the left and joins letters
    within a word sees, from a boundary on, the same text, and gives the same ids.) Where no such
    place is found, for instance because the bytes of the tokens do not spell the text, both are
    encoded as one portion, and the next one is taken twice as long: at worst the whole text at
    once.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError("text needs a tokenizer, which this model does not have")
    source = _Reader(pieces)
    text, done, size = source.take(portion), 0, portion
    ids = tokenizer.encode(text)
    while more := source.take(size):
        shared = text[-overlap:]
        following = tokenizer.encode(shared + more)
        seam = _seam(tokenizer, ids, following, shared.encode("utf-8"))
        if seam is None or seam[0] < done:
            text, size = text + more, 2 * size
            ids = tokenizer.encode(text)
            continue
        yield ids[done : seam[0]]
        text, ids, done, size = shared + more, following, seam[1], portion
    yield ids[done:]


def _seam(
    tokenizer: Tokenizer, left: list[int], right: list[int], shared: bytes
) -> tuple[int, int] | None:
    """Where to leave the ids of one text for those of the next, which begins with its last bytes.

    Gives (i, j): left[:i] goes on with right[j:]. None if there is no good place.
    """
    ends = _begins_from_right(tokenizer, left, shared)
    begins = _begins_from_left(tokenizer, right, shared)
    both = sorted(ends.keys() & begins.keys(), key=lambda place: abs(2 * place - len(shared)))
    for place in both:
        i, j = ends[place], begins[place]
        before = left[max(i - _AGREE, 0) : i] == right[max(j - _AGREE, 0) : j]
        if before and left[i : i + _AGREE] == right[j : j + _AGREE]:
            return i, j
    return None


def _begins_from_right(tokenizer: Tokenizer, ids: list[int], shared: bytes) -> dict[int, int]:
    """Where in the shared bytes, the last of its text, tokens begin: {place: index}."""
    found: dict[int, int] = {}
    place = len(shared)
    for index in range(len(ids) - 1, 0, -1):
        says = bytes_after(tokenizer, ids[index - 1], ids[index])
        place -= len(says)
        if place < 0 or not says or shared[place : place + len(says)] != says:
            break
        found[place] = index
    return found


def _begins_from_left(tokenizer: Tokenizer, ids: list[int], shared: bytes) -> dict[int, int]:
    """Where in the shared bytes, the first of its text, tokens begin: {place: index}."""
    found: dict[int, int] = {}
    place, previous = 0, None
    for index, id in enumerate(ids):
        says = bytes_after(tokenizer, previous, id)
        previous = id
        if place == 0:  # a mark of the beginning, a space in front: not part of the text
            says = says if shared.startswith(says) else says.removeprefix(b" ")
        elif not says:
            break
        if shared[place : place + len(says)] != says:
            break
        found[place] = index
        place += len(says)
    return found


class _Reader:
    """Pieces of text, so many characters at a time."""

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
