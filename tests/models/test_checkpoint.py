"""What `lmhead train` has made, opened again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from train.runs import TEXT, quiet, small

import lmhead
from lmhead.errors import ModelError
from lmhead.models.checkpoint import checkpoint_of, is_checkpoint, load_checkpoint, steps_of
from lmhead.train import train
from lmhead.train.text_task import TextTask


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(small(folder), folder / "run", progress=quiet())
    return folder / "run"


@pytest.fixture
def checkpoint(run: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    last = checkpoint_of(run, steps_of(run)[-1])
    return Path(shutil.copytree(last, tmp_path / "model"))


@pytest.mark.parametrize("tokenizer", ["bpe", "characters", "words"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_same_hidden_states_logits_and_tokens(
    tmp_path: Path, tokenizer: str, tied: bool
) -> None:
    config = small(tmp_path, tokenizer=tokenizer, vocab_size=300, tied=tied, steps=2, bias=True)
    result = train(config, tmp_path / "run", progress=quiet())
    task = TextTask(config, tmp_path / "run", lambda _: None)
    task.model.load_state_dict(_all_names(result.checkpoint, task))
    task.model.eval()
    model = load_checkpoint(result.checkpoint)
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("The old")
    assert ids == task.tokens.tokenizer.encode("The old").ids
    assert model.tokenizer.decode(ids) == "The old"
    assert b"".join(map(model.tokenizer.token_bytes, ids)) == b"The old"
    with torch.no_grad():
        expected = task.model.hidden(torch.tensor([ids]))
        hidden, _ = model.hidden(torch.tensor([ids]))
        torch.testing.assert_close(hidden, expected)
        assert torch.equal(model.head(hidden).argmax(-1), task.model.head(expected).argmax(-1))
        torch.testing.assert_close(model.layers(torch.tensor([ids]))[-1], hidden)
    assert (model.head.weight is model.body.embedding.weight) is tied  # type: ignore[attr-defined]
    made = lmhead.generate(model, "The ", max_new_tokens=3, eos_token_ids=())
    assert len(made.tokens) == 3
    assert not any(p.requires_grad for p in model.head.parameters())


def _all_names(checkpoint: Path, task: TextTask) -> dict[str, torch.Tensor]:
    tensors = load_file(checkpoint / "model.safetensors")
    if "head.weight" not in tensors:
        tensors["head.weight"] = tensors["body.embedding.weight"]
    assert tensors.keys() == task.model.state_dict().keys()
    return tensors


def test_a_run_is_its_best_checkpoint(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    steps = steps_of(copy)
    state = checkpoint_of(copy, steps[-1]) / "training.json"
    for best, expected in ((steps[0], steps[0]), (None, steps[-1]), (999, steps[-1])):
        state.write_text(json.dumps({"best_step": best}))
        weights = load_file(checkpoint_of(copy, expected) / "model.safetensors")
        model = load_checkpoint(copy)
        assert torch.equal(model.head.weight, weights["body.embedding.weight"])
    assert model.name == "run"


def test_which_folders_are_ours(run: Path, checkpoint: Path, tmp_path: Path) -> None:
    assert is_checkpoint(run)
    assert is_checkpoint(checkpoint)
    assert not is_checkpoint(tmp_path)
    assert not is_checkpoint(tmp_path / "missing")
    (checkpoint / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert not is_checkpoint(checkpoint)
    (checkpoint / "config.json").write_text("{")
    assert not is_checkpoint(checkpoint)


def test_a_text_longer_than_the_model_was_trained_on_is_refused(checkpoint: Path) -> None:
    model = load_checkpoint(checkpoint)
    assert model.max_length == 8
    with pytest.raises(ValueError, match=r"ids must be at most max_length, 8 tokens"):
        model.hidden(torch.zeros(1, 9, dtype=torch.int64))


def test_unknown_characters_are_named(checkpoint: Path) -> None:
    tokenizer = load_checkpoint(checkpoint).tokenizer
    assert tokenizer is not None
    assert set("猫") - set(TEXT)
    with pytest.raises(ValueError, match="猫"):
        tokenizer.encode("The 猫")


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        about = json.loads(path.read_text())
        for name, value in changes.items():
            target, _, key = name.rpartition("__")
            place = about[target] if target else about
            place[key] = value
        path.write_text(json.dumps(about))

    return change


def _cut(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-9])

    return damage


def _drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_config(format="other"), r"config.json: format must be 'lmhead'; got 'other'"),
        (_config(version=2), r"config.json: version must be 1; got 2. Upgrade lmhead"),
        (_config(kind="encoder-decoder"), "which `lmhead translate` opens"),
        (_config(kind="cat"), "kind must be 'decoder', a language model; got 'cat'"),
        (_config(model={}), r"config.json must describe a model of lmhead; .*missing"),
        (_config(model__hidden_size=-1), "hidden_size must be"),
        (_config(model__colour="red"), "colour"),
        (_config(head={"kind": "hydra"}), "head must be one of full, .*; got 'hydra'"),
        (_config(model__hidden_size=32), "must have shape"),
        (_config(model__num_hidden_layers=2), "the tensor body.blocks.1.* is missing"),
        (_config(model__tied=False), "the tensor head.weight is missing"),
        (_tensors(lambda t: t.update(extra=torch.zeros(1))), "extra is not part of the model"),
        (_cut("config.json"), "config.json is not valid JSON"),
        (_cut("model.safetensors"), "model.safetensors is not a complete"),
        (_cut("tokenizer.json"), "tokenizer.json must be a tokenizer"),
        (_drop("config.json"), "there is no config.json"),
        (_drop("model.safetensors"), "model.safetensors is missing"),
        (_drop("tokenizer.json"), "tokenizer.json is missing"),
    ],
)
def test_damage_is_named(checkpoint: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(checkpoint)
    with pytest.raises(ModelError, match=message):
        load_checkpoint(checkpoint)


def test_a_vocabulary_of_another_size(checkpoint: Path) -> None:
    path = checkpoint / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["猫"] = len(content["model"]["vocab"])
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"must have 25 tokens, as the model has; got 26"):
        load_checkpoint(checkpoint)
