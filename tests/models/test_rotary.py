"""Rotary positions stretched to longer texts: in folders and GGUF files, against transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_close

from lmhead.errors import ModelError
from lmhead.models import load_huggingface, open_model
from lmhead.models.model_files import Fields
from lmhead.models.rotary import divisors, is_known, read_rotary
from lmhead.nn import DecoderConfig, LlamaBody
from models import gguf_files, hf_folders

IDS = torch.randint(4, 250, (1, 60), generator=torch.Generator().manual_seed(0))
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fields(values: dict[str, Any]) -> Fields:
    return Fields(Path("config.json"), values)


def theirs(model: Any) -> torch.Tensor:
    """The hidden states of transformers."""
    with torch.no_grad():
        found: torch.Tensor = model.model(IDS).last_hidden_state
    return found


def stretched(model: Any, theta: float = 500.0) -> Any:
    """How much slower each pair turns in a model of transformers than without scaling."""
    speeds = theta ** (-np.arange(0, 32, 2) / 32)
    return speeds / model.model.rotary_emb.inv_freq.double().numpy()


@pytest.mark.parametrize("rotary", [LLAMA3, LINEAR], ids=["llama3", "linear"])
def test_a_folder_is_read_as_transformers_reads_it(tmp_path: Path, rotary: dict[str, Any]) -> None:
    model = hf_folders.write(tmp_path, rope_parameters=rotary, **SIZES)
    ours = load_huggingface(tmp_path)
    assert isinstance(ours.body, LlamaBody)
    assert_close(ours.hidden(IDS)[0], theirs(model), atol=2e-5, rtol=1e-5)
    assert_close(np.array(divisors(fields(rotary), 32)), stretched(model), rtol=1e-6)


def test_the_older_spelling(tmp_path: Path) -> None:
    model = hf_folders.write(tmp_path, rope_parameters=LLAMA3, **SIZES)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    config["rope_theta"] = 500.0
    config["rope_scaling"] = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    path.write_text(json.dumps(config))
    ours = load_huggingface(tmp_path)
    assert isinstance(ours.body, LlamaBody)
    assert_close(ours.hidden(IDS)[0], theirs(model), atol=2e-5, rtol=1e-5)


def test_other_kinds_are_left_to_transformers() -> None:
    long = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    for rotary in (YARN, {"rope_type": "dynamic", "factor": 2.0}, long, LLAMA3 | {"more": 1}):
        assert not is_known(read_rotary(fields({"rope_parameters": rotary})))
    assert is_known(read_rotary(fields({})))
    assert read_rotary(fields({"rope_theta": 7.0, "rope_scaling": None})).number("rope_theta") == 7


def test_a_folder_with_numbers_that_make_no_sense(tmp_path: Path) -> None:
    hf_folders.write(tmp_path, **SIZES)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for wrong, message in (
        ({"factor": "much"}, "rope_parameters.factor must be a finite number above 0; got 'much'"),
        ({"low_freq_factor": 9.0}, "low_freq_factor must be below"),
    ):
        path.write_text(json.dumps(config | {"rope_parameters": LLAMA3 | wrong}))
        with pytest.raises(ModelError, match=message):
            load_huggingface(tmp_path)


# --- GGUF -----------------------------------------------------------------------------------------


def test_a_llama_3_in_gguf(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "small.gguf"
    factors = divisors(fields(LLAMA3), 32)
    model = gguf_files.write(
        path,
        rope_parameters=LLAMA3,
        divisors=factors,
        entries={"llama.rope.freq_base": 500.0},
    )
    ours = open_model(path)
    assert_close(ours.hidden(IDS)[0], theirs(model), atol=2e-5, rtol=1e-5)
    # What is unpacked means the same to transformers.
    (folder,) = cache.glob("gguf/*")
    again = load_huggingface(folder, direct=False)
    assert not isinstance(again.body, LlamaBody)
    assert_close(again.hidden(IDS)[0], theirs(model), atol=2e-5, rtol=1e-5)


def test_linear_scaling_in_gguf(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    entries = {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 3.0,
        "llama.rope.freq_base": 500.0,
    }
    model = gguf_files.write(path, rope_parameters=LINEAR, entries=entries)
    assert_close(open_model(path).hidden(IDS)[0], theirs(model), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_other_kinds_in_gguf_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "small.gguf"
    gguf_files.write(path, entries={"llama.rope.scaling.type": kind})
    with pytest.raises(ModelError, match=f"scaling.type must be none or linear .*; got '{kind}'"):
        open_model(path)


@pytest.mark.parametrize("wrong", [[1.0] * 15, [1.0] * 15 + [0.0], [1.0] * 15 + [np.inf]])
def test_divisors_that_make_no_sense(tmp_path: Path, wrong: list[float]) -> None:
    path = tmp_path / "small.gguf"
    gguf_files.write(path, divisors=wrong)
    with pytest.raises(
        ModelError, match=r"rope_freqs.weight must (have shape \(16,\)|hold finite numbers above 0)"
    ):
        open_model(path)


def test_heads_that_are_rotated_in_part(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    gguf_files.write(path, entries={"llama.rope.dimension_count": 16.0})
    with pytest.raises(ModelError, match=r"llama.rope.dimension_count must be"):
        open_model(path)


# --- our own Transformer --------------------------------------------------------------------------


def test_factors_are_checked_and_kept() -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 9,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "position": "rotary",
    }
    config = DecoderConfig(**sizes, rope_factors=(1.0, 4.0))
    assert DecoderConfig(**json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match="rope_factors must be 2 numbers"):
        DecoderConfig(**sizes, rope_factors=(1.0,))
    with pytest.raises(ValueError, match="rope_factors must be above 0; got -1"):
        DecoderConfig(**sizes, rope_factors=(1.0, -1.0))
