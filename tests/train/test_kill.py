"""Killed at any instant, a run goes on to the same weights.

`LMHEAD_KILLS=50 pytest tests/train/test_kill.py` kills fifty times, and at every file operation.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmhead.train.checkpoints import latest
from train.runs import SMALL, corpus, fingerprint, history

KILLS = int(os.environ.get("LMHEAD_KILLS", "2"))
TESTS = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no kill -9")


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from lmhead.cli import main; main()", "train", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def options(steps: int) -> list[str]:
    settings = {**SMALL, "steps": steps, "save_every": 5, "eval_every": 20, "log_every": 10}
    given = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            given.append(f"--{option}" if value else f"--no-{option}")
        else:
            given += [f"--{option}", str(value)]
    return given


@pytest.mark.timeout(3600)
def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    draw = random.Random(KILLS)
    arguments = [corpus(tmp_path), *options(60 + 25 * KILLS)]
    whole, out = tmp_path / "whole", tmp_path / "killed"
    undisturbed = start([*arguments, "--out", str(whole)])
    killed = 0
    while True:
        # The run that nobody disturbs goes on beside the first of the others.
        there = (out / "config.toml").exists()
        process = start(["--resume", str(out)] if there else [*arguments, "--out", str(out)])
        assert process.stderr is not None
        if killed < KILLS:
            for line in process.stderr:
                if "parameters" in line:  # from here on it trains
                    break
            time.sleep(draw.uniform(0.0, 0.25))
            process.kill()
        said = process.communicate(timeout=600)[1]
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, said
            break
        killed += 1
    said = undisturbed.communicate(timeout=600)[1]
    assert undisturbed.returncode == 0, said
    assert killed >= min(KILLS, 1)
    last, expected = latest(out), latest(whole)
    assert last is not None
    assert expected is not None
    assert last.name == expected.name
    assert fingerprint(last) == fingerprint(expected)
    assert history(out) == history(whole)


@pytest.mark.timeout(3600)
def test_dying_at_any_file_operation(tmp_path: Path) -> None:
    tries = "all" if "LMHEAD_KILLS" in os.environ else "8"
    run = subprocess.run(
        [sys.executable, str(TESTS / "train" / "crashes.py"), str(tmp_path), tries],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("died ")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_write_a_checkpoint_and_leave(tmp_path: Path, number: int, code: int) -> None:
    out = tmp_path / "run"
    process = start([corpus(tmp_path), *options(100_000), "--save-every", "100000",
                     "--eval-every", "0", "--out", str(out)])  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step "):
            break
    process.send_signal(number)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == code, said
    assert f"Go on with: lmhead train --resume {out}" in said
    assert "Traceback" not in said
    last = latest(out)
    assert last is not None
    assert int(last.name.removeprefix("step-")) >= 10
