"""The commands: help, usage errors without tracebacks, results with exit codes."""

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import lmhead
from bench import faulty_implementations as faulty
from bench.running import TINY, run
from benchmarks import decode, loss, query, sample, sample_batch
from benchmarks.commands import COMMANDS
from benchmarks.comparison import Measured


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str) -> None:
    done = run(name, "--help")
    assert done.exit_code == 0
    assert f"bench {name} [OPTIONS]" in done.output
    assert "\\b" not in done.output


@pytest.mark.parametrize("task", [loss.TASK, query.TASK], ids=["loss", "query"])
def test_help_names_all_implementations(task: Any) -> None:
    text = " ".join(run(task.name, "--help").output.split())
    for name in task.implementations:
        assert f" {name}" in text
    assert "Examples:" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["loss", "--shape", "gpt5"], "shape must be smollm2"),
        (["loss", "--shape", "200x16", "--only", "liger"], "only must name some of lmhead"),
        (["query", "--shape", "200x16", "--baseline", "cce"], "baseline must name some of lmhead"),
        (["loss", "--dtype", "int8"], "'int8' is not one of"),
        (["loss", "--rounds", "0"], "0 is not in the range"),
        (["query", "--tokens", "-3"], "-3 is not in the range"),
        (["loss", "--tokens", "2000000000"], "GiB of memory"),
        (["query", "--shape", "200x16", "--only", "hf"], "only must name"),
        (["loss", "--shape", "200x16", "--data", "/nowhere"], "data must go with smollm2"),
        (["loss", "--data", "/nowhere"], "data must be a folder with"),
        (["nothing"], "No such command"),
    ],
)
def test_a_usage_error_has_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run(*arguments, "--out", tmp_path)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("loss", *TINY, "--only", "product", "--out", str(tmp_path / "file" / "deep"))
    assert done.exit_code == 2
    assert "cannot write to" in done.output


def test_a_run_writes_json_and_plots(tmp_path: Path) -> None:
    done = run("loss", *TINY, "--only", "lmhead", "--only", "eager", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "lmhead, exact" in done.stdout
    assert "round 2 of 2: eager torch" in done.stderr
    names = {path.name for path in tmp_path.iterdir()}
    stem = "loss-200x16-24-float32"
    assert names == {f"{stem}.json", f"{stem}.png", f"{stem}.svg"}
    document = json.loads((tmp_path / f"{stem}.json").read_text(encoding="utf-8"))
    assert [r["name"] for r in document["results"]] == ["lmhead", "eager"]
    assert list(document["results"][0]["ratios"]) == ["eager"]


def test_json_alone_on_standard_output(tmp_path: Path) -> None:
    only = ["--only", "lmhead", "--only", "product", "--baseline", "product"]
    done = run("query", *TINY, *only, "--json", "--quick", "--no-plot", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["benchmark"] == "query"
    assert list(document["results"][0]["ratios"]) == ["product"]
    assert [path.name for path in tmp_path.iterdir()] == ["query-200x16-24-float32-quick.json"]


@pytest.mark.parametrize("name", ["wrong", "ours"])
def test_a_wrong_result_has_exit_code_1(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "TASK", faulty.TASK)
    done = run("loss", *TINY, "--only", name, "--no-plot", "--out", str(tmp_path))
    assert done.exit_code == 1
    assert ("WRONG: a wrong gradient" if name == "wrong" else "Skipped: ours") in done.stdout


def test_ctrl_c_prints_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, calls = Measured.measure, count(1)

    def interrupted(self: Measured) -> None:
        if next(calls) == 4:
            raise KeyboardInterrupt
        measure(self)

    monkeypatch.setattr(Measured, "measure", interrupted)
    only = ["--only", "eager", "--only", "product"]
    done = run("loss", *TINY, "--rounds", "9", *only, "--out", str(tmp_path))
    assert done.exit_code == 130
    assert "Rounds done: 2 of 9." in done.stdout
    assert "eager torch" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_sample_compares_and_writes(tmp_path: Path) -> None:
    done = run("sample", "--vocab", "500", "--rounds", "2", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "sample-500.json").read_text())
    assert {(r["name"], r["batch"]) for r in document["results"]} >= {("top_p", 1), ("typical", 8)}
    assert all(r["wrong"] is None and r["ratio"]["median"] > 0 for r in document["results"])
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".png", ".svg"}


def test_sample_finds_a_wrong_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "CASES", faulty.CASES)
    done = run("sample", "--vocab", "500", "--rounds", "1", "--out", str(tmp_path), "--no-plot")
    assert done.exit_code == 1
    assert "not the same tokens are kept" in done.output


def test_sample_batch_compares_and_writes(tmp_path: Path) -> None:
    done = run("sample-batch", "--vocab", "500", "--rounds", "1", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "sample-batch-500.json").read_text())
    assert [r["label"] for r in document["results"]] == list(sample_batch.CASES)
    assert all(r["wrong"] is None and r["batch_ratio"]["median"] > 0 for r in document["results"])


def test_sample_batch_finds_other_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample_one = lmhead.Sampler.__call__

    def by_batch_size(sampler: Any, logits: Any) -> Any:
        found = sample_one(sampler, logits)
        return replace(found, token=found.token + len(found.token))

    monkeypatch.setattr(lmhead.Sampler, "__call__", by_batch_size)
    monkeypatch.setattr(lmhead.LMHead, "screen", lambda _: None)
    monkeypatch.setattr(sample_batch, "CASES", {"temperature 0.8": {}})
    arguments = ("--vocab", "500", "--rounds", "1", "--no-plot")
    done = run("sample-batch", *arguments, "--out", str(tmp_path))
    assert done.exit_code == 1
    assert "other tokens in each row alone" in done.output


def test_decode_compares_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tuple(
        replace(s, vocab=600, hidden_size=64, batch=min(s.batch, 2)) for s in decode.SETTINGS
    )
    monkeypatch.setattr(decode, "SETTINGS", small)
    monkeypatch.setattr(decode, "GROWTH", (300, 600))
    monkeypatch.setattr(decode, "read_rate", lambda: 1.0)
    done = run("decode", "--rounds", "1", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "decode.json").read_text())
    ways = [way for result in document["results"] for way in result["ways"]]
    assert {w["name"] for w in ways} >= {"screen 8", "screen 4+4", "float32", "hugging face"}
    assert all(w["wrong"] == 0 for w in ways if w["ours"])
    assert [r["setting"]["vocab"] for r in document["growth"]] == [300, 600]
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".png", ".svg"}
