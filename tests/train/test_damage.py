"""Damaged and changed files, a lock, NaN, a clock that jumps: a run continues or says why not."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lmhead.models.checkpoint import steps_of
from lmhead.progress import Progress
from lmhead.train import TrainError, resume, train
from lmhead.train.text_task import TextTask
from train.runs import fingerprint, history, latest, quiet, small
from train.test_kill import options, start


class Lines(Progress):
    """Keeps what is printed."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def print(self, text: str) -> None:
        self.lines.append(text)


def make_run(folder: Path, **changes: Any) -> Path:
    out = folder / "run"
    train(small(folder, keep=9, **changes), out, progress=quiet())
    return out


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("undamaged"))


@pytest.fixture
def out(undamaged: Path, tmp_path: Path) -> Path:
    """A copy of a run to damage."""
    return Path(shutil.copytree(undamaged, tmp_path / "run"))


def flip_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) * 2 // 3],
    "empty": lambda _: b"",
    "bit": flip_bit,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "tokenizer.json", "training.json", "training.safetensors"],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    out: Path, name: str, damage: str
) -> None:
    expected, log = fingerprint(latest(out)), history(out)
    file = latest(out) / name
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    progress = Lines()
    result = resume(out, progress=progress)
    (message,) = [line for line in progress.lines if "damaged" in line]
    assert "step-00000012 is damaged" in message
    assert "continuing from step 9" in message or "continuing from step 8" in message
    assert (out / "checkpoints" / "damaged-step-00000012" / name).exists()
    assert result.step == 12
    assert fingerprint(latest(out)) == expected
    assert history(out) == log


def test_two_damaged_checkpoints_and_one_damaged_twice(tmp_path: Path) -> None:
    out = make_run(tmp_path, eval_every=0)
    expected = fingerprint(latest(out))
    for damaged in ([12, 9], [12]):
        for step in damaged:
            (out / "checkpoints" / f"step-{step:08}" / "model.safetensors").unlink()
        assert resume(out, progress=quiet()).step == 12
        assert fingerprint(latest(out)) == expected
    names = {path.name for path in (out / "checkpoints").glob("damaged-*")}
    assert names == {
        "damaged-step-00000012",
        "damaged-step-00000012-1",
        "damaged-step-00000009",
    }


def test_no_checkpoint_is_left(out: Path) -> None:
    for step in steps_of(out):
        (out / "checkpoints" / f"step-{step:08}" / "training.json").write_text("{}")
    before = steps_of(out)
    with pytest.raises(TrainError, match=r"step-00000012 is damaged: .*step-00000003 is damaged"):
        resume(out, progress=quiet())
    assert steps_of(out) == before  # nothing was renamed


