"""llama2.c's files: read as described, refused with a reason where they are not."""

import itertools
import random
import struct
from pathlib import Path

import pytest
import torch
from compare import assert_close
from llama2c_files import (
    TOKENS,
    random_weights,
    tiny_model,
    vocabulary,
    write_checkpoint,
    write_vocabulary,
)
from shared_data import STORIES, needs
from torch import Tensor

from lmhead import LMHead
from lmhead.errors import ModelError
from lmhead.models import LanguageModel, Llama2cTokenizer, load_llama2c
from lmhead.nn import LlamaBody

with_stories = needs(STORIES)


def plain_llama(weights: dict[str, Tensor], ids: list[int], heads: int, groups: int) -> Tensor:
    """The logits of every position, (T, V): llama2.c's forward pass, one head at a time."""
    w = {name: value.double() for name, value in weights.items()}

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def turn(x: Tensor) -> Tensor:
        """x (T, d): pairs of neighbours as complex numbers."""
        d = x.shape[1]
        rates = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * rates
        pairs = torch.view_as_complex(x.reshape(len(x), -1, 2).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(1)

    x = w["tok_embeddings"][ids]
    d = x.shape[1] // heads
    later = torch.ones(len(ids), len(ids)).triu(1).bool()
    for i in range(len(w["wq"])):
        y = norm(x, w["attention_norm"][i])
        q, k, v = (torch.split(y @ w[name][i].T, d, -1) for name in ("wq", "wk", "wv"))
        mixed = []
        for head in range(heads):
            group = head // (heads // groups)
            scores = turn(q[head]) @ turn(k[group]).T / d**0.5
            mixed.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v[group])
        x = x + torch.cat(mixed, -1) @ w["wo"][i].T
        y = norm(x, w["ffn_norm"][i])
        x = x + (torch.nn.functional.silu(y @ w["w1"][i].T) * (y @ w["w3"][i].T)) @ w["w2"][i].T
    return norm(x, w["norm"]) @ w.get("output", w["tok_embeddings"]).T


def logits_of(model: LanguageModel, ids: list[int]) -> Tensor:
    hidden, _ = model.body(torch.tensor([ids]), None, torch.ones(1, len(ids), dtype=torch.bool))
    return hidden[0] @ model.head.weight.T


IDS = [1, 7, 260, 260, 8, 299, 0]


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_plain_forward_pass(tmp_path: Path, tied: bool) -> None:
    weights = random_weights(tied=tied)
    model = load_llama2c(write_checkpoint(tmp_path / "tiny.bin", weights))
    expected = plain_llama(weights, IDS, heads=4, groups=2)
    assert_close(logits_of(model, IDS), expected, atol=1e-4, dtype=torch.float32)


def test_what_is_opened(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    assert isinstance(model.body, LlamaBody)
    assert isinstance(model.head, LMHead)
    assert model.head.weight is model.body.embedding.weight
    assert not any(p.requires_grad for p in model.body.parameters())
    assert (model.max_length, model.eos_token_ids, model.name) == (64, (1, 2), "tiny")


def test_an_untied_head_has_a_weight_of_its_own(tmp_path: Path) -> None:
    weights = random_weights(tied=False)
    model = load_llama2c(write_checkpoint(tmp_path / "own.bin", weights))
    assert torch.equal(model.head.weight, weights["output"])
    assert not model.head.weight.requires_grad


def test_weights_are_views_of_one_file_and_never_written_back(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny.bin", random_weights())
    before = path.read_bytes()
    model = load_llama2c(path)
    assert isinstance(model.body, LlamaBody)
    storages = {p.untyped_storage().data_ptr() for p in model.body.parameters()}
    assert len(storages) == 1
    model.body.norm.weight.zero_()
    assert path.read_bytes() == before


def test_a_tokenizer_beside_the_checkpoint_is_found(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny.bin", random_weights())
    assert load_llama2c(path).tokenizer is None
    write_vocabulary(tmp_path / "tokenizer.bin", vocabulary(TOKENS))
    assert load_llama2c(path).tokenizer is not None
    elsewhere = write_vocabulary(tmp_path / "other", vocabulary(["other"]))
    tokenizer = load_llama2c(path, elsewhere).tokenizer
    assert tokenizer is not None
    assert tokenizer.token_bytes(259) == b"other"


# --- files that are not what they should be -------------------------------------------------------


def test_a_checkpoint_of_another_size_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny.bin", random_weights())
    data = path.read_bytes()
    for wrong in (data[:-4], data[:-1], data + b"\0", data[:28]):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=f"must have {len(data):,} bytes.*got {len(wrong):,}"):
            load_llama2c(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ((16, 24, 2, 4, 3, 300, 64), "num_attention_heads must be a multiple"),
        ((0, 24, 2, 4, 2, 300, 64), "hidden_size must be at least 1; got 0"),
        ((16, 24, -2, 4, 2, 300, 64), "num_hidden_layers must be at least 1; got -2"),
        ((16, 24, 2, 4, 2, 300, 0), "max_seq_len must be at least 1; got 0"),
        ((0x616B3432, 2, 16, 24, 2, 4, 2), "version 0 .*got version 2"),
    ],
)
def test_a_wrong_header_is_refused(tmp_path: Path, header: tuple[int, ...], message: str) -> None:
    path = tmp_path / "wrong.bin"
    path.write_bytes(struct.pack("<7i", *header) + bytes(400))
    with pytest.raises(ValueError, match=message):
        load_llama2c(path)
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="got 5 bytes"):
        load_llama2c(path)
    with pytest.raises(ModelError, match="is missing"):
        load_llama2c(tmp_path / "nothing.bin")


