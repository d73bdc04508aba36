"""The goals, and the standard set of benchmarks."""

import json
from pathlib import Path

import click
import pytest

from bench.running import run
from benchmarks import goals, standard
from benchmarks.commands import command


def write(folder: Path, name: str, document: object) -> None:
    (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")


def test_goals_are_read_from_files(tmp_path: Path) -> None:
    assert all("no file" in line for line in goals.lines(tmp_path)[1:])
    ratios = {"compile": {"median": 0.8}, "eager": {"median": 0.71}}
    write(tmp_path, goals.LOSS, {"results": [{"name": "lmhead", "ratios": ratios}]})
    write(tmp_path, goals.SCALING, {"series": [{"exponent": 1.01}, {"exponent": 0.99}]})
    curves = {"exact": [{"valid": 6.32}], "filter": [{"valid": 6.325}]}
    write(tmp_path, goals.TRAINED, {"curves": curves})
    lines = {line.split("  ")[0]: line.split() for line in goals.lines(tmp_path)[1:]}
    assert lines["loss, exact / torch.compile"][-2:] == ["0.8", "yes"]
    assert lines["loss, exact / eager torch"][-2:] == ["0.71", "NO"]
    assert lines["loss, grad_filter=0.02 / eager torch"][-1] == "measured"
    assert lines["time grows with V and N to the power"][-2:] == ["1.01", "yes"]
    assert lines["trained with the filter, loss off by"][-1] == "yes"


def test_memory_goals_look_at_the_worst(tmp_path: Path) -> None:
    shape = {"name": "131072x64"}
    rows = [
        {"name": "loss/lmhead", "shape": shape, "first": 100 * 2**20, "temporary": 50},
        {"name": "query/lmhead", "shape": shape, "first": 0, "temporary": 70},
        {"name": "query/lmhead", "shape": shape, "skipped": "no"},
    ]
    write(tmp_path, goals.MEMORY, {"max_bytes": 64, "results": rows})
    text = "\n".join(goals.lines(tmp_path))
    assert any(line.split()[-2:] == ["100", "yes"] for line in text.splitlines())
    assert any(line.split()[-2:] == ["1.09", "NO"] for line in text.splitlines())


@pytest.mark.parametrize("line", standard.STANDARD + standard.OTHER_SHAPES + standard.QUICK)
def test_the_standard_set_is_made_of_commands_that_exist(line: str) -> None:
    name, *options = line.split()
    found = command.get_command(click.Context(command), name)
    assert found is not None
    found.make_context(name, [*options, "--out", "x", "--threads", "2"])


def test_the_files_of_the_goals_are_those_of_the_standard_set() -> None:
    assert goals.LOSS == "loss-smollm2-2048-float32"
    assert "loss --shape smollm2 --dtype bfloat16 --tokens 256" in standard.STANDARD
    assert goals.HALF == "loss-smollm2-256-bfloat16"


def test_every_folder_of_results_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "amd-avx2").mkdir()
    (tmp_path / "intel-avx512").mkdir()
    monkeypatch.setattr(goals, "RESULTS", tmp_path)
    text = run("goals").output
    assert [text.count(f"{name}:") for name in ("amd-avx2", "intel-avx512")] == [1, 1]
    assert "intel" not in run("goals", tmp_path / "amd-avx2").output
