"""GGUF files: the numbers that are in them, unpacked once, and again where the cache is damaged."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_close
from shared_data import SMOLLM2_TOKENIZER, needs
from tokenizers import Tokenizer

from lmhead import PerformanceWarning
from lmhead.errors import ModelError
from lmhead.models import LanguageModel, bundled, load_gguf, open_model
from lmhead.models.gguf_file import GgufFile
from lmhead.models.gguf_tokenizer import make_tokenizer
from lmhead.models.model_files import Fields
from lmhead.sweep import kernels
from lmhead.user_cache import cache_folder
from models import gguf_files

IDS = torch.tensor([[1, 70, 8, 260, 33, 9, 9, 120]])
gguf: Any = gguf_files.gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def logits_of(model: LanguageModel) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        found: torch.Tensor = model.head(model.hidden(IDS)[0]).materialize()
    return found


def theirs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_gives_the_logits_it_was_written_from(tmp_path: Path, tied: bool) -> None:
    path = tmp_path / "small.gguf"
    model = gguf_files.write(path, tie_word_embeddings=tied, num_key_value_heads=1)
    ours = open_model(path)
    assert_close(logits_of(ours), theirs(model), atol=1e-5, rtol=1e-5)
    assert (ours.name, ours.eos_token_ids, ours.max_length) == ("small", (2,), 64)
    assert ours.tokenizer is not None
    assert ours.tokenizer.decode(ours.tokenizer.encode("what a thing 12")) == "what a thing 12"


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1"])
def test_quantized_numbers(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "small.gguf"
    model = gguf_files.write(path, quantization=kind)
    weight = model.model.embed_tokens.weight.detach().float().numpy()
    step = gguf.GGMLQuantizationType[kind]
    expected = gguf.quants.dequantize(gguf.quants.quantize(weight, step), step)
    ours = open_model(path)
    assert torch.equal(ours.body.embedding.weight, torch.from_numpy(expected))  # type: ignore[attr-defined]
    assert not np.array_equal(expected, weight)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_another_architecture_goes_through_transformers(tmp_path: Path, arch: str) -> None:
    pytest.importorskip("accelerate")
    path = tmp_path / "small.gguf"
    model = gguf_files.write(path, arch=arch, head_dim=128 if arch == "qwen3" else 32)
    assert_close(logits_of(open_model(path)), theirs(model), atol=1e-5, rtol=1e-5)


def test_an_unknown_architecture(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    path = tmp_path / "small.gguf"
    gguf_files.write(path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"llama", b"lamas"))
    with pytest.raises(ModelError, match=r"\(.*qwen3.*\); got 'lamas'. Open .* folder"):
        open_model(path)


# --- the cache ------------------------------------------------------------------------------------


def folders(cache: Path) -> list[Path]:
    return sorted(cache.glob("gguf/*"))


def test_the_second_start_reads_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "small.gguf"
    gguf_files.write(path)
    first = logits_of(open_model(path))
    assert len(folders(cache)) == 1

    def again(*_: object) -> None:
        raise AssertionError("unpacked again")

    monkeypatch.setattr("lmhead.models.gguf._convert", again)
    assert torch.equal(logits_of(open_model(path)), first)


@pytest.mark.skipif(kernels.core is None, reason="only the compiled core reads blocks")
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("damage", [None, "a byte", "cut", "gone"])
def test_generation_reads_blocks(
    tmp_path: Path, cache: Path, kind: str, damage: str | None
) -> None:
    path = tmp_path / "small.gguf"
    gguf_files.write(path, quantization=kind)
    open_model(path)
    (file,) = cache.rglob("blocks.safetensors")
    content = bytearray(file.read_bytes())
    if damage == "a byte":
        content[-50] ^= 255
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "gone":
        file.unlink()
    model = open_model(path)
    body: Any = model.body
    assert body.step.types == {kind}
    with torch.no_grad():
        _, before = model.hidden(IDS[:, :4])
        found, _ = model.hidden(IDS[:, 4:5], before)
        body.step = None
        expected, _ = model.hidden(IDS[:, 4:5], before)
    assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "cached.json"]
)
@pytest.mark.parametrize("damage", ["cut", "gone", "nonsense"])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, cache: Path, name: str, damage: str) -> None:
    path = tmp_path / "small.gguf"
    gguf_files.write(path)
    first = logits_of(open_model(path))
    (folder,) = folders(cache)
    file = folder / name
    data = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(data[:-20] if damage == "cut" else bytes(len(data)))
    assert torch.equal(logits_of(open_model(path)), first)
    assert file.read_bytes() == data
    assert [p.name for p in folders(cache)] == [folder.name]  # nothing half-made is left


def test_another_file_of_the_same_name_is_unpacked(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "small.gguf"
    gguf_files.write(path)
    first = logits_of(open_model(path))
    gguf_files.write(path, rms_norm_eps=0.5)
    assert not torch.allclose(logits_of(open_model(path)), first)
    assert len(folders(cache)) == 2


def test_the_same_file_elsewhere_is_not(tmp_path: Path, cache: Path) -> None:
    gguf_files.write(tmp_path / "small.gguf")
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "small.gguf", tmp_path / "other")
    os.utime(tmp_path / "other" / "small.gguf", ns=(0, 0))
    open_model(tmp_path / "small.gguf")
    open_model(tmp_path / "other" / "small.gguf")
    assert len(folders(cache)) == 1


def test_a_cache_without_room(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "small.gguf"
    gguf_files.write(path)
    cache.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match=r"cannot be converted into .*set LMHEAD_CACHE"):
        open_model(path)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMHEAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/lmhead")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "lmhead"


# --- damaged files --------------------------------------------------------------------------------


def test_cut_off_at_any_place(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "small.gguf"
    gguf_files.write(path)
    data = path.read_bytes()
    for part in (5, 20, 100, 2000, 9000, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:part])
        with pytest.raises(ModelError, match=r"small.gguf is truncated"):
            load_gguf(path)
    assert folders(cache) == []


def test_not_gguf_at_all(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    for data in (b"", b"GG", b"something else entirely"):
        path.write_bytes(data)
        with pytest.raises(ModelError, match="no GGUF file"):
            load_gguf(path)
    path.write_bytes(b"GGUF\x01\0\0\0" + bytes(50))
    with pytest.raises(ModelError, match="version must be 2 or 3; got 1"):
        load_gguf(path)
    path.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 50)
    with pytest.raises(ModelError, match="it claims 18,446,"):
        load_gguf(path)
    with pytest.raises(ModelError, match=r"nothing.gguf is missing"):
        load_gguf(tmp_path / "nothing.gguf")


# --- tokenizers -----------------------------------------------------------------------------------


def sentencepiece() -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "▁hel", "hello"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(-n) for n in range(len(pieces) - 259)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_pieces_with_scores() -> None:
    tokenizer: Any = make_tokenizer(Fields(Path("x.gguf"), sentencepiece()))
    assert tokenizer.encode("hello").tokens == ["<s>", "▁hel", "lo"]  # "▁h" and "el" join first
    assert tokenizer.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode(" hello é").ids) == " hello é"


@pytest.mark.parametrize("rule", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_rules_for_cutting(rule: str) -> None:
    digits = ["1", "2", "12", "123", "3"]
    entries = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": [*digits, "4", "1234"],
        "tokenizer.ggml.merges": ["1 2", "12 3", "123 4"],
    }
    tokenizer: Any = make_tokenizer(Fields(Path("x.gguf"), entries))
    expected = {"gpt-2": ["1234"], "llama-bpe": ["123", "4"]}
    assert tokenizer.encode("1234").tokens == expected.get(rule, ["1", "2", "3", "4"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.tokens": None}, "x.gguf holds no tokenizer"),
        ({"tokenizer.ggml.model": "rwkv"}, "model must be gpt2 or llama; got 'rwkv'"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "odd"},
            "pre must be one of .*; got 'odd'",
        ),
    ],
)
def test_tokenizers_that_are_not_known(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make_tokenizer(Fields(Path("x.gguf"), sentencepiece() | changes))


# --- the real one ---------------------------------------------------------------------------------


needs_smollm2 = pytest.mark.skipif(
    bundled.find("smollm2") is None, reason="smollm2: lmhead models add smollm2"
)


@needs_smollm2
@needs(SMOLLM2_TOKENIZER)
def test_smollm2_has_the_tokens_of_its_own_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMHEAD_CACHE")
    tokenizer = open_model("smollm2").tokenizer
    assert tokenizer is not None
    text = "In 1984, I'd 12345 words:\n\n\tnaïve 你好 🙂  end"
    assert tokenizer.encode(text) == Tokenizer.from_file(str(SMOLLM2_TOKENIZER)).encode(text).ids


@needs_smollm2
def test_smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMHEAD_CACHE")  # unpacked once for all runs
    model = open_model("smollm2")
    tokenizer = model.tokenizer
    assert tokenizer is not None
    ids = torch.tensor([tokenizer.encode("The capital of France is")])
    best = model.head(model.hidden(ids)[0][0, -1]).softmax(-1).topk(2)
    assert [tokenizer.token_bytes(id) for id in best.indices.tolist()] == [b" Paris", b" the"]
    assert abs(float(best.values[0]) - 0.773) < 0.005
    file = GgufFile(bundled.find("smollm2") or tmp_path)
    assert file.metadata.text("general.architecture") == "llama"
    assert shutil.disk_usage(cache_folder()).total > 0
