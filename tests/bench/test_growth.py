"""`bench memory` and `bench scaling`, small."""

import json
from pathlib import Path
from typing import Any

import pytest

from lmhead.bench import footprint, scaling
from lmhead.bench.plots import write_plot
from lmhead.bench.report import to_json
from lmhead.bench.scaling import Axis
from lmhead.bench.shapes import Shape, parse_shape

OURS = {"loss/lmhead", "loss/lmhead-filter", "query/lmhead"}


def quiet(text: str) -> None:
    assert text


@pytest.fixture(scope="module")
def memory() -> dict[str, Any]:
    shape = parse_shape("4096x16", tokens=512)
    return footprint.footprint([shape], quiet, max_bytes=2 * 2**20, threads=1)


def test_temporary_memory_is_held_against_the_bound(memory: dict[str, Any]) -> None:
    rows = memory["results"]
    assert {r["name"] for r in rows} == OURS
    if any("skipped" in r for r in rows):
        pytest.skip(rows[0]["skipped"])
    for r in rows:
        assert r["logits"] == 8 * 2**20
        assert r["within"] == (r["temporary"] <= memory["max_bytes"] + footprint.SLACK)
        assert r["later"] >= r["temporary"]
    gradients = 4 * (4096 * 16 + 512 * 16) + 4
    assert {r["results"] for r in rows if r["name"].startswith("loss")} == {gradients}


def test_the_memory_table(memory: dict[str, Any], tmp_path: Path) -> None:
    text = "\n".join(footprint.lines(memory, 1000))
    assert "max_bytes = 2 MiB" in text
    assert "4096x16, N 512: lmhead, exact" in text
    assert json.loads(to_json(memory))["benchmark"] == "memory"
    assert all(path.stat().st_size > 1000 for path in write_plot(memory, tmp_path / "m"))


def test_time_against_size(tmp_path: Path) -> None:
    axes = (
        Axis("vocab", tuple(Shape("", v, 8, 32) for v in (64, 128))),
        Axis("tokens", tuple(Shape("", 64, 8, n) for n in (32, 64))),
    )
    document = scaling.scaling(axes, quiet, rounds=2, threads=1)
    assert len(document["points"]) == 3 * 4
    assert {(s["axis"], s["name"]) for s in document["series"]} == {
        (axis, name) for axis in ("vocab", "tokens") for name in OURS
    }
    for s in document["series"]:
        assert s["sizes"] == ([64, 128] if s["axis"] == "vocab" else [32, 64])
        assert s["exponent"] is not None
    for point in document["points"]:
        assert point["wrong"] == []
        assert point["failed"] is None
    text = "\n".join(scaling.lines(document, 1000))
    assert text.count("time grows with the power") == 2
    assert all(path.stat().st_size > 1000 for path in write_plot(document, tmp_path / "s"))


def test_the_axes_go_up_to_a_million_words() -> None:
    vocab, tokens = scaling.axes()
    assert max(shape.vocab for shape in vocab.shapes) == 1_048_576
    assert len({shape.tokens for shape in vocab.shapes}) == 1
    assert len({shape.vocab for shape in tokens.shapes}) == 1
