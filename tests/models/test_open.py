"""`open_model`: the format of a path, and errors for paths that are no models."""

from pathlib import Path

import pytest
import torch
from fuzz import corpus
from llama2c_files import TOKENS, random_weights, vocabulary, write_checkpoint, write_vocabulary

from lmhead.errors import ModelError
from lmhead.models import LanguageModel, bundled, open_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_vocabulary(tmp_path / "tokenizer.bin", vocabulary(TOKENS))
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
    with pytest.raises(TypeError, match=r"body of closed must have a method layers\(ids\)"):
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"This is not a model, but it is long enough.", "note.bin is a text file, not a model"),
        ("这是一段文字，不是模型；它足够长。".encode(), "note.bin is a text file, not a model"),
        (b"a\n", "note.bin is a text file, not a model"),
        (b"", "note.bin is empty, not a model"),
        (b"\x89PNG\r\n\x1a\n" + bytes(99), "note.bin is not a model of a known format"),
        (b"\x7fELF\x02", "note.bin is not a model of a known format"),
    ],
)
def test_a_file_of_another_kind(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "note.bin"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        open_model(path)


# --- names, folders, the hub ----------------------------------------------------------------------


@pytest.fixture
def named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model called `tiny`, and none called `smollm2`."""
    entries = {
        "smollm2": bundled.Bundled("absent", lambda: None, (("some-package", "00"),)),
        "tiny": bundled.Bundled("here", lambda: checkpoint),
    }
    monkeypatch.setattr(bundled, "BUNDLED", entries)
    return checkpoint


@pytest.mark.usefixtures("named")
def test_a_name_and_the_default() -> None:
    assert open_model("tiny").head.vocab_size == 300
    assert open_model().head.vocab_size == 300
    assert bundled.default_model() == "tiny"
    with pytest.raises(ModelError, match="smollm2 is not installed: lmhead models add smollm2"):
        open_model("smollm2")


def test_a_folder_with_the_name_of_a_model_is_reached_by_its_path(
    named: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert open_model("tiny").name == named.stem
    with pytest.raises(ModelError, match=r"tiny holds no model"):
        open_model("./tiny")


def test_only_a_part_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(100))
    with pytest.raises(ModelError, match=r"only a part of a model: give its folder"):
        open_model(path)


def test_a_folder_of_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    monkeypatch.setattr("lmhead.models.open.load_gguf", lambda path, **_: opened.append(path))
    (tmp_path / "one.gguf").touch()
    open_model(tmp_path)
    assert opened == [tmp_path / "one.gguf"]
    (tmp_path / "two.gguf").touch()
    with pytest.raises(ModelError, match=r"2 GGUF files: give one"):
        open_model(tmp_path)


def test_nothing_is_downloaded_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    def fetch(name: str) -> Path:
        fetched.append(name)
        raise ModelError("no network")

    monkeypatch.setattr("lmhead.models.open._download", fetch)
    with pytest.raises(ModelError, match=r"no model 'some/model'.*--download"):
        open_model("some/model")
    assert fetched == []
    with pytest.raises(ModelError, match="no network"):
        open_model("some/model", download=True)
    assert fetched == ["some/model"]
    with pytest.raises(ModelError, match="no such file or folder"):
        open_model("/some/where/else", download=True)  # no name of the hub


def test_a_model_in_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    corpus.write_llama(snapshot)
    assert open_model("some/model").name == "some/model"
    for name in ("some/other", "some--/model", "some/.."):
        with pytest.raises(ModelError, match="no such file or folder"):
            open_model(name)


def test_a_download_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    for name in ("HF_HUB_OFFLINE", "LMHEAD_OFFLINE"):  # other tests of this process may set one
        monkeypatch.delenv(name, raising=False)

    def snapshot(name: str, **options: object) -> str:
        assert options["allow_patterns"] == ["*.json", "*.safetensors", "chat_template.jinja"]
        raise OSError(f"{name}: connection\nrefused")

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    with pytest.raises(ModelError, match=r"some/model cannot be downloaded: .*connection refused"):
        open_model("some/model", download=True)


def test_what_opens_a_checkpoint_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    monkeypatch.setattr(
        "lmhead.models.open.load_checkpoint", lambda folder, **_: opened.append(folder)
    )
    one, run = tmp_path / "one", tmp_path / "run"
    one.mkdir()
    (one / "config.json").write_text('{"format": "lmhead", "version": 1}')
    (run / "checkpoints" / "step-00000005").mkdir(parents=True)
    open_model(one)
    open_model(run)
    assert opened == [one, run]
