"""`open_model`: what a path is, and what is said where it is none."""

from pathlib import Path

import pytest
import torch
from llama2c_files import WORDS, random_weights, vocabulary, write_checkpoint, write_vocabulary

from lmhead.errors import ModelError
from lmhead.models import LanguageModel, open_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_vocabulary(tmp_path / "tokenizer.bin", vocabulary(WORDS))
    return write_checkpoint(tmp_path / "tiny.bin", random_weights())


def test_a_llama2c_checkpoint_by_path_or_text(checkpoint: Path) -> None:
    for where in (checkpoint, str(checkpoint)):
        model = open_model(where)
        assert isinstance(model, LanguageModel)
        assert model.name == "tiny"
        assert model.tokenizer is not None
        assert len(model.tokenizer) == 300


def test_hidden_states_in_one_go_and_in_two(checkpoint: Path) -> None:
    model = open_model(checkpoint)
    ids = torch.tensor([[1, 7, 260, 8], [1, 9, 261, 3]])
    whole, cache = model.hidden(ids)
    assert whole.shape == (2, 4, 16)
    assert cache.length == 4
    _, cache = model.hidden(ids[:, :3])
    last, cache = model.hidden(ids[:, 3:], cache)
    torch.testing.assert_close(last, whole[:, 3:])
    assert cache.length == 4


def test_layers_end_in_what_hidden_gives(checkpoint: Path) -> None:
    model = open_model(checkpoint)
    ids = torch.tensor([[1, 7, 260, 8]])
    layers = model.layers(ids)
    assert [layer.shape for layer in layers] == [(1, 4, 16)] * 3
    assert torch.equal(layers[-1], model.hidden(ids)[0])
    assert not torch.equal(layers[0], layers[1])


def test_a_body_without_layers_says_so(checkpoint: Path) -> None:
    opened = open_model(checkpoint)
    model = LanguageModel(opened.hidden, opened.head, name="closed")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"body of closed must have layers\(ids\)"):
        model.layers(torch.tensor([[1]]))


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model '.*nothing.bin': no such file"):
        open_model(tmp_path / "nothing.bin")


@pytest.mark.parametrize("begin", [b"PK\x03\x04", b"\x80\x02}q"])
def test_a_pickle_is_never_read(tmp_path: Path, begin: bytes) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(begin + bytes(100))
    with pytest.raises(ModelError, match=r"pytorch_model.bin holds pickled.*never reads"):
        open_model(path)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_text("this is not a model at all, it is a text of some length")
    with pytest.raises(ModelError, match=r"note.txt"):
        open_model(path)
