"""Folders that are not what they should be: which file, what is wrong, what to do."""

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmhead.errors import ModelError
from lmhead.models import open_model
from models import hf_folders


@pytest.fixture(params=["silu", "gelu"])  # ours to compute, and left to transformers
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    hf_folders.write(tmp_path, hidden_act=request.param)
    return tmp_path


@contextmanager
def refused(*words: str) -> Iterator[None]:
    with pytest.raises(ModelError) as caught:
        yield
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in {str(caught.value)!r}"


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9999])
def test_weights_cut_off(folder: Path, part: float) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    with refused("model.safetensors", "not a complete safetensors file", "Download it again"):
        open_model(folder)


def test_a_header_of_nonsense(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[:8] = b"\xff" * 8
    path.write_bytes(data)
    with refused("model.safetensors", "Download it again"):
        open_model(folder)


def test_wrong_shapes(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(15)
    save_file(tensors, path, metadata={"format": "pt"})
    with refused(str(folder), "other shapes than its conf", "norm.weight"):
        open_model(folder)


def test_a_missing_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with refused(str(folder), "not complete", "model.layers.1.mlp.up_proj.weight"):
        open_model(folder)


def test_a_missing_shard(tmp_path: Path) -> None:
    hf_folders.make("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    hf_folders.write_tokenizer(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    kept = shard.read_bytes()
    shard.unlink()
    with refused(shard.name, "download what is missing"):
        open_model(tmp_path)
    shard.write_bytes(kept[:-10])
    with refused(shard.name, "not a complete safetensors file"):
        open_model(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    shard.write_bytes(kept)
    found = json.loads(index.read_text())
    found["weight_map"]["something.else"] = shard.name
    index.write_text(json.dumps(found))
    with refused(shard.name, "lacks the tensor something.else"):
        open_model(tmp_path)
    index.write_text("{}")
    with refused(index.name, "weight_map"):
        open_model(tmp_path)


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with refused("tokenizer.json is missing", "save_pretrained"):
        open_model(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    with refused("tokenizer.json", "cannot be read"):
        open_model(folder)


def test_the_tokenizer_of_another_model(tmp_path: Path) -> None:
    hf_folders.write(tmp_path, vocab_size=200)
    with refused("tokenizer.json must have token ids below 200", "got 262"):
        open_model(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "3", "\x00"])
def test_a_broken_configuration(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with refused("config.json"):
        open_model(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "unknown_type"}, ("'unknown_type'", "newer transformers")),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}},
            ("'own'", "never runs that"),
        ),
        ({"model_type": None}, ("config.json: model_type must be", "got ''")),
        ({"model_type": "t5"}, ("'t5'", "must be a causal language model")),
        ({"model_type": "clip"}, ("'clip'", "must be a causal language model")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantized weights (gptq)", "GGUF")),
        ({"eos_token_id": "</s>"}, ("config.json", "eos_token_id must be a token id")),
        ({"hidden_size": 24}, ("other shapes than its conf",)),
        ({"num_attention_heads": 3}, ("config",)),
    ],
    ids=str,
)
def test_another_kind_of_model(
    folder: Path, changes: dict[str, object], words: tuple[str, ...]
) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    hf_folders.edit(folder / "config.json", **changes)
    with refused(*words):
        open_model(folder)


def test_no_configuration(folder: Path) -> None:
    (folder / "config.json").unlink()
    with refused("holds no model: there is no config.json", "lmhead models list"):
        open_model(folder)
    (folder / "adapter_config.json").write_text("{}")
    with refused("holds an adapter", "merge_and_unload"):
        open_model(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with refused("no model.safetensors"):
        open_model(folder)


def test_weights_as_pickles_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (folder / "sprung",))

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with refused("pytorch_model.bin", "never reads them", "save_pretrained"):
        open_model(folder)
    assert not (folder / "sprung").exists()


def test_a_head_that_does_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that does what the configuration does not say is refused, not answered for."""
    model = hf_folders.transformers.LlamaForCausalLM
    plain = model.forward

    def forward(self: object, *args: object, **options: object) -> object:
        out = plain(self, *args, **options)
        out.logits = out.logits * 1.5
        return out

    monkeypatch.setattr(model, "forward", forward)
    hf_folders.edit(folder / "config.json", hidden_act="gelu")
    with refused("the head of LlamaForCausalLM", "it does more"):
        open_model(folder)
