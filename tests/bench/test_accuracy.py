"""The benchmark of errors and counts, on a small generated head."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.running import run
from benchmarks import accuracy
from benchmarks.inputs import generate


def test_errors_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "make_inputs", lambda shape, _: generate(600, 16, shape.tokens))
    done = run("accuracy", "--rows", "80", "--json", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads((tmp_path / "accuracy.json").read_text())
    assert [f["tail_mass"] for f in document["filter"]] == [0.01, 0.02, 0.04]
    kept = [f["kept"] for f in document["filter"]]
    assert kept == sorted(kept, reverse=True)
    for screen in document["screen"]:
        assert (screen["wrong"], screen["argmax"]["mean"] >= 1) == (0, True)
        assert 50 <= screen["top_k"]["mean"] <= screen["top_k"]["max"] <= 600
    sixteen, eight = document["stored"]
    assert 0 < sixteen["kl_bound"] < eight["kl_bound"]
    assert sixteen["ratio"] < eight["ratio"]


def test_a_wrong_answer_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "make_inputs", lambda shape, _: generate(600, 16, shape.tokens))
    best = accuracy._best
    monkeypatch.setattr(accuracy, "_best", lambda hidden, weight: best(hidden, weight).flip(-1))
    assert run("accuracy", "--rows", "8", "--out", str(tmp_path)).exit_code == 1
