"""tokenizer.json: the bytes of every token, in every way that vocabularies spell them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shared_data import SMOLLM2_TOKENIZER, needs
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from lmhead.errors import ModelError
from lmhead.models import JsonTokenizer, bundled
from models import hf_folders

TEXTS = [
    "hello world",
    " hello",
    "  two  spaces ",
    "你好, é🙂\n",
    "a\tb\r\nc",
    "",
    "don't <s> stop</s>",
    "0x0A <0x0A>",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def save(tokenizer: Any, folder: Path) -> Path:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def byte_level(folder: Path) -> Path:
    return hf_folders.write_tokenizer(folder)


def sentencepiece(folder: Path) -> Path:
    """As Llama 2: ▁ for a space, one put in front of a text and taken off again, bytes."""
    words = ["<unk>", "<s>", "</s>", *BYTES, "▁", "h", "e", "l", "o", "▁h", "el", "▁hel", "你"]
    merges = [("▁", "h"), ("e", "l"), ("▁h", "el")]
    tokenizer: Any = Tokenizer(
        models.BPE(
            vocab={word: id for id, word in enumerate(words)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return save(tokenizer, folder)


def metaspace(folder: Path) -> Path:
    """As Gemma and T5: unigram pieces with ▁, nothing taken off."""
    letters = sorted(set("▁helowrd你好,é🙂\nabc\t\r0xA<>sdn'tp/"))
    pieces = [("<unk>", 0.0), *((letter, -3.0) for letter in letters)]
    tokenizer: Any = Tokenizer(models.Unigram(pieces, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never", split=False)
    return save(tokenizer, folder)


MAKERS: dict[str, Callable[[Path], Path]] = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "metaspace": metaspace,
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_make_the_text(tmp_path: Path, kind: str, text: str) -> None:
    path = MAKERS[kind](tmp_path)
    tokenizer = JsonTokenizer(path, bos_token_id=1)
    theirs: Any = Tokenizer.from_file(str(path))
    ids = tokenizer.encode(text)
    assert ids == theirs.encode(text).ids
    decoded = tokenizer.decode(ids)
    assert decoded == theirs.decode(ids)
    if "<s>" in text:  # which is a mark, and not text
        return
    assert decoded == text
    pieces = [tokenizer.bytes_after(None if n == 0 else ids[n - 1], id) for n, id in enumerate(ids)]
    assert b"".join(pieces).decode() == decoded


def test_pieces_of_characters_are_bytes(tmp_path: Path) -> None:
    for make in (byte_level, sentencepiece):
        tokenizer = JsonTokenizer(make(tmp_path))
        ids = tokenizer.encode("é", bos=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).removeprefix(b" ") == "é".encode()
        assert tokenizer.token_bytes(ids[-1]) == b"\xa9"
        assert tokenizer.decode(ids[-1:]) == "\ufffd"


def test_a_space_is_kept_inside_a_text(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(sentencepiece(tmp_path), bos_token_id=1)
    hel = tokenizer.encode("hel", bos=False)[0]
    assert tokenizer.token_bytes(hel) == b" hel"
    assert tokenizer.bytes_after(None, hel) == b"hel"
    assert tokenizer.bytes_after(1, hel) == b"hel"  # behind the mark that begins a text
    assert tokenizer.bytes_after(hel, hel) == b" hel"
    assert tokenizer.encode("hel") == [1, hel]


def test_special_and_added_tokens(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(sentencepiece(tmp_path), bos_token_id=1, eos_token_id=2)
    tool = len(tokenizer) - 1
    assert tokenizer.token_bytes(1) == tokenizer.token_bytes(2) == b""
    assert tokenizer.token_bytes(tool) == b"<tool>"
    assert tokenizer.token_name(1) == "<s>"
    assert tokenizer.token_name(tool) == "<tool>"
    assert tokenizer.token_name(3 + 10) == "<0x0A>"
    # Vocabularies of models are padded: ids beyond the tokenizer's have no bytes.
    assert tokenizer.token_bytes(tool + 1) == b""
    assert tokenizer.token_name(tool + 1) == f"<{tool + 1}>"
    with pytest.raises(ValueError, match="id must be at least 0; got -1"):
        tokenizer.token_bytes(-1)


def test_words_with_spaces_between(tmp_path: Path) -> None:
    tokenizer: Any = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ours = JsonTokenizer(save(tokenizer, tmp_path))
    assert ours.decode([1, 2, 1]) == tokenizer.decode([1, 2, 1]) == "one two one"


def test_word_pieces(tmp_path: Path) -> None:
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2, "on": 3}
    tokenizer: Any = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    ours = JsonTokenizer(save(tokenizer, tmp_path))
    ids = ours.encode("playing on play")
    assert ids == [1, 2, 3, 1]
    assert ours.decode(ids) == tokenizer.decode(ids) == "playing on play"


def test_ends_of_words(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "l": 1, "o": 2, "o</w>": 3, "lo</w>": 4, "l</w>": 5}
    tokenizer: Any = Tokenizer(
        models.BPE(vocab=vocab, merges=[("l", "o</w>")], end_of_word_suffix="</w>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    ours = JsonTokenizer(save(tokenizer, tmp_path))
    ids = ours.encode("lo oo lo")
    assert ours.decode(ids).rstrip() == tokenizer.decode(ids) == "lo oo lo"


def test_the_mark_of_the_end_is_left_out_of_prompts(tmp_path: Path) -> None:
    path = sentencepiece(tmp_path)
    tokenizer: Any = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", None, [("<s>", 1), ("</s>", 2)]
    )
    ours = JsonTokenizer(save(tokenizer, tmp_path), bos_token_id=1, eos_token_id=2)
    hel = ours.encode("hel", bos=False)
    assert ours.encode("hel") == [1, *hel]
    assert ours.encode("hel</s>") == [1, *hel, 2]  # the user's own
    assert ours.encode("") == [1]


def test_limits_of_training_do_not_cut_texts(tmp_path: Path) -> None:
    tokenizer: Any = Tokenizer.from_file(str(byte_level(tmp_path)))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=10)
    ours = JsonTokenizer(save(tokenizer, tmp_path))
    assert ours.decode(ours.encode("longer than four")) == "longer than four"
    assert len(ours.encode("ab")) == 2


def test_no_file_and_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer.json is missing"):
        JsonTokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"cannot be read"):
        JsonTokenizer(tmp_path / "tokenizer.json")


@needs(SMOLLM2_TOKENIZER)
def test_every_token_of_smollm2() -> None:
    tokenizer = JsonTokenizer(SMOLLM2_TOKENIZER)
    theirs: Any = Tokenizer.from_file(str(SMOLLM2_TOKENIZER))
    assert len(tokenizer) == 49152
    for id in range(0, 49152, 7):
        expected = theirs.decode([id], skip_special_tokens=True)
        assert tokenizer.token_bytes(id).decode("utf-8", "replace") == expected
    text = "The capital of France is Paris. 巴黎 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def hostile(folder: Path, **changes: Any) -> Path:
    """The tokenizer of the bundled model, with some parts replaced."""
    given = bundled.find("tiny")
    assert given is not None
    content = json.loads((given / "tokenizer.json").read_text(encoding="utf-8"))
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content | changes), encoding="utf-8")
    return path


def test_a_pattern_of_exponential_time_is_an_error(tmp_path: Path) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    tokenizer = JsonTokenizer(hostile(tmp_path, pre_tokenizer=pattern | {"invert": False}))
    with pytest.raises(ModelError, match="cannot encode this text"):
        tokenizer.encode("a" * 60 + "b")
    assert tokenizer.encode("b")


def test_replacements_that_multiply_are_refused(tmp_path: Path) -> None:
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    path = hostile(tmp_path, normalizer={"type": "Sequence", "normalizers": [grow] * 3})
    with pytest.raises(ModelError, match="at most 1000 times as long; got 1e"):
        JsonTokenizer(path)
