"""From text files to token files."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lmhead.train import CorpusError, TrainConfig, TrainError
from lmhead.train.token_data import TokenData, last_cut, prepare, read_files, read_pieces, split
from lmhead.train.vocabulary import END_OF_TEXT, make_vocabulary

STORY = "Once upon a time,  there was\n\n\ta cat\u3000猫 it's 42!\r\n one<|endoftext|>two  \n"


def ignore(_: str) -> None:
    pass


def prepared(folder: Path, text: str, **changes: object) -> TokenData:
    path = folder / "corpus.txt"
    path.write_text(text, encoding="utf-8", newline="")
    config = TrainConfig(**changes)  # type: ignore[arg-type]
    prepare([path], folder / "data", config, ignore)
    return TokenData(folder / "data")


@pytest.fixture(scope="module")
def vocabularies() -> dict[str, Tokenizer]:
    return {
        kind: make_vocabulary(kind, [STORY] * 3, 300) for kind in ("bpe", "characters", "words")
    }


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet=sorted(set(STORY)), max_size=80), size=st.integers(1, 20))
def test_pieces_give_the_tokens_of_the_whole_text(
    vocabularies: dict[str, Tokenizer], tmp_path_factory: pytest.TempPathFactory, text: str,
    size: int,
) -> None:  # fmt: skip
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(text, encoding="utf-8", newline="")
    pieces = list(read_pieces(path, size))
    assert "".join(pieces) == text
    for kind, vocabulary in vocabularies.items():
        whole = vocabulary.encode(text, add_special_tokens=False).ids
        parts = [vocabulary.encode(piece, add_special_tokens=False).ids for piece in pieces]
        assert list(itertools.chain(*parts)) == whole, kind


def test_a_long_text_without_spaces_is_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("猫" * 5000 + " end", encoding="utf-8")
    assert [len(piece) for piece in read_pieces(path, 1000)] == [5000, 4]
    assert last_cut("x" * 1000) == 0


@pytest.mark.parametrize("kind", ["bpe", "characters", "words"])
def test_encoding_is_reversible(vocabularies: dict[str, Tokenizer], kind: str) -> None:
    vocabulary = vocabularies[kind]
    ids = vocabulary.encode(STORY, add_special_tokens=False).ids
    assert vocabulary.decode(ids, skip_special_tokens=False) == STORY
    again = Tokenizer.from_str(vocabulary.to_str())
    assert again.encode(STORY, add_special_tokens=False).ids == ids


def test_characters_are_those_of_the_text_in_order(vocabularies: dict[str, Tokenizer]) -> None:
    vocabulary = vocabularies["characters"]
    assert sorted(set(STORY)) == [
        vocabulary.id_to_token(id) for id in range(vocabulary.get_vocab_size())
    ]


def test_words_are_the_most_frequent_and_do_not_depend_on_order() -> None:
    one = make_vocabulary("words", ["b a b\n", "c c"], 5)
    other = make_vocabulary("words", ["c c", "b a b\n"], 5)
    assert one.get_vocab() == other.get_vocab()
    assert one.get_vocab_size() == 5
    assert one.encode("zebra", add_special_tokens=False).tokens == ["<unk>"]


def test_the_end_of_the_text_is_held_out(tmp_path: Path) -> None:
    tokens = prepared(tmp_path, "ab" * 45 + "c" * 10, tokenizer="characters")
    assert (len(tokens.train), len(tokens.valid)) == (90, 10)
    assert set(tokens.valid.tolist()) == {tokens.tokenizer.token_to_id("c")}
    np.testing.assert_array_equal(tokens.counts(), [45, 45, 0])
    assert isinstance(tokens.train, np.memmap)
    assert tokens.train.dtype == np.uint16


def test_many_words_need_wider_ids(tmp_path: Path) -> None:
    text = "".join(f"w{i}\n" for i in range(70_000))
    tokens = prepared(tmp_path, text, tokenizer="words", vocab_size=100_000, valid_fraction=0.0)
    assert tokens.train.dtype == np.uint32
    assert int(tokens.train.max()) == tokens.vocab_size - 1 > 65_536


def test_words_of_the_held_out_text_are_not_learned(tmp_path: Path) -> None:
    tokens = prepared(tmp_path, "seen " * 20 + "unseen " * 2, tokenizer="words", vocab_size=50)
    assert tokens.tokenizer.token_to_id(" unseen") is None


def test_files_are_separated_by_a_token(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"text {name}")
    config = TrainConfig(tokenizer="words", valid_fraction=0.0)
    prepare([tmp_path / "a", tmp_path / "b"], tmp_path / "data", config, ignore)
    tokens = TokenData(tmp_path / "data")
    words = [tokens.tokenizer.id_to_token(int(id)) for id in tokens.train]
    assert words == ["text", " a", END_OF_TEXT, "text", " b"]


def test_a_byte_order_mark_is_dropped_and_line_ends_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert "".join(read_pieces(path)) == "one\r\ntwo\n"


def test_split_reads_no_more_than_it_must() -> None:
    first, rest = split(iter(["abc", "def"]), 3)
    assert (list(first), list(rest)) == (["abc"], ["def"])
    first, rest = split(iter(["abc"]), 9)
    assert (list(first), list(rest)) == (["abc"], [])


def test_files_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"text \xff\xfe")
    with pytest.raises(CorpusError, match=r"bad.txt must be UTF-8 text; found invalid start byte"):
        list(read_files([path]))
    with pytest.raises(CorpusError, match=r"cannot read .*missing.txt: No such file"):
        list(read_files([tmp_path / "missing.txt"]))
    with pytest.raises(CorpusError, match=r"cannot read .*: Is a directory"):
        list(read_files([tmp_path]))


@pytest.mark.parametrize("kind", ["bpe", "characters", "words"])
def test_an_empty_corpus(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ValueError, match="the corpus must hold some text; got 0 characters"):
        prepared(tmp_path, "", tokenizer=kind)
    assert not (tmp_path / "data").exists()


def test_bpe_needs_a_token_for_every_byte() -> None:
    with pytest.raises(ValueError, match="vocab_size must be at least 257 for bpe; got 200"):
        make_vocabulary("bpe", ["text"], 200)


def test_truncated_token_files_are_named(tmp_path: Path) -> None:
    prepared(tmp_path, STORY * 5, tokenizer="characters")
    file = tmp_path / "data" / "train.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(TrainError, match=r"token files in .* are damaged: train.bin has changed"):
        TokenData(tmp_path / "data")
