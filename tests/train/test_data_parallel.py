"""Data-parallel training with torchrun: the same run for any number of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from preloaded_python import preloaded_python
from safetensors.torch import load_file
from session_folder import session_folder

from lmhead.models.checkpoint import steps_of
from lmhead.parallel.process_ranks import Ranks
from lmhead.train import TrainConfig, resume, train
from train.runs import fingerprint, history, latest, quiet, small
from train.test_kill import TESTS, options
from train.test_training_loop import Stopper
from train.test_translation import small as translation

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def environment() -> dict[str, str]:
    """For torchrun, which starts the ranks with PYTHON_EXEC."""
    more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), "PYTHON_EXEC": preloaded_python()}
    return {**os.environ, **more}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of data_parallel_worker.py: batches of 3 rows, or one, on 2 ranks."""
    return session_folder(tmp_path_factory, "data-parallel", run_all)


def run_all(folder: Path) -> None:
    begun = train(small(folder, dropout=0.0), folder / "more", progress=Stopper(6, signal.SIGTERM))
    assert begun.step == 6
    translation(folder)  # writes its pairs
    worker = str(TESTS / "train" / "data_parallel_worker.py")
    done = subprocess.run(
        [preloaded_python(), *TORCHRUN, worker, str(folder)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=500,
    )
    assert done.returncode == 0, [line for line in done.stderr.splitlines() if "rank0" in line]


def assert_same_curve(run: Path, other: Path) -> None:
    ours, theirs = history(run), history(other)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for mine, line in zip(ours, theirs, strict=True):
        for name in ("loss", "rate", "norm", "tokens"):
            assert (name in mine) == (name in line)
            if name in mine:
                np.testing.assert_allclose(mine[name], line[name], rtol=1e-4)
        if "valid" in mine:
            np.testing.assert_allclose(mine["valid"]["loss"], line["valid"]["loss"], rtol=1e-4)


def single(folder: Path, config: TrainConfig) -> Path:
    train(config, folder / "single", progress=quiet())
    return folder / "single"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("text", {}),
        ("one-row", {"batch": 1}),
        ("sampled", {"head": "sampled", "samples": 10, "tokenizer": "words", "vocab_size": 40}),
        ("adaptive", {"head": "adaptive", "samples": 10, "tokenizer": "words", "vocab_size": 40}),
    ],
)
def test_the_loss_curve_of_one_process(
    runs: Path, tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    expected = single(tmp_path, small(tmp_path, dropout=0.0, **changes))
    assert_same_curve(runs / name, expected)
    ours, theirs = (load_file(latest(run) / "model.safetensors") for run in (runs / name, expected))
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-2, atol=1e-4)


def test_translation(runs: Path, tmp_path: Path) -> None:
    assert_same_curve(runs / "translation", single(tmp_path, translation(tmp_path, dropout=0.0)))


def test_a_stopped_run_is_bit_identical_with_as_many_ranks(runs: Path) -> None:
    """SIGTERM reached rank 0 only; dropout differs between ranks, but not between runs."""
    assert fingerprint(latest(runs / "stopped")) == fingerprint(latest(runs / "dropout"))
    assert history(runs / "stopped") == history(runs / "dropout")


def test_a_run_resumes_with_fewer_and_with_more_ranks(runs: Path, tmp_path: Path) -> None:
    expected = single(tmp_path, small(tmp_path, dropout=0.0))
    assert steps_of(runs / "more")[-1] == 12
    assert_same_curve(runs / "more", expected)
    resume(runs / "fewer", progress=quiet())
    assert_same_curve(runs / "fewer", expected)


def test_nan_on_one_rank_stops_all(runs: Path) -> None:
    found = [path.name.removeprefix("error-") for path in runs.glob("error-*")]
    assert "diverged" in found
    for name in found:
        error = (runs / f"error-{name}").read_text()
        assert "step 5 is" in error
        assert "first in the loss of batch 2 of 2; its hidden states are finite" in error
        assert "The last checkpoint, of step 4, is complete" in error
        assert steps_of(runs / name) == [4]


