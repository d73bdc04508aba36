"""Full disk or folder not writable: a clear message, and the last checkpoint is complete."""

from __future__ import annotations

import errno
import io
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmhead.progress import Progress
from lmhead.train import TrainError, resume, run_files, train
from train.runs import SMALL, corpus, fingerprint, latest, quiet, small
from train.test_kill import TESTS


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("place", "name"),
    [(run_files, "save_file"), (run_files, "put_text"), (os, "fsync"), (os, "rename")],
)
def test_no_space_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    out = tmp_path / "run"
    train(small(tmp_path), out, progress=quiet())
    before = latest(out)
    bytes_before = fingerprint(before)

    class FillsUp(Progress):
        def __call__(self, status: str) -> None:
            if status.startswith("step 14/"):
                monkeypatch.setattr(place, name, full)

    message = (
        r"cannot write the checkpoint of step 15 in .*: No space left on device. The last "
        r"checkpoint, of step 12, is complete. Continue with: lmhead train --resume"
    )
    with pytest.raises(TrainError, match=message):
        resume(out, {"steps": 18}, progress=FillsUp(io.StringIO()))
    monkeypatch.undo()
    assert latest(out) == before
    assert fingerprint(before) == bytes_before
    assert not list((out / "checkpoints").glob("*-part"))
    assert resume(out, progress=quiet()).step == 18


def test_no_space_for_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmhead.train.training_log.TrainingLog.write", full)
    with pytest.raises(
        TrainError, match=r"cannot write the log in .*: No space left.* no checkpoint"
    ):
        train(small(tmp_path), tmp_path / "run", progress=quiet())


def test_no_space_for_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmhead.train.token_data.write_tokens", full)
    with pytest.raises(TrainError, match=r"cannot write the token files to .*: No space left"):
        train(small(tmp_path), tmp_path / "run", progress=quiet())
    assert not (tmp_path / "run" / "data").exists()


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(TrainError, match=r"cannot write to .*run: File exists"):
        train(small(tmp_path), tmp_path / "run", progress=quiet())


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:  # modes do not bind root, who may run the tests
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(TrainError, match=r"cannot write to .*run: Permission denied"):
        train(small(tmp_path), tmp_path / "run", progress=quiet())


def test_a_real_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """The kernel refuses to let a file grow: exit code 1, one sentence, no traceback."""
    arguments = [corpus(tmp_path), "--out", str(tmp_path / "run")]
    for name, value in {**SMALL, "width": 64, "curve": False}.items():
        option = name.replace("_", "-")
        arguments += [f"--no-{option}"] if value is False else [f"--{option}", str(value)]
    run = subprocess.run(
        [sys.executable, "-m", "lmhead", "train", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert run.returncode == 1, run.stderr
    assert "Error: cannot write the checkpoint of step 3 in " in run.stderr
    assert "File too large" in run.stderr
    assert "Traceback" not in run.stderr
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
