"""`lmhead train`: options, messages and exit codes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from preloaded_python import preloaded_python
from train.runs import SMALL, corpus

from lmhead.cli import main
from lmhead.models.checkpoint import load_checkpoint
from lmhead.train.train_config import TrainConfig, read_toml

ROOT = Path(__file__).resolve().parents[2]


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["train", *map(str, arguments)])


def file_of(folder: Path, **changes: Any) -> Path:
    """A configuration file for a small run."""
    path = folder / "small.toml"
    path.write_text(TrainConfig(**{**SMALL, "steps": 4, **changes}).to_toml(), encoding="utf-8")
    return path


def test_train_then_resume(tmp_path: Path) -> None:
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


def test_a_corpus_from_standard_input(tmp_path: Path) -> None:
    out, text = tmp_path / "run", Path(corpus(tmp_path)).read_text()
    settings = ["--config", str(file_of(tmp_path)), "--out", str(out)]
    result = CliRunner().invoke(main, ["train", "-", *settings], input=text)
    assert result.exit_code == 0, result.output
    assert (out / "standard_input.txt").read_text() == text
    same = tmp_path / "same"
    assert invoke(corpus(tmp_path), *settings[:-1], same).exit_code == 0
    for name in ("train.bin", "valid.bin"):
        assert (out / "data" / name).read_bytes() == (same / "data" / name).read_bytes()
    assert invoke("--resume", out, "--steps", 6).exit_code == 0
    twice = invoke("-", "-", *settings[:-1], tmp_path / "twice")
    assert (twice.exit_code, "can be given only once" in twice.output) == (2, True)


def test_standard_input_that_cannot_be_read(tmp_path: Path) -> None:
    command = f"{preloaded_python()} -m lmhead train - --out {tmp_path / 'run'} --steps 1"
    done = subprocess.run(["sh", "-c", f"{command} <&-"], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert done.stderr == "Error: cannot read standard input: it is closed\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["TEXT"], 2, "Give --out FOLDER for a new run, or --resume FOLDER to continue one."),
        (["TEXT", "--out", "OUT", "--resume", "."], 2, "Give --out FOLDER for a new run"),
        (["--out", "OUT"], 2, "no corpus: give one text file or more"),
        (["TEXT", "--out", "OUT", "--width", "30"], 2, "heads must divide width"),
        (["TEXT", "--out", "OUT", "--learning-rate", "inf"], 2, "must be a finite number; got inf"),
        (["TEXT", "--out", "."], 1, "is not empty and is not a training run"),
        (["TEXT", "--out", "OUT", "--dropout", "2"], 2, "dropout must be at most 0.99; got 2.0"),
        (["TEXT", "--out", "OUT", "--block", "100000"], 2, "block must be below the"),
        (["TEXT", "--out", "OUT", "--tokenizer", "morse"], 2, "'morse' is not one of"),
        (["MISSING", "--out", "OUT"], 3, "cannot read"),
        (["/dev/zero", "--out", "OUT"], 3, "/dev/zero must be a regular file"),
        ([".", "--out", "OUT"], 3, "Is a directory"),
        (["BYTES", "--out", "OUT"], 3, "must be UTF-8 text"),
        (["TEXT", "--out", "TEXT/run"], 1, "cannot write to"),
        (["--resume", "."], 2, "there is no run in"),
        (["TEXT", "--resume", "."], 2, "--resume uses the run's own corpus and settings"),
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


def test_fixed_settings_cannot_change_on_resume(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert invoke(corpus(tmp_path), "--config", file_of(tmp_path), "--out", out).exit_code == 0
    changed = invoke("--resume", out, "--learning-rate", 0.1)
    assert changed.exit_code == 2
    assert "learning-rate cannot change when a run is resumed" in " ".join(changed.stderr.split())
    twice = invoke(corpus(tmp_path), "--config", file_of(tmp_path), "--out", out)
    assert twice.exit_code == 1
    assert "there is a run in" in twice.stderr
