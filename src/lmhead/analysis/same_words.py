"""Whether two models speak of the same words, so that their probabilities can be compared.

In:  two models, perhaps ids of a text.
Out: nothing, or `DifferentWords`, which says where they part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from lmhead.models import LanguageModel

_WHY = "To compare probabilities, both must be about the same words."


class DifferentWords(ValueError):  # noqa: N818
    """Two models whose tokens are not the same.

    Attributes:
        reason: "sizes" (of the vocabularies), "token" (one id says two things) or "cut" (the same
            tokens, but a text is cut otherwise).
        place: the id for "token", the number of the token in the text for "cut", else None.
        found: what one and the other have: sizes, bytes of the token, ids.
    """

    def __init__(
        self,
        reason: Literal["sizes", "token", "cut"],
        place: int | None,
        found: tuple[int, int] | tuple[bytes, bytes],
    ) -> None:
        one, two = found
        if reason == "sizes" and isinstance(one, int) and isinstance(two, int):
            what = f"have different vocabularies, of {one:,} and {two:,} words"
        else:
            part = "have different vocabularies" if reason == "token" else "cut text differently"
            what = f"{part}: token {place} is {one!r} in one and {two!r} in the other"
        super().__init__(f"the models {what}. {_WHY}")
        self.reason, self.place, self.found = reason, place, found


def check_same_words(a: LanguageModel, b: LanguageModel) -> None:
    """Refuse models whose tokens are not the same: probabilities of different words."""
    if a.tokenizer is None or b.tokenizer is None:
        raise ValueError("both models must have a tokenizer, to read a text")
    sizes = a.head.vocab_size, b.head.vocab_size
    if sizes[0] != sizes[1]:
        raise DifferentWords("sizes", None, sizes)
    for id in range(min(sizes[0], len(a.tokenizer), len(b.tokenizer))):
        says = a.tokenizer.token_bytes(id), b.tokenizer.token_bytes(id)
        if says[0] != says[1]:
            raise DifferentWords("token", id, says)


def checked_cut(other: LanguageModel, portions: Iterator[list[int]]) -> Iterator[list[int]]:
    """See that another tokenizer cuts the beginning of the text in the same way.

    With the same words in the same order, what else may differ is how they are put together, and
    marks at the beginning: the first portion shows it.
    """
    first = next(portions, [])
    assert other.tokenizer is not None
    text = other.tokenizer.decode(first[:256])
    again = other.tokenizer.encode(text)
    for place, pair in enumerate(zip(first[:200], again, strict=False)):
        if pair[0] != pair[1]:
            raise DifferentWords("cut", place, pair)
    yield first
    yield from portions
