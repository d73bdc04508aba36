"""Check that two models have the same tokens, so that their probabilities can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from lmhead.models import LanguageModel


class VocabularyMismatch(ValueError):  # noqa: N818
    """Two models whose tokens differ.

    Attributes:
        reason: "sizes" (vocabulary sizes differ), "token" (one id has two meanings) or "cut" (the
            same tokens, but the same text is tokenized differently).
        place: the token id for "token", the index in the text for "cut", else None.
        found: of each model: size, bytes of the token, or id.
    """

    def __init__(
        self,
        reason: Literal["sizes", "token", "cut"],
        place: int | None,
        found: tuple[int, int] | tuple[bytes, bytes],
    ) -> None:
        first, second = found
        if reason == "sizes":
            problem = f"have vocabularies of {first!r} and {second!r} tokens"
        elif reason == "token":
            problem = f"have different vocabularies: token id {place} is {first!r} and {second!r}"
        else:
            problem = (
                f"tokenize the text differently: token {place} has the ids {first!r} and {second!r}"
            )
        super().__init__(f"the models must have the same tokens to be compared; they {problem}")
        self.reason, self.place, self.found = reason, place, found


def check_same_vocabulary(a: LanguageModel, b: LanguageModel) -> None:
    """Raise `VocabularyMismatch` unless both models have the same tokens under the same ids."""
    if a.tokenizer is None or b.tokenizer is None:
        raise ValueError("both models must have a tokenizer to read a text")
    sizes = a.head.vocab_size, b.head.vocab_size
    if sizes[0] != sizes[1]:
        raise VocabularyMismatch("sizes", None, sizes)
    for id in range(min(sizes[0], len(a.tokenizer), len(b.tokenizer))):
        pair = a.tokenizer.token_bytes(id), b.tokenizer.token_bytes(id)
        if pair[0] != pair[1]:
            raise VocabularyMismatch("token", id, pair)


def check_same_tokenization(
    other: LanguageModel, portions: Iterator[list[int]]
) -> Iterator[list[int]]:
    """Yield the portions, after checking that another tokenizer splits the first one alike.

    With the same tokens under the same ids, tokenizers may still differ in their merges and in the
    special tokens at the beginning of a text; the first portion shows it.
    """
    first = next(portions, [])
    assert other.tokenizer is not None  # of `check_same_vocabulary`
    encoded = other.tokenizer.encode(other.tokenizer.decode(first[:256]))
    for place, pair in enumerate(zip(first[:200], encoded, strict=False)):
        if pair[0] != pair[1]:
            raise VocabularyMismatch("cut", place, pair)
    yield first
    yield from portions
