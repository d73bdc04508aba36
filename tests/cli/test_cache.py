"""`lmhead cache`: list and remove what is in the cache folder."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lmhead.cli import main


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path))
    (tmp_path / "gguf/model-0123").mkdir(parents=True)
    (tmp_path / "gguf/model-0123/model.safetensors").write_bytes(b"x" * 2_000_000)
    (tmp_path / "screen").mkdir()
    (tmp_path / "screen/abc.safetensors").write_bytes(b"x" * 500_000)
    (tmp_path / "calibration.json").write_text("{}")
    (tmp_path / "other.txt").write_text("of another program")
    return tmp_path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["cache", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_list(folder: Path) -> None:
    shown = run("list")
    assert str(folder) in shown
    assert "2.0 MB      gguf/model-0123" in shown
    assert "0.5 MB      screen/abc.safetensors" in shown
    assert "2.5 MB in all" in shown
    assert "other.txt" not in shown
    entries = json.loads(run("list", "--json"))["entries"]
    assert [(e["kind"], e["bytes"]) for e in entries] == [
        ("gguf", 2_000_000),
        ("screen", 500_000),
        ("calibration.json", 2),
    ]


def test_clear_one_kind(folder: Path) -> None:
    assert run("clear", "screen") == "Removed 1 entry, 0.5 MB.\n"
    assert not (folder / "screen/abc.safetensors").exists()
    assert (folder / "gguf/model-0123/model.safetensors").exists()


def test_clear_all(folder: Path) -> None:
    assert "Removed 3 entries" in run("clear")
    assert (folder / "other.txt").exists()
    assert "0.0 MB in all" in run("list")


def test_an_empty_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMHEAD_CACHE", str(folder / "none"))
    assert "0.0 MB in all" in run("list")
    assert "Removed 0 entries" in run("clear")
