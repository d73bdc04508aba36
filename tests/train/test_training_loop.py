"""The loop: what a step computes, and that stopping leaves no trace."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from lmhead.models.checkpoint import load_checkpoint, set_weights, steps_of
from lmhead.progress import Progress
from lmhead.train import TrainConfig, TrainError, resume, train
from lmhead.train.model_sharding import make_optimizer
from lmhead.train.run_files import locked
from lmhead.train.text_task import TextBatch, TextTask
from lmhead.train.training_log import read_log
from lmhead.train.training_loop import Trainer, learning_rate
from train.runs import corpus, fingerprint, history, latest, quiet, small


def run(folder: Path, name: str = "run", **changes: Any) -> Path:
    out = folder / name
    train(small(folder, **changes), out, progress=quiet())
    return out


def task_of(folder: Path, config: TrainConfig) -> TextTask:
    (folder / "task").mkdir(exist_ok=True)
    return TextTask(config, folder / "task", lambda _: None)


def test_a_run_learns_and_leaves_its_files(tmp_path: Path) -> None:
    out = run(tmp_path, steps=48, dropout=0.0, curve=True)
    log = read_log(out / "log.jsonl")
    losses = [line["loss"] for line in log if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert [line["step"] for line in log if "valid" in line] == list(range(4, 49, 4))
    assert all(line["sample"] for line in log if "sample" in line)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not list(out.rglob("*-part"))


def test_a_step_is_adamw_on_the_mean_loss(tmp_path: Path) -> None:
    """The trainer against the plain loop that everyone writes."""
    config = small(tmp_path, dropout=0.0, accumulate=1, steps=5, sample_tokens=0)
    task = task_of(tmp_path, config)
    torch.manual_seed(config.seed)
    plain = task_of(tmp_path, config)
    optimizer = make_optimizer(plain.model, config)
    for step in range(config.steps):
        batch = plain.batch(step, 0)
        logits = F.linear(plain.model.hidden(batch.ids), plain.model.body.embedding.weight)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(plain.model.parameters(), config.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        optimizer.step()
        optimizer.zero_grad()
    (tmp_path / "run").mkdir()
    Trainer(task, config, tmp_path / "run", quiet()).run()
    for ours, theirs in zip(task.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_accumulation_divides_by_all_targets_of_a_step(tmp_path: Path) -> None:
    """Batches of different size: the gradient is that of one batch with all their rows."""
    config = small(tmp_path, dropout=0.0)
    task = task_of(tmp_path, config)
    ids = torch.randint(task.tokens.vocab_size, (5, 9))
    whole = TextBatch(ids[:, :-1], ids[:, 1:])
    parts = [TextBatch(ids[rows, :-1], ids[rows, 1:]) for rows in (slice(0, 1), slice(1, None))]
    gradients = []
    for batches in ([whole], parts):
        task.model.zero_grad()
        items = sum(task.items(batch) for batch in batches)
        for batch in batches:
            task.loss(batch, items).backward()  # type: ignore[no-untyped-call]
        gradients.append([p.grad for p in task.model.parameters()])
    for one, many in zip(*gradients, strict=True):
        assert one is not None
        torch.testing.assert_close(one, many, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}])
def test_dense_and_exact_losses_agree(tmp_path: Path, options: dict[str, float]) -> None:
    curves = []
    for loss in ("exact", "dense"):
        out = run(tmp_path, loss, loss=loss, dropout=0.0, steps=20, **options)
        lines = read_log(out / "log.jsonl")
        curves.append(
            [line["valid"]["loss"] for line in lines if "valid" in line]
            + [line["loss"] for line in lines if "loss" in line]
        )
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-4)


def test_batches_are_a_function_of_seed_and_step(tmp_path: Path) -> None:
    config = small(tmp_path)
    task = task_of(tmp_path, config)
    first = task.batch(3, 1)
    assert torch.equal(first.ids, task.batch(3, 1).ids)
    assert torch.equal(first.ids[:, 1:], first.targets[:, :-1])
    for other in (task.batch(4, 1), task.batch(3, 0)):
        assert not torch.equal(first.ids, other.ids)
    task.config = config.replace(seed=1)
    assert not torch.equal(first.ids, task.batch(3, 1).ids)


def test_every_token_of_the_text_can_be_drawn(tmp_path: Path) -> None:
    config = small(tmp_path, batch=2000)
    task = task_of(tmp_path, config)
    text = task.tokens.train
    batch = task.batch(0, 0)
    ends = {tuple(row) for row in batch.targets.tolist()}
    assert tuple(text[-config.block :].tolist()) in ends
    assert tuple(text[: config.block].tolist()) in {tuple(row) for row in batch.ids.tolist()}


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_stopped_run_resumes_bit_for_bit(tmp_path: Path, stop: int) -> None:
    """Stopped by a signal after some step, resumed: weights, moments, log as if undisturbed."""
    whole = run(tmp_path, "whole")
    out = tmp_path / "stopped"
    config = small(tmp_path)
    result = train(config, out, progress=Stopper(stop, signal.SIGTERM))
    assert (result.signal, result.step) == (signal.SIGTERM, 2 * -(-stop // 2))
    again = resume(out, progress=quiet())
    assert again.signal is None
    assert again.step == config.steps
    last, undisturbed = latest(out), latest(whole)
    assert fingerprint(last) == fingerprint(undisturbed)
    assert history(out) == history(whole)


class Stopper(Progress):
    """Sends a signal to this process when a step is reported."""

    def __init__(self, step: int, number: int) -> None:
        super().__init__(io.StringIO())
        self.at, self.number = step, number

    def __call__(self, status: str) -> None:
        if int(status.split()[1].split("/")[0]) >= self.at and self.number:
            os.kill(os.getpid(), self.number)
            self.number = 0


def test_signal_handlers_are_restored(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run(tmp_path, steps=1)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_last_and_best_checkpoints_are_kept(tmp_path: Path) -> None:
    out = run(tmp_path, steps=40, save_every=2, eval_every=10, keep=3, learning_rate=0.3)
    steps = steps_of(out)
    lines = [line for line in read_log(out / "log.jsonl") if "valid" in line]
    best = min(lines, key=lambda line: line["valid"]["loss"])["step"]
    assert steps[-3:] == [36, 38, 40]
    assert set(steps) == {best, 36, 38, 40}
    state = json.loads((out / "checkpoints" / "step-00000040" / "training.json").read_text())
    assert state["best_step"] == best


def test_a_tied_weight_is_written_once(tmp_path: Path) -> None:
    for tied in (True, False):
        out = run(tmp_path, f"tied-{tied}", tied=tied)
        checkpoint = latest(out)
        tensors = load_file(checkpoint / "model.safetensors")
        assert ("head.weight" in tensors) is not tied


def test_only_length_and_reports_can_change(tmp_path: Path) -> None:
    out = run(tmp_path)
    assert resume(out, {"steps": 20}, progress=quiet()).step == 20
    assert resume(out, progress=quiet()).step == 20  # the change has been written down
    assert resume(out, {"steps": 5}, progress=quiet()).step == 20  # fewer than are done
    with pytest.raises(ValueError, match="width cannot change when a run is resumed"):
        resume(out, {"width": 32})


def test_a_folder_holds_one_run(tmp_path: Path) -> None:
    out = run(tmp_path)
    with pytest.raises(TrainError, match=r"there is a run in .* already: .* --resume"):
        train(small(tmp_path), out)
    with (
        locked(out),
        pytest.raises(TrainError, match=rf"another run \(process {os.getpid()} on .*\) is writing"),
    ):
        resume(out)
    with pytest.raises(ValueError, match=r"there is no run in .*config.toml is missing"):
        resume(tmp_path)


def test_data_of_a_failed_start_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(ValueError, match=r"block must be below the .* tokens of the training text"):
        train(small(tmp_path, block=10**6), out, progress=quiet())
    train(small(tmp_path, tokenizer="words", vocab_size=50), out, progress=quiet())
    about = json.loads((out / "data" / "tokens.json").read_text())
    assert about["vocab_size"] <= 50


def test_divergence_stops_the_run(tmp_path: Path) -> None:
    config = small(tmp_path, learning_rate=1e30, clip=0.0, warmup=0, save_every=1)
    with pytest.raises(TrainError, match="training has diverged"):
        train(config, tmp_path / "run", progress=quiet())
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        state = json.loads((path / "training.json").read_text())
        assert state["best_loss"] is None or math.isfinite(state["best_loss"])


def test_validation_is_over_the_held_out_text_alone(tmp_path: Path) -> None:
    config = small(tmp_path, dropout=0.0, eval_tokens=0, sample_tokens=0)
    task = task_of(tmp_path, config)
    task.model.eval()
    valid = torch.from_numpy(task.tokens.valid.astype(np.int64))
    windows = (len(valid) - 1) // config.block
    losses = []
    with torch.no_grad():
        for i in range(windows):
            row = valid[i * config.block : (i + 1) * config.block + 1]
            logits = task.model.hidden(row[None, :-1])[0] @ task.model.body.embedding.weight.T
            losses.append(F.cross_entropy(logits, row[1:]).item())
        assert task.validate()["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_no_held_out_text_means_no_validation(tmp_path: Path) -> None:
    out = run(tmp_path, valid_fraction=0.0)
    assert not [line for line in read_log(out / "log.jsonl") if "valid" in line]
    state = json.loads((out / "checkpoints/step-00000012/training.json").read_text())
    assert state["best_step"] is None


def test_settings_are_those_of_the_file(tmp_path: Path) -> None:
    out = run(tmp_path)
    config = small(tmp_path)
    checkpoint = latest(out)
    written = json.loads((checkpoint / "config.json").read_text())
    assert (written["format"], written["version"], written["kind"]) == ("lmhead", 1, "decoder")
    expected = json.loads(json.dumps(dataclasses.asdict(config)))
    expected["corpus"] = [str(Path(corpus(tmp_path)).resolve())]
    assert written["training"] == expected


@pytest.mark.parametrize("head", ["adaptive", "hierarchical", "sampled"])
def test_heads_for_large_vocabularies(tmp_path: Path, head: str) -> None:
    """They learn, resume bit for bit, and open again with the same distribution."""
    options = {"head": head, "samples": 10, "tokenizer": "words"}
    whole = run(tmp_path, "whole", **options, vocab_size=40, learning_rate=0.05)
    out = tmp_path / "stopped"
    config = small(tmp_path, **options, vocab_size=40, learning_rate=0.05)
    assert train(config, out, progress=Stopper(5, signal.SIGTERM)).step == 6
    resume(out, progress=quiet())
    last, undisturbed = latest(out), latest(whole)
    assert fingerprint(last) == fingerprint(undisturbed)
    assert history(out) == history(whole)
    losses = [line["valid"]["loss"] for line in read_log(out / "log.jsonl") if "valid" in line]
    assert losses[-1] < losses[0]

    task = TextTask(config, out, lambda _: None)
    set_weights(task.model, load_file(last / "model.safetensors"))
    model = load_checkpoint(last)
    hidden = torch.randn(4, config.width)
    ids = torch.arange(task.tokens.vocab_size).expand(4, -1)
    with torch.no_grad():
        heads: list[Any] = [model.head, task.model.head]
        ours, theirs = (head(hidden).log_softmax(-1).gather(-1, ids) for head in heads)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(ours.exp().sum(-1), torch.ones(4), rtol=1e-4, atol=1e-4)


def test_a_validation_loss_of_nan_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TextTask, "validate", lambda _: {"loss": math.nan})
    with pytest.raises(TrainError, match=r"validation loss of step 4 is nan: .*step 3, is compl"):
        train(small(tmp_path), tmp_path / "run", progress=quiet())


def test_settings_that_a_newer_version_has_written(tmp_path: Path) -> None:
    out = run(tmp_path)
    with (out / "config.toml").open("a") as file:
        file.write("telepathy = true\n")
    with pytest.raises(ValueError, match=r"unknown key in .*config.toml: 'telepathy'"):
        resume(out)
