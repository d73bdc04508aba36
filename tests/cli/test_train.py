"""`lmhead train`: options, messages and exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from train.runs import SMALL, corpus

from lmhead.cli import main
from lmhead.models.checkpoint import load_checkpoint
from lmhead.train.config import TrainConfig, read_toml

ROOT = Path(__file__).resolve().parents[2]


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["train", *map(str, arguments)])


def file_of(folder: Path, **changes: Any) -> Path:
    """A configuration file for a small run."""
    path = folder / "small.toml"
    path.write_text(TrainConfig(**{**SMALL, "steps": 4, **changes}).to_toml(), encoding="utf-8")
    return path


def test_train_then_go_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = invoke(corpus(tmp_path), "--config", file_of(tmp_path), "--out", out, "--batch", 2)
    assert first.exit_code == 0, first.output
    assert "tokens to train on" in first.stderr
    assert "step 4/4   validation loss" in first.stderr
    assert first.stdout == ""
    assert read_toml(out / "config.toml")["batch"] == 2  # the option has won
    again = invoke("--resume", out, "--steps", 6, "--json")
    assert again.exit_code == 0, again.output
    document = json.loads(again.stdout)
    assert (document["command"], document["schema"], document["step"]) == ("train", 1, 6)
    assert document["signal"] is None
    assert load_checkpoint(document["checkpoint"]).name == "step-00000006"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["TEXT"], 2, "Give --out FOLDER for a new run, or --resume FOLDER to go on."),
        (["TEXT", "--out", "OUT", "--resume", "."], 2, "Give --out FOLDER for a new run"),
        (["--out", "OUT"], 2, "there is nothing to learn from"),
        (["TEXT", "--out", "OUT", "--width", "30"], 2, "heads must divide width"),
        (["TEXT", "--out", "OUT", "--dropout", "2"], 2, "dropout must be at most 0.99; got 2.0"),
        (["TEXT", "--out", "OUT", "--block", "100000"], 2, "block must be below the"),
        (["TEXT", "--out", "OUT", "--tokenizer", "morse"], 2, "'morse' is not one of"),
        (["MISSING", "--out", "OUT"], 3, "cannot read"),
        (["BYTES", "--out", "OUT"], 3, "must be text in UTF-8"),
        (["TEXT", "--out", "TEXT/run"], 1, "cannot write to"),
        (["--resume", "."], 2, "there is no run in"),
        (["TEXT", "--resume", "."], 2, "--resume takes corpus and settings from the run."),
    ],
)
def test_mistakes(tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    names = {
        "TEXT": corpus(tmp_path),
        "MISSING": str(tmp_path / "missing.txt"),
        "BYTES": str(tmp_path / "bytes"),
        "OUT": str(tmp_path / "run"),
        "TEXT/run": corpus(tmp_path) + "/run",
        ".": str(tmp_path),
    }
    result = invoke(*(names.get(argument, argument) for argument in arguments))
    assert result.exit_code == code, result.output
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_what_a_run_keeps_cannot_be_changed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert invoke(corpus(tmp_path), "--config", file_of(tmp_path), "--out", out).exit_code == 0
    changed = invoke("--resume", out, "--learning-rate", 0.1)
    assert changed.exit_code == 2
    assert "learning-rate stays as it is when a run goes on" in " ".join(changed.stderr.split())
    twice = invoke(corpus(tmp_path), "--config", file_of(tmp_path), "--out", out)
    assert twice.exit_code == 1
    assert "there is a run in" in twice.stderr


def test_the_speed_benchmark_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import train_speed

    options = f"--out {tmp_path}/s.json --vocab 300 --rounds 1 --steps 1 --data {corpus(tmp_path)}"
    options += " --way lmhead --way fused"
    monkeypatch.setattr(sys, "argv", ["train_speed.py", *options.split()])
    train_speed.main()
    document = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert [run["vocab"] for run in document["runs"]] == [25, 300]
    for run in document["runs"]:
        assert [row["name"] for row in run["results"]] == ["lmhead", "plain", "fused"]
        assert not any(row["wrong"] for row in run["results"])
    assert "x plain" in capsys.readouterr().out


def test_the_shakespeare_benchmark_runs_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import shakespeare

    options = f"--out {tmp_path}/s.json --work {tmp_path}/work --steps 2 --data {corpus(tmp_path)}"
    for variants in ("--variant exact", "--variant exact --variant dense"):
        monkeypatch.setattr(sys, "argv", ["shakespeare.py", *options.split(), *variants.split()])
        shakespeare.main()
    document = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert list(document["curves"]) == ["exact", "dense"]
    assert [goal["met"] for goal in document["goals"]] == [False, True]
    assert "exact from dense, all steps" in capsys.readouterr().out


def test_goals_are_judged_by_the_worst_step() -> None:
    sys.path.insert(0, str(ROOT))
    from benchmarks.shakespeare import judge

    sys.path.remove(str(ROOT))

    def made(*losses: float) -> dict[str, Any]:
        return {"train": [[1, losses[0]]], "valid": [[1, loss] for loss in losses]}

    curves = {"exact": made(2.0, 1.5), "dense": made(2.01, 1.5), "filter": made(3.0, 1.501)}
    assert [goal["met"] for goal in judge(curves)] == [True, False, True]
    assert judge(curves)[1]["value"] == pytest.approx(1 - 2 / 2.01)
