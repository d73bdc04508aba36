"""A model to give away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lmhead.errors import ModelError
from lmhead.models import open_model
from lmhead.train import TrainError, export, train
from train.runs import quiet, small


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(small(folder), folder / "run", progress=quiet())
    return folder / "run"


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 24), ("float16", 11), ("bfloat16", 8)])
def test_the_same_model_in_fewer_bytes(run: Path, tmp_path: Path, dtype: str, bits: int) -> None:
    out = export(run, tmp_path / "model", dtype=dtype)
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    ours, theirs = open_model(run), open_model(out)
    assert theirs.head.weight.dtype == torch.float32
    torch.testing.assert_close(theirs.head.weight, ours.head.weight, rtol=2.0**-bits, atol=1e-7)
    assert theirs.tokenizer is not None
    assert theirs.tokenizer.decode(theirs.tokenizer.encode("The old")) == "The old"


def test_export_omits_local_paths(run: Path, tmp_path: Path) -> None:
    out = export(run, tmp_path / "model")
    about = json.loads((out / "config.json").read_text())
    assert about["training"]["corpus"] == ["corpus.txt"]
    assert str(run.parent) not in (out / "config.json").read_text()


def test_mistakes(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16"):
        export(run, tmp_path / "model", dtype="int8")
    with pytest.raises(TrainError, match=r"exists already: choose another folder"):
        export(run, tmp_path)
    with pytest.raises(ModelError, match=r"there is no config.json"):
        export(tmp_path, tmp_path / "model")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TrainError, match="cannot write the model to"):
        export(run, tmp_path / "file" / "model")
