"""`stream_ids`: the ids of a text that is never held whole are those of the whole text."""

import random
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_data import SMOLLM2_TOKENIZER, WIKITEXT_TEST, needs
from tiny_models import Letters, lettered, tiny

from lmhead.analysis.token_text import prompt_ids, stream_ids
from lmhead.models import JsonTokenizer, LanguageModel

WORDS = "the cat sat on a mat 12345 你好 don't -- stop. \n\n  x\t" + "a" * 40


def text_of(seed: int, length: int = 3000) -> str:
    words = WORDS.split(" ")
    chooser = random.Random(seed)
    made = ""
    while len(made) < length:
        made += chooser.choice(words) + chooser.choice([" ", " ", " ", "  ", "\n", ""])
    return made


def joined(portions: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(portions))


def pieces_of(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_the_same_ids_however_it_is_cut(seed: int, bos: bool) -> None:
    model, text = lettered(bos=bos), text_of(seed)
    whole = Letters(bos=bos).encode(text)
    for size, portion, overlap in ((1, 300, 100), (97, 500, 64), (5000, 200, 128)):
        found = list(stream_ids(model, pieces_of(text, size), portion=portion, overlap=overlap))
        assert joined(found) == whole
        assert len(found) > 3, "it was encode_text at once"


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ab 1\n.你é", max_size=600), st.integers(20, 60), st.integers(4, 40))
def test_the_same_ids_for_any_text(text: str, portion: int, overlap: int) -> None:
    found = stream_ids(lettered(), pieces_of(text, 7), portion=portion, overlap=overlap)
    assert joined(found) == Letters().encode(text)


def test_without_a_place_to_join_it_is_encoded_at_once() -> None:
    model = lettered(lower=True)  # whose tokens do not spell the text
    text = text_of(1).upper()
    found = list(stream_ids(model, pieces_of(text, 100), portion=200, overlap=50))
    assert joined(found) == Letters(lower=True).encode(text)


def test_a_tokenizer_that_puts_a_space_in_front(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    assert model.tokenizer is not None
    text = "hello ab hello 你 cab " * 100
    found = list(stream_ids(model, [text], portion=256, overlap=128))
    assert joined(found) == model.tokenizer.encode(text)
    assert len(found) > 3


def test_a_short_text_and_none() -> None:
    model = lettered(bos=True)
    assert joined(stream_ids(model, ["a"])) == [256, 97]
    assert joined(stream_ids(model, [])) == [256]


@needs(SMOLLM2_TOKENIZER, WIKITEXT_TEST)
def test_a_real_tokenizer_on_a_real_text() -> None:
    tokenizer = JsonTokenizer(SMOLLM2_TOKENIZER)
    model = LanguageModel(lettered().body, lettered().head, tokenizer=tokenizer)
    text = WIKITEXT_TEST.read_text(encoding="utf-8")[:400_000]
    text += "<|endoftext|>" + text[:100_000]  # a mark, whose bytes do not spell the text
    found = list(stream_ids(model, pieces_of(text, 10_000)))
    assert joined(found) == tokenizer.encode(text)
    assert len(found) > 5


def test_prompts() -> None:
    model = LanguageModel(lettered().body, lettered().head)
    assert prompt_ids(model, [1, 2]) == [1, 2]
    with pytest.raises(ValueError, match="prompt must be ids for a model without a tokenizer"):
        prompt_ids(model, "text")
    with pytest.raises(ValueError, match="must have a tokenizer"):
        list(stream_ids(model, ["text"]))
