"""A run from the inputs to the document: who is believed, who is not, who is skipped."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import liars
from lmhead.bench.compare import Settings, compare
from lmhead.bench.generator import generate
from lmhead.bench.report import comparison, to_json
from lmhead.bench.runner import WorkerProcess, growth_of
from lmhead.bench.shapes import parse_shape

SHAPE = parse_shape("200x16", tokens=24)
EVERYBODY = ("eager", "wrong", "once", "missing", "crashing", "talking", "product")


def quiet(text: str) -> None:
    assert text


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    settings = Settings(SHAPE, rounds=2, threads=1, only=EVERYBODY, memory=False)
    return compare(liars.TASK, settings, quiet)


def result(document: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [r for r in document["results"] if r["name"] == name]
    return dict(found)


def test_every_round_times_everybody_who_can_run(document: dict[str, Any]) -> None:
    names = [r["name"] for r in document["results"]]
    assert names == ["eager", "wrong", "once", "talking", "product"]
    for r in document["results"]:
        assert len(r["seconds"]) == 2
        assert 0 < r["best"] <= r["median"]


def test_a_right_result_is_believed(document: dict[str, Any]) -> None:
    for name in ("eager", "talking"):
        r = result(document, name)
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


def test_who_cannot_run_is_skipped_saying_why(document: dict[str, Any]) -> None:
    skipped = {s["name"]: (s["reason"], s["failed"]) for s in document["skipped"]}
    assert skipped["missing"] == ("nobody has it", False)
    assert skipped["crashing"][0].startswith("its process ended with code 7")


def test_ratios_are_taken_within_rounds(document: dict[str, Any]) -> None:
    eager, wrong = result(document, "eager"), result(document, "wrong")
    ratios = [a / b for a, b in zip(wrong["seconds"], eager["seconds"], strict=True)]
    assert wrong["ratios"]["eager"]["best"] == pytest.approx(min(ratios))
    assert eager["ratios"] == {}


def test_the_rate_is_that_of_the_product(document: dict[str, Any]) -> None:
    product = result(document, "product")
    flops = 2 * 24 * 200 * 16
    assert document["product_gflops"] == pytest.approx(flops / product["best"] / 1e9)
    eager = result(document, "eager")
    assert eager["gflops"] == pytest.approx(3 * flops / eager["median"] / 1e9)


def test_the_document_says_where_and_with_what(document: dict[str, Any]) -> None:
    read = json.loads(to_json(document))
    assert read["threads"] == 1
    assert read["machine"]["processor"]
    assert {"torch", "lmhead", "numpy"} <= set(read["versions"])
    assert read["shape"] == {"name": "200x16", "vocab": 200, "hidden_size": 16, "tokens": 24}
    assert read["data"]["origin"] == "generated, seed 0"


def test_the_table_names_liars_and_absentees(document: dict[str, Any]) -> None:
    text = "\n".join(comparison(document, 1000))
    assert "WRONG: a wrong gradient: weight_grad" in text
    assert "Skipped: missing: nobody has it" in text
    assert "1.0e-02!" in text


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "inputs.pt"
    generate(200, 16, 24).save(path)
    return path


def test_memory_of_a_fresh_process(inputs: Path) -> None:
    growth = growth_of(liars.TASK, "hungry", inputs, threads=1)
    if growth is None or growth.later is None:
        pytest.skip("this system does not tell the peak memory of a call")
    assert growth.results == 32 * liars.MIB
    assert growth.later == pytest.approx(128 * liars.MIB, abs=2 * liars.MIB)
    assert growth.temporary == pytest.approx(96 * liars.MIB, abs=2 * liars.MIB)
    assert growth.first >= growth.later - liars.MIB


def test_a_worker_ends_when_it_is_closed(inputs: Path) -> None:
    process = WorkerProcess(threads=1)
    process.load(liars.TASK, "eager", inputs)
    assert process.ask("time")["seconds"] > 0
    process.close()
    process.close()
    assert process._process.returncode is not None
