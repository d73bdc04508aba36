"""Engines: what computes the body of a model, and that it is reported."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tiny_models import write_model

from lmhead import Sampler, generate
from lmhead.cli import main
from lmhead.errors import ModelError
from lmhead.models import llama_cpp, open_model
from lmhead.sweep import kernels
from models import gguf_files

IDS = torch.tensor([[1, 70, 8, 260, 33, 9]])
with_llama_cpp = pytest.mark.skipif(
    not llama_cpp.is_available(), reason="the package xllamacpp is not installed"
)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "small.gguf"
    gguf_files.write(path, quantization="Q8_0")
    return path


@pytest.mark.skipif(kernels.core is None, reason="without the compiled core it is torch")
def test_the_core_is_the_default(file: Path) -> None:
    assert open_model(file).engine == "core"
    assert open_model(file, engine="core").engine == "core"
    assert open_model(file, engine="torch").engine == "torch"


def test_an_unknown_engine(file: Path) -> None:
    with pytest.raises(ValueError, match=r"engine must be one of core, torch, llama.cpp, or None"):
        open_model(file, engine="jax")  # type: ignore[arg-type]


@with_llama_cpp
def test_other_formats(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"opens GGUF files; .* is of another format"):
        open_model(write_model(tmp_path / "model"), engine="llama.cpp")


@with_llama_cpp
class TestLlamaCpp:
    def test_its_hidden_states_are_close_to_ours(self, file: Path) -> None:
        ours, model = open_model(file), open_model(file, engine="llama.cpp")
        assert model.engine == "llama.cpp"
        expected, found = ours.hidden(IDS)[0], model.hidden(IDS)[0]
        assert found.shape == expected.shape
        assert float((found - expected).norm() / expected.norm()) < 0.05

    @pytest.mark.parametrize("tied", [True, False])
    def test_a_llama_without_its_head_gives_the_same_bits(self, tied: bool, file: Path) -> None:
        gguf_files.write(file, quantization="Q8_0", tie_word_embeddings=tied)
        body = open_model(file, engine="llama.cpp").body
        whole = llama_cpp.LlamaCppBody(file, 10**5, plain_llama=False)
        assert isinstance(body, llama_cpp.LlamaCppBody)
        assert body._model.takes_embeddings
        assert not whole._model.takes_embeddings
        (found, cache), (expected, other) = body(IDS), whole(IDS)
        assert torch.equal(found, expected)
        assert torch.equal(body(IDS[:, :1], cache)[0], whole(IDS[:, :1], other)[0])

    def test_other_families_keep_their_head(self, file: Path) -> None:
        gguf_files.write(file, arch="qwen2", quantization="Q8_0")
        body = open_model(file, engine="llama.cpp").body
        assert isinstance(body, llama_cpp.LlamaCppBody)
        assert not body._model.takes_embeddings

    def test_a_cache_goes_on(self, file: Path) -> None:
        model = open_model(file, engine="llama.cpp")
        every, _ = model.hidden(IDS)
        _, cache = model.hidden(IDS[:, :4])
        rest, _ = model.hidden(IDS[:, 4:], cache)
        other, _ = model.hidden(torch.tensor([[5]]), cache)  # another end of the same beginning
        again, _ = model.hidden(IDS[:, 4:], cache)
        assert float((rest - every[:, 4:]).norm() / every[:, 4:].norm()) < 0.02
        assert torch.equal(rest, again)
        assert not torch.allclose(other[:, 0], rest[:, 0], rtol=0.1)

    def test_rows_of_a_batch(self, file: Path) -> None:
        model = open_model(file, engine="llama.cpp")
        prompts = [IDS[0].tolist(), [3, 4]]
        both = generate(model, prompts, max_new_tokens=4, eos_token_ids=())
        for prompt, made in zip(prompts, both, strict=True):
            alone = generate(model, prompt, max_new_tokens=4, eos_token_ids=())
            assert made.tokens == alone.tokens

    def test_our_samplers_and_seeds(self, file: Path) -> None:
        model = open_model(file, engine="llama.cpp")
        sampler = Sampler(temperature=0.8, top_p=0.9, seed=7)
        made = [generate(model, [3, 4], sampler, max_new_tokens=6).tokens for _ in range(2)]
        assert made[0] == made[1]
        model.head.screen()
        assert generate(model, [3, 4], sampler, max_new_tokens=6).tokens == made[0]

    def test_more_tokens_than_there_is_room(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = open_model(file, engine="llama.cpp").hidden(IDS.repeat(1, 4))[0]
        monkeypatch.setattr(llama_cpp, "_FIRST_CAPACITY", 8)
        monkeypatch.setattr(llama_cpp, "_MAX_BATCH", 5)
        model = open_model(file, engine="llama.cpp")
        found, cache = model.hidden(IDS.repeat(1, 3))
        rest, _ = model.hidden(IDS, cache)
        found = torch.cat((found, rest), 1)
        assert float((found - expected).norm() / expected.norm()) < 0.02

    def test_ids_are_checked(self, file: Path) -> None:
        model = open_model(file, engine="llama.cpp")
        with pytest.raises(ValueError, match=r"ids must be in \[0, "):
            model.hidden(torch.tensor([[10**6]]))

    def test_the_command_says_so(self, file: Path) -> None:
        line = ["generate", str(file), "a thing", "-n", "2", "--engine", "llama.cpp"]
        result = CliRunner().invoke(main, [*line, "--json"])
        assert json.loads(result.stdout)["model"]["engine"] == "llama.cpp"
        assert "Engine: llama.cpp" in CliRunner().invoke(main, line).stderr


def test_a_library_with_another_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    if not llama_cpp.is_available():
        pytest.skip("the package xllamacpp is not installed")
    monkeypatch.setattr(llama_cpp, "_KNOWN_DEFAULTS", [1, 2, 3, 4])
    llama_cpp._library.cache_clear()
    with pytest.raises(ModelError, match="has an unknown interface"):
        llama_cpp._library()