OTHER = {"tied": False, "bias": True, "label_smoothing": 0.1, "z_loss": 1e-3}
WORDS = {"samples": 10, "tokenizer": "words", "vocab_size": 40}


def test_sharded_runs_have_the_loss_curve_of_one_process(runs: Path, tmp_path: Path) -> None:
    """Parameters split by FSDP2, or embedding and head by vocabulary; moved between all of them."""
    expected = single(tmp_path, small(tmp_path, dropout=0.0))
    resume(runs / "to-one", progress=quiet())  # begun with FSDP2 on 2 ranks, ended on one
    for name in ("text-full", "text-vocab", "moved", "to-one"):
        assert_same_curve(runs / name, expected)
        for file in ("model.safetensors", "training.safetensors"):
            ours, theirs = (load_file(latest(run) / file) for run in (runs / name, expected))
            assert ours.keys() == theirs.keys()
            for key, tensor in theirs.items():
                if not key.startswith("random/"):
                    torch.testing.assert_close(ours[key], tensor, rtol=1e-2, atol=1e-4)
    cases: dict[str, tuple[list[str], TrainConfig]] = {
        "pairs": (
            ["translation-full", "translation-vocab"],
            translation(tmp_path, dropout=0.0),
        ),
        "row": (["one-row-vocab"], small(tmp_path, dropout=0.0, batch=1, **OTHER)),
        "sampled": (["sampled-full"], small(tmp_path, dropout=0.0, head="sampled", **WORDS)),
        "adaptive": (["adaptive-full"], small(tmp_path, dropout=0.0, head="adaptive", **WORDS)),
    }
    for kind, (names, config) in cases.items():
        (tmp_path / kind).mkdir()
        one = single(tmp_path / kind, config)
        for name in names:
            assert_same_curve(runs / name, one)
    assert fingerprint(latest(runs / "stopped-vocab")) == fingerprint(
        latest(runs / "dropout-vocab")
    )


def test_one_rank_is_no_different() -> None:
    """Without torchrun nothing is sent, and the random state is left alone."""
    ranks = Ranks()
    state = torch.get_rng_state()
    ranks.seed_step(0, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert ranks.gather("a") == ["a"]
    assert ranks.on_first(lambda: 7) == 7
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    ranks.sum_gradients([parameter])
    assert parameter.grad.tolist() == [1.0, 1.0]


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("number", "shard"),
    [
        pytest.param(signal.SIGKILL, "data", id="kill one"),
        pytest.param(signal.SIGKILL, "full", id="kill one, full"),
        pytest.param(signal.SIGKILL, "vocab", id="kill one, vocab"),
        pytest.param(signal.SIGTERM, "data", id="stop all"),
        pytest.param(signal.SIGINT, "vocab", id="Ctrl-C, vocab"),
    ],
)
def test_ending_the_command_leaves_a_usable_run(tmp_path: Path, number: int, shard: str) -> None:
    out = tmp_path / "run"
    command = [sys.executable, *TORCHRUN, "-m", "lmhead", "train"]
    settings = [*small(tmp_path).corpus, *options(10**6), "--out", str(out), "--shard", shard]
    process = subprocess.Popen(
        [*command, *settings],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        errors = []
        for line in process.stderr:
            errors.append(line)
            if line.startswith("step 20/"):
                break
        workers = children(process.pid)
        assert len(workers) == 2, errors
        if number == signal.SIGINT:  # the terminal sends it to all; torchrun sends it again
            os.killpg(process.pid, number)
        else:
            os.kill(workers[1] if number == signal.SIGKILL else process.pid, number)
        errors += process.communicate(timeout=120)[1].splitlines()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    deadline = time.monotonic() + 30
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, workers)), errors
    shown = [line for line in errors if line.startswith("step 20/") and "tokens/s" in line]
    assert len(shown) == 1, "one display"
    step = steps_of(out)[-1]
    assert step >= (20 if number == signal.SIGINT else 10), errors
    assert resume(out, {"steps": step + 2}, progress=quiet()).step == step + 2
