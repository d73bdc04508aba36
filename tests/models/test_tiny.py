"""The model that comes with lmhead: small, whole, what its card says, and able to write."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lmhead
from lmhead.analysis import next_tokens, score
from lmhead.models import LanguageModel, bundled, open_model
from lmhead.sampling import Sampler

# From the end of the corpus, which was held out: Jeremiah 47:5-7, and two songs.
ENGLISH = """\
Baldness is come upon Gaza; Ashkelon is cut off with the remnant of their valley: how long wilt \
thou cut thyself?
O thou sword of the LORD, how long will it be ere thou be quiet? put up thyself into thy scabbard, \
rest, and be still.
How can it be quiet, seeing the LORD hath given it a charge against Ashkelon, and against the sea \
shore? there hath he appointed it.
"""
CHINESE = """\
点绛唇
客梦初回，卧听吴语开帆索。护霜云薄。澹澹芙蓉落。画舫无情，人去天涯角。思量著。翠蝉金雀。别后新梳掠。

谢池春
残寒销尽，疏雨过、清明后。花径敛馀红，风沼萦新皱。乳燕穿庭户，飞絮沾襟袖。正佳时，仍晚昼。著人滋味，真个浓如酒。\
频移带眼，空只恁、厌厌瘦。不见又思量，见了还依旧。为问频相见，何似长相守。天不老，人未偶。且将此恨，分付庭前柳。
"""


@pytest.fixture(scope="module")
def folder() -> Path:
    found = bundled.find("tiny")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return open_model("tiny")


def test_opens_by_name_as_float32_with_a_tied_head(model: LanguageModel) -> None:
    assert model.name == "tiny"
    assert model.tokenizer is not None
    assert model.head.vocab_size == len(model.tokenizer)
    assert model.head.weight.dtype == torch.float32
    assert model.head.weight is model.body.embedding.weight  # type: ignore[attr-defined]
    assert not any(parameter.requires_grad for parameter in model.head.parameters())


def test_small_enough_to_ship(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    assert sizes.keys() == {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert sum(sizes.values()) <= 6_000_000


def test_weights_are_finite_and_in_16_bits(folder: Path) -> None:
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert tensor.dtype == torch.float16, name
        assert tensor.isfinite().all(), name


def test_the_card_is_of_these_files(folder: Path) -> None:
    card = (folder / "README.md").read_text(encoding="utf-8")
    weights = (folder / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() in card
    about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    parameters = sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    training = about["training"]
    assert f"| parameters | {parameters:,}," in card
    assert f"{training['layers']} layers, {training['heads']} heads" in card
    assert f"D = {training['width']}, V = {about['model']['vocab_size']:,}" in card
    assert f"| trained for | {about['step']:,} steps" in card
    assert training["corpus"] == ["corpus.txt"]
    assert "$" not in card


@pytest.mark.parametrize(("text", "row"), [(ENGLISH, "English"), (CHINESE, "Chinese")])
def test_expects_text_that_was_held_out_about_as_the_card_says(
    model: LanguageModel, folder: Path, text: str, row: str
) -> None:
    card = (folder / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {row} \| [\d,]+ \| ([\d.]+) \| ([\d.]+) \|", card, re.MULTILINE)
    assert found is not None
    result = score(model, text)
    bits = float(found[2])
    assert 0.7 * bits < result.bits_per_byte < 1.4 * bits
    assert result.perplexity < {"English": 100, "Chinese": 250}[row]  # V = 5,120 for a guess


def _made(model: LanguageModel, prompt: str) -> str:
    sampler = Sampler(temperature=0.7, top_p=0.9, seed=1)
    return lmhead.generate(model, prompt, sampler, max_new_tokens=48, eos_token_ids=()).text


def test_english_is_gone_on_with_in_english_words(model: LanguageModel) -> None:
    text = _made(model, "In the beginning")
    assert text == _made(model, "In the beginning")
    assert text.isascii()
    words = re.findall(r"[A-Za-z]+", text)
    assert len(words) >= 25
    common = {"the", "and", "of", "to", "that", "in", "he", "unto", "lord", "his", "they", "shall"}
    assert sum(word.lower() in common for word in words) >= len(words) / 5


def test_chinese_is_gone_on_with_in_chinese_phrases(model: LanguageModel) -> None:
    text = _made(model, "蝶恋花\n")
    assert text == _made(model, "蝶恋花\n")
    song = text.split("\n\n")[0]
    assert "\ufffd" not in song
    phrases = re.findall(r"[\u4e00-\u9fff]+", song)
    assert len(phrases) >= 4
    assert sum(3 <= len(phrase) <= 9 for phrase in phrases) >= 0.8 * len(phrases)
    assert len("".join(phrases)) >= 0.7 * len(song)


@pytest.mark.parametrize(
    ("prompt", "word"),
    [("And it came to", " pass"), ("the children of", " Israel"), ("浣溪沙", "\n")],
)
def test_knows_what_always_follows(model: LanguageModel, prompt: str, word: str) -> None:
    found = next_tokens(model, prompt)
    assert found.tokens[0].piece.text == word
