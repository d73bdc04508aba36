"""`bench memory` and `bench scaling`, small."""

from pathlib import Path
from typing import Any

import pytest

from bench.running import document_of
from benchmarks import memory, scaling
from benchmarks.report import full_text
from benchmarks.scaling import Axis
from benchmarks.shapes import Shape

OURS = {"loss/lmhead", "loss/lmhead-filter", "query/lmhead"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("memory")
    given = ["--shape", "4096x16", "--tokens", "512", "--max-bytes", "2097152", "--threads", "1"]
    document = document_of("memory", *given, out=folder)
    assert {path.name for path in folder.iterdir()} == {
        f"memory-float32.{suffix}" for suffix in ("json", "png", "svg")
    }
    return document


def test_temporary_memory_is_compared_with_the_limit(measured: dict[str, Any]) -> None:
    rows = measured["results"]
    assert {r["name"] for r in rows} == OURS
    if any("skipped" in r for r in rows):
        pytest.skip(rows[0]["skipped"])
    for r in rows:
        assert r["logits"] == 8 * 2**20
        assert r["within"] == (r["temporary"] <= measured["max_bytes"] + memory.SLACK)
        assert r["later"] >= r["temporary"]
    gradients = 4 * (4096 * 16 + 512 * 16) + 4
    assert {r["results"] for r in rows if r["name"].startswith("loss")} == {gradients}


def test_the_memory_table(measured: dict[str, Any]) -> None:
    text = "\n".join(full_text(measured, memory.lines, 1000))
    assert "max_bytes = 2 MiB" in text
    assert "4096x16, N 512: lmhead, exact" in text


def test_time_against_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = (
        Axis("vocab", tuple(Shape("", v, 8, 32) for v in (64, 128))),
        Axis("tokens", tuple(Shape("", 64, 8, n) for n in (32, 64))),
    )
    monkeypatch.setattr(scaling, "make_axes", lambda **_: axes)
    document = document_of("scaling", "--rounds", 2, "--threads", 1, out=tmp_path)
    assert len(document["points"]) == 3 * 4
    assert {(s["axis"], s["name"]) for s in document["series"]} == {
        (axis, name) for axis in ("vocab", "tokens") for name in OURS
    }
    for s in document["series"]:
        assert s["sizes"] == ([64, 128] if s["axis"] == "vocab" else [32, 64])
        assert s["exponent"] is not None
    for point in document["points"]:
        assert point["wrong"] == []
        assert point["seconds"] > 0
    text = "\n".join(full_text(document, scaling.lines, 1000))
    assert text.count("time grows with the power") == 2
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".png", ".svg"}


def test_the_axes_go_up_to_a_million_tokens() -> None:
    vocab, tokens = scaling.make_axes()
    assert max(shape.vocab for shape in vocab.shapes) == 1_048_576
    assert len({shape.tokens for shape in vocab.shapes}) == 1
    assert len({shape.vocab for shape in tokens.shapes}) == 1