def test_a_wrong_vocabulary_is_refused(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny.bin", random_weights())
    path = write_vocabulary(tmp_path / "words", vocabulary(TOKENS, 299))
    with pytest.raises(ValueError, match=r"must have 300 tokens.*got 299"):
        load_llama2c(model, path)
    data = path.read_bytes()
    for cut in (len(data) - 1, 4 + 8 + 5 + 3, 10):
        path.write_bytes(data[:cut])
        with pytest.raises(ValueError, match="truncated"):
            Llama2cTokenizer(path)
    path.write_bytes(b"ab")
    with pytest.raises(ValueError, match="got 2 bytes"):
        Llama2cTokenizer(path)
    write_vocabulary(path, vocabulary(TOKENS)[:200])
    with pytest.raises(ValueError, match="got 197"):
        Llama2cTokenizer(path)


# --- the tokenizer --------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tmp_path: Path) -> Llama2cTokenizer:
    return Llama2cTokenizer(write_vocabulary(tmp_path / "words", vocabulary(TOKENS)))


def naive(pieces: list[bytes], text: str) -> list[int]:
    """Look for the best pair, join it, look again. Lower ids have better scores."""
    ids: list[int] = []
    for character in " " + text:
        piece = character.encode()
        found = pieces.index(piece) if piece in pieces else None
        ids += [3 + byte for byte in piece] if found is None else [found]
    while True:
        joined = [
            (pieces.index(pieces[a] + pieces[b]), place)
            for place, (a, b) in enumerate(itertools.pairwise(ids))
            if pieces[a] + pieces[b] in pieces
        ]
        if not joined:
            return [1, *ids]
        id, place = min(joined)
        ids[place : place + 2] = [id]


def test_encode_joins_the_best_pair_first(tokenizer: Llama2cTokenizer) -> None:
    pieces = vocabulary(TOKENS)
    hello = pieces.index(b" hello")
    assert tokenizer.encode("hello") == [1, hello]
    assert tokenizer.encode("hello", bos=False) == [hello]
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("", bos=False) == []
    draw = random.Random(0)
    for length in [1, 2, 3, 5, 10, 40] * 10:
        text = "".join(draw.choices("helo abc你é\n<0x1>", k=length))
        assert tokenizer.encode(text) == naive(pieces, text), text


def test_characters_without_an_id_become_bytes(tokenizer: Llama2cTokenizer) -> None:
    space, known = TOKENS.index(" ") + 259, TOKENS.index("你") + 259
    assert tokenizer.encode("你é") == [1, space, known, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"


@pytest.mark.parametrize("text", ["hello", " hello", "  ", "你好, é🙂\n", "<s>", "<0x41>", "a\0b"])
def test_decode_gives_the_text_back(tokenizer: Llama2cTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    # Only the space that `encode` added is dropped, and only where the text begins.
    assert tokenizer.decode(ids[1:]) == " " + text


def test_special_tokens_are_not_text(tokenizer: Llama2cTokenizer) -> None:
    assert tokenizer.token_bytes(1) == tokenizer.token_bytes(2) == b""
    assert tokenizer.decode([1, 2]) == ""
    assert len(tokenizer) == 300


# --- the real one ---------------------------------------------------------------------------------


@with_stories
def test_the_vocabulary_of_the_stories() -> None:
    tokenizer = load_llama2c(STORIES).tokenizer
    assert isinstance(tokenizer, Llama2cTokenizer)
    pieces = [tokenizer.token_bytes(id) for id in range(512)]
    for text in ("Once upon a time, there was a girl.", "Lily said: 你好!\n", "  two  spaces "):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert ids == naive(vocabulary(size=259) + pieces[259:], text)


@with_stories
def test_the_model_of_the_stories_gives_the_logits_of_the_plain_forward_pass() -> None:
    numbers = torch.frombuffer(bytearray(STORIES.read_bytes()[28:]), dtype=torch.float32)
    weights, begin = {}, 0
    shapes = random_weights(
        dim=64, hidden_dim=172, n_layers=5, n_heads=8, n_kv_heads=4, vocab_size=512, max_seq_len=512
    )
    for name, like in shapes.items():
        weights[name] = numbers[begin : begin + like.numel()].view(like.shape)
        begin += like.numel()
    assert begin == len(numbers)
    model = load_llama2c(STORIES)
    ids = model.tokenizer.encode("Once upon a time, there was a girl.") if model.tokenizer else []
    expected = plain_llama(weights, ids, heads=8, groups=4)
    assert_close(logits_of(model, ids), expected, atol=1e-3)
    assert load_llama2c(STORIES).max_length == 512
