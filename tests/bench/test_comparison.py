"""A comparison from the inputs to the document: faults are found, missing libraries skipped."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import faulty_implementations as faulty
from bench.running import TINY, run
from benchmarks import comparison, loss
from benchmarks.fresh_process import growth_of
from benchmarks.inputs import generate
from benchmarks.report import full_text
from benchmarks.task import UnavailableError

CHOSEN = ("eager", "wrong", "once", "missing", "failing", "product")


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    only = [word for name in CHOSEN for word in ("--only", name)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "TASK", faulty.TASK)
        done = run(
            "loss", *TINY, *only, "--json", "--no-plot", "--out", tmp_path_factory.mktemp("loss")
        )
    assert done.exit_code == 1, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def result(document: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [r for r in document["results"] if r["name"] == name]
    return dict(found)


def test_every_round_times_all_that_can_run(document: dict[str, Any]) -> None:
    names = [r["name"] for r in document["results"]]
    assert names == ["eager", "wrong", "once", "product"]
    for r in document["results"]:
        assert len(r["seconds"]) == 2
        assert 0 < r["best"] <= r["median"]


def test_a_right_result_is_not_flagged(document: dict[str, Any]) -> None:
    r = result(document, "eager")
    assert r["wrong"] == []
    assert set(r["errors"]) == {"loss", "hidden_grad", "weight_grad"}
    assert max(r["errors"].values()) < 1e-5


def test_a_wrong_gradient_is_flagged(document: dict[str, Any]) -> None:
    r = result(document, "wrong")
    assert r["wrong"] == ["weight_grad"]
    assert r["errors"]["weight_grad"] == pytest.approx(0.01, rel=0.01)


def test_a_result_that_changes_after_the_check_is_flagged(document: dict[str, Any]) -> None:
    r = result(document, "once")
    assert max(r["errors"].values()) < 1e-5
    assert r["wrong"] == ["hidden_grad"]


def test_a_skipped_implementation_says_why(document: dict[str, Any]) -> None:
    skipped = {s["name"]: (s["reason"], s["failed"]) for s in document["skipped"]}
    assert skipped["missing"] == ("not installed", False)
    assert skipped["failing"][0].startswith("RuntimeError: inconsistent tensor size")


def test_ratios_are_taken_within_rounds(document: dict[str, Any]) -> None:
    eager, wrong = result(document, "eager"), result(document, "wrong")
    ratios = [a / b for a, b in zip(wrong["seconds"], eager["seconds"], strict=True)]
    assert wrong["ratios"]["eager"]["best"] == pytest.approx(min(ratios), rel=1e-4)
    assert eager["ratios"] == {}


def test_the_rate_is_relative_to_the_product(document: dict[str, Any]) -> None:
    product = result(document, "product")
    flops = 2 * 24 * 200 * 16
    assert document["product_gflops"] == pytest.approx(flops / product["best"] / 1e9, rel=1e-4)
    eager = result(document, "eager")
    assert eager["gflops"] == pytest.approx(3 * flops / eager["median"] / 1e9, rel=1e-4)


def test_the_document_has_the_conditions(document: dict[str, Any]) -> None:
    read = document
    assert read["threads"] == 1
    assert read["machine"]["processor"]
    assert {"torch", "lmhead", "numpy"} <= set(read["versions"])
    assert read["shape"] == {"name": "200x16", "vocab": 200, "hidden_size": 16, "tokens": 24}
    assert read["data"]["origin"] == "generated, seed 0"


def test_the_table_names_faults_and_skipped_ones(document: dict[str, Any]) -> None:
    text = "\n".join(full_text(document, comparison.lines, 1000))
    assert "WRONG: a wrong gradient: weight_grad" in text
    assert "Skipped: missing: not installed" in text
    assert "1.0e-02!" in text


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "inputs.pt"
    generate(200, 16, 24).save(path)
    return path


def test_memory_of_a_fresh_process(inputs: Path) -> None:
    growth = growth_of(faulty.TASK.module, "allocating", inputs, threads=1)
    if growth is None or growth.later is None:
        pytest.skip("this system does not report the peak memory of a call")
    assert growth.results == 32 * faulty.MIB
    assert growth.later == pytest.approx(128 * faulty.MIB, abs=2 * faulty.MIB)
    assert growth.temporary == pytest.approx(96 * faulty.MIB, abs=2 * faulty.MIB)
    assert growth.first >= growth.later - faulty.MIB


def test_a_fresh_process_that_crashes(inputs: Path) -> None:
    with pytest.raises(UnavailableError, match="its process ended with code 7"):
        growth_of(faulty.TASK.module, "crashing", inputs, threads=1)
    with pytest.raises(UnavailableError, match=r"code 1: .*UnavailableError: not installed"):
        growth_of(faulty.TASK.module, "missing", inputs, threads=1)
