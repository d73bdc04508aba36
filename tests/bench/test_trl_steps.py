"""`trl-steps`: fresh processes, the same loss and gradient, less memory."""

import json
from pathlib import Path

import pytest

from bench.running import run

pytest.importorskip("trl", reason="trl is not installed (extra: clients)")


def test_a_quick_run(tmp_path: Path) -> None:
    done = run("trl-steps", "--quick", "--trainer", "sft", "--threads", "1", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "trl-steps-quick.json").read_text(encoding="utf-8"))
    stock, ours = document["results"]
    assert (stock["way"], ours["way"]) == ("stock", "lmhead")
    assert stock["time_ratio"] == stock["memory_ratio"] == 1
    assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-5)
    assert ours["memory_ratio"] < 0.5
