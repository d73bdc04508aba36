"""Killed at any moment, a run resumes to the same weights.

`LMHEAD_KILLS=50 pytest tests/train/test_kill.py` kills fifty times, a single process and one of two
ranks, and at every file operation.
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
from preloaded_python import preloaded_python

from train.runs import SMALL, corpus, fingerprint, history, latest

KILLS = int(os.environ.get("LMHEAD_KILLS", "2"))
TESTS = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no kill -9")


def start(arguments: list[str], ranks: int = 1, python: str | None = None) -> subprocess.Popen[str]:
    python = python or preloaded_python()
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [
            *([sys.executable, *torchrun] if ranks > 1 else [python]),
            *("-m", "lmhead", "train", *arguments),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python},
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


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The ranks that torchrun has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "ranks",
    [
        1,
        pytest.param(
            2,
            marks=pytest.mark.skipif(
                "LMHEAD_KILLS" not in os.environ or not Path("/proc/self/task").exists(),
                reason="needs LMHEAD_KILLS and /proc; test_data_parallel.py kills one rank",
            ),
        ),
    ],
)
def test_kill_9_at_random_moments(tmp_path: Path, ranks: int) -> None:
    draw = random.Random(KILLS)
    arguments = [corpus(tmp_path), *options(60 + 25 * KILLS)]
    whole, out = tmp_path / "whole", tmp_path / "killed"
    undisturbed = start([*arguments, "--out", str(whole)], ranks)
    for number in range(KILLS + 1):
        # The undisturbed run trains beside the first of the others.
        begun = (out / "config.toml").exists()
        process = start(["--resume", str(out)] if begun else [*arguments, "--out", str(out)], ranks)
        assert process.stderr is not None
        if number < KILLS:
            for line in process.stderr:
                if "parameters" in line:  # from here on it trains
                    break
            time.sleep(draw.uniform(0.0, 0.25))
            os.kill(process.pid if ranks == 1 else draw.choice(workers_of(process)), signal.SIGKILL)
        errors = process.communicate(timeout=600)[1]
        if process.returncode == 0:
            break
    assert process.returncode == 0, errors
    assert number >= min(KILLS, 1)
    errors = undisturbed.communicate(timeout=600)[1]
    assert undisturbed.returncode == 0, errors
    assert latest(out).name == latest(whole).name
    assert fingerprint(latest(out)) == fingerprint(latest(whole))
    assert history(out) == history(whole)


@pytest.mark.timeout(3600)
def test_a_crash_at_any_file_operation(tmp_path: Path) -> None:
    tries = "all" if "LMHEAD_KILLS" in os.environ else "8"
    run = subprocess.run(
        [preloaded_python(), str(TESTS / "train" / "crashes.py"), str(tmp_path), tries],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("crashed ")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_write_a_checkpoint_and_exit(tmp_path: Path, number: int, code: int) -> None:
    out = tmp_path / "run"
    process = start([corpus(tmp_path), *options(100_000), "--save-every", "100000",
                     "--eval-every", "0", "--out", str(out)])  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step "):
            break
    process.send_signal(number)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == code, errors
    assert f"Continue with: lmhead train --resume {out}" in errors
    assert "Traceback" not in errors
    last = latest(out)
    assert int(last.name.removeprefix("step-")) >= 10