def test_an_unreadable_checkpoint_is_not_treated_as_damaged(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = steps_of(out)

    def refuse(_: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("lmhead.train.run_files.file_sha256", refuse)
    with pytest.raises(TrainError, match=r"cannot read the checkpoint .*: Permission denied"):
        resume(out, progress=quiet())
    assert steps_of(out) == before


@pytest.mark.parametrize("name", ["tokens.json", "tokenizer.json", "train.bin", "valid.bin"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_token_files_are_refused(out: Path, name: str, damage: str) -> None:
    file = out / "data" / name
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    if (name, damage) == ("tokens.json", "bit"):
        return  # one bit of a path or a time may be harmless; see the random damage below
    with pytest.raises(TrainError, match=r"the token files in .* are damaged: "):
        resume(out, {"steps": 14}, progress=quiet())


def test_random_damage_never_ends_in_a_bare_exception(tmp_path: Path) -> None:
    out = make_run(tmp_path, steps=4, save_every=2)
    files = [path.relative_to(out) for path in sorted(out.rglob("*")) if path.is_file()]
    draw = random.Random(0)
    for number in range(60):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(out, copy)
        file = copy / draw.choice(files)
        content = bytearray(file.read_bytes())
        for _ in range(draw.choice([1, 1, 10])):
            if content:
                content[draw.randrange(len(content))] = draw.randrange(256)
        kept = draw.choice([len(content), len(content), draw.randrange(len(content) + 1)])
        file.write_bytes(bytes(content[:kept]))
        expected = (ValueError, TypeError) if file.name == "config.toml" else ()
        with suppress(TrainError, *expected):
            resume(copy, {"curve": number % 10 == 0}, progress=quiet())
        shutil.rmtree(copy)


def test_a_changed_corpus_is_refused_with_the_difference(tmp_path: Path) -> None:
    out = make_run(tmp_path)
    corpus = tmp_path / "corpus.txt"
    text = corpus.read_text()
    expected = fingerprint(Path(resume(out, {"steps": 14}, progress=quiet()).checkpoint))
    corpus.write_text(text + "more")
    size = len(text)
    message = rf"corpus.txt has changed since the run began: {size:,} bytes .* {size + 4:,} bytes"
    with pytest.raises(TrainError, match=message):
        resume(out, {"steps": 16}, progress=quiet())
    corpus.write_text(text.replace("big", "bog"))  # of the same length
    with pytest.raises(TrainError, match="has changed since the run began"):
        resume(out, {"steps": 16}, progress=quiet())
    corpus.write_text(text)  # another time, the same content
    assert resume(out, {"steps": 14}, progress=quiet()).step == 14
    assert fingerprint(latest(out)) == expected
    corpus.unlink()
    progress = Lines()
    assert resume(out, {"steps": 16}, progress=progress).step == 16
    assert any("continuing with the token files" in line for line in progress.lines)


def test_a_corpus_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path)

    def append(*_: Any) -> int:
        with Path(config.corpus[0]).open("a") as file:
            file.write("more")
        return 0

    monkeypatch.setattr("lmhead.train.token_data.write_tokens", append)
    with pytest.raises(ValueError, match=r"corpus.txt changed while it was being read"):
        train(config, tmp_path / "run", progress=quiet())


def test_the_lock_is_held_until_the_process_ends_and_not_longer(tmp_path: Path) -> None:
    """A second run is refused while the first is alive; kill -9 leaves no stale lock."""
    out = tmp_path / "run"
    config = small(tmp_path)
    arguments = [*config.corpus, *options(10**6), "--out", str(out)]
    first = start(arguments, python=sys.executable)  # the process whose number the lock has
    assert first.stderr is not None
    try:
        for line in first.stderr:
            if line.startswith("step "):
                break
        with pytest.raises(TrainError, match=rf"another run \(process {first.pid} on "):
            resume(out, progress=quiet())
    finally:
        first.kill()
        first.communicate()
    step = steps_of(out)[-1]
    assert resume(out, {"steps": step + 1}, progress=quiet()).step == step + 1


def test_a_file_system_without_locks(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def refuse(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        owner = json.loads((out / ".lmhead-run").read_text())
        (out / ".lmhead-run").write_text(json.dumps(owner | {"pid": sleeper.pid}))
        with pytest.raises(TrainError, match=rf"another run \(process {sleeper.pid} on "):
            resume(out, progress=quiet())
    finally:
        sleeper.kill()
        sleeper.wait()
    assert resume(out, progress=quiet()).step == 12


def nan_from_step(step: int, place: Callable[[TextTask], torch.Tensor]) -> Callable[..., Any]:
    """Return a `TextTask.batch` that poisons the model before some step."""
    batch = TextTask.batch

    def poisoned(self: TextTask, now: int, micro: int) -> Any:
        if now == step:
            with torch.no_grad():
                place(self).fill_(math.nan)
        return batch(self, now, micro)

    return poisoned


def test_a_loss_that_is_nan_keeps_the_last_good_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path, save_every=100, eval_every=0, steps=9)
    whole = train(config, tmp_path / "whole", progress=quiet()).checkpoint
    loss, out = TextTask.loss, tmp_path / "run"

    def poisoned(self: TextTask, batch: Any, num_items: int) -> Any:
        value = loss(self, batch, num_items)
        return value * math.nan if batch.number == 2 * 5 + 1 else value

    monkeypatch.setattr(TextTask, "loss", poisoned)
    message = (
        r"training has diverged: the loss of step 6 is nan and the gradient norm nan: first in the "
        r"loss of batch 2 of 2; its hidden states are finite. The last checkpoint, of step 5, is"
    )
    with pytest.raises(TrainError, match=message):
        train(config, out, progress=quiet())
    monkeypatch.undo()
    assert steps_of(out) == [5]
    assert resume(out, progress=quiet()).step == 9  # as if nothing had happened, dropout too
    assert fingerprint(latest(out)) == fingerprint(whole)
    assert history(out) == history(tmp_path / "whole")


def test_nan_weights_are_named_and_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    poison = nan_from_step(5, lambda task: next(task.model.body.blocks.parameters()))
    monkeypatch.setattr(TextTask, "batch", poison)
    with pytest.raises(
        TrainError, match=r"step 6 is nan .* the weight .* is not finite.*step 4, is"
    ):
        train(small(tmp_path), out, progress=quiet())
    assert steps_of(out) == [3, 4]


def test_overflowing_activations_are_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    batch = TextTask.batch

    def huge(self: TextTask, step: int, micro: int) -> Any:
        if (step, micro) == (2, 0):
            with torch.no_grad():
                for module in self.model.body.modules():
                    if isinstance(module, torch.nn.Linear):
                        module.weight.mul_(1e30)
        return batch(self, step, micro)

    monkeypatch.setattr(TextTask, "batch", huge)
    with pytest.raises(TrainError, match=r"first in the output of body\.\S+ \(\w+\), batch 1 of 2"):
        train(small(tmp_path), out, progress=quiet())


def test_a_clock_jump_does_not_distort_speed_and_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine was suspended for eight hours, then the clock was set back."""
    calls, jumps = 0, {10: 8 * 3600.0, 15: 3600.0, 18: -7200.0}
    offset = 0.0

    def clock() -> float:
        nonlocal calls, offset
        calls += 1
        offset += jumps.get(calls, 0.0)
        return time.monotonic() + offset

    monkeypatch.setattr("lmhead.train.training_loop.time.perf_counter", clock)
    # Two calls per step: the jumps are between steps and inside a step.
    result = train(small(tmp_path), tmp_path / "run", progress=quiet())
    assert calls == 2 * 12
    assert 0 < result.seconds < 60
    assert all(line.get("tokens_per_second", 1) > 0 for line in history(tmp_path / "run"))


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no SIGHUP on this system")
def test_a_closed_terminal_writes_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = small(tmp_path)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored
    process = start([*config.corpus, *options(10**6), "--save-every", "1000000", "--out", str(out)])
    signal.signal(signal.SIGHUP, before)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step "):
                break
        process.stderr.close()  # what is printed from now on fails
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGHUP)
        assert process.wait(60) in (128 + signal.SIGHUP, 1)
    finally:
        process.kill()
    assert steps_of(out)
