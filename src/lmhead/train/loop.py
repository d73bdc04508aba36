"""`Trainer`: the loop. A task's batches in, a trained model in checkpoints out.

for each step:
    the rate of this step                               schedule.py
    for each batch of the step: loss, gradients         the task; gradients add up
    clip, AdamW
    now and then: a line of the log, validation, sample text, a checkpoint

A step's batches share one divisor, the targets of all of them: `accumulate` batches of 4 rows give
the gradient of one batch of 4 · accumulate rows, also where rows differ in length.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import AdamW

from lmhead.models.checkpoint import steps_of
from lmhead.train import checkpoints
from lmhead.train.checkpoints import State
from lmhead.train.config import TrainConfig
from lmhead.train.files import TrainError, explained
from lmhead.train.log import Log, draw_curve
from lmhead.train.progress import Progress
from lmhead.train.schedule import learning_rate
from lmhead.train.signals import Interrupts
from lmhead.train.task import Task

LOG, CURVE = "log.jsonl", "loss.png"
_DRAW_EVERY = 60.0  # seconds


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        step: steps done.
        best_step, best_loss: of the best validation; None without one.
        checkpoint: the last one.
        signal: SIGINT or SIGTERM that ended it early; None for none.
        seconds: spent on steps.
        tokens: targets seen.
    """

    step: int
    best_step: int | None
    best_loss: float | None
    checkpoint: Path
    signal: int | None
    seconds: float
    tokens: int


class Trainer:
    """Train a task in a folder, from its last checkpoint if there is one.

    Args:
        task: what is learned.
        config: its settings.
        run: the folder; it must be locked by the caller, see `files.locked`.
        progress: what is told; None for standard error.
    """

    def __init__(
        self, task: Task, config: TrainConfig, run: Path, progress: Progress | None = None
    ) -> None:
        self.task, self.config, self.run_folder = task, config, run
        self.progress = Progress(config.steps) if progress is None else progress
        self.parameters = [p for p in task.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(task.model, config)
        self.state = State()
        self.saved: Path | None = checkpoints.latest(run)
        if self.saved is not None:
            self.state = checkpoints.restore(self.saved, task, self.optimizer)
        self._drawn = time.monotonic()

    def run(self) -> Result:
        """Train to the last step, or until a signal comes."""
        config, state = self.config, self.state
        self.task.model.train()
        with (
            Interrupts() as wish,
            self._writing("the log"),
            Log(self.run_folder / LOG, state.step) as log,
        ):
            while state.step < config.steps and wish.signal is None:
                due = self._report(log, self.step())
                if due or wish.signal is not None:
                    self._save(log)
            self._save(log)  # nothing, unless a signal came before the first step
        self._draw()
        self.progress.close()
        assert self.saved is not None
        return Result(
            step=state.step,
            best_step=state.best_step,
            best_loss=state.best_loss,
            checkpoint=self.saved,
            signal=wish.signal if state.step < config.steps else None,
            seconds=state.seconds,
            tokens=state.tokens,
        )

    def step(self) -> float:
        """One step of AdamW; gives the length of the gradient."""
        config, state, task = self.config, self.state, self.task
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(state.step, config)
        batches = [task.batch(state.step, micro) for micro in range(config.accumulate)]
        items = sum(task.items(batch) for batch in batches)
        total = 0.0
        for batch in batches:
            loss = task.loss(batch, items)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(self.parameters, config.clip or math.inf).item()
        if not math.isfinite(total) or not math.isfinite(norm):
            facts = f"the loss of step {state.step + 1} is {total}, the gradient's length {norm}"
            raise TrainError(self._diverged(facts))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - start
        state.step += 1
        state.tokens += items
        state.seconds += seconds
        now = (total, 1, items, seconds)
        state.sums = [a + b for a, b in zip(state.sums, now, strict=True)]
        return norm

    def _report(self, log: Log, norm: float) -> bool:
        """Log, validate and sample where it is time to; whether a checkpoint is due."""
        config, state = self.config, self.state
        step, last = state.step, state.step == config.steps
        mean, speed = state.sums[0] / state.sums[1], state.sums[2] / state.sums[3]
        left = (config.steps - step) * state.seconds / step
        if step % config.log_every == 0 or last:
            log.write(
                step=step,
                loss=mean,
                rate=learning_rate(step - 1, config),
                norm=norm,
                tokens=state.tokens,
                tokens_per_second=round(speed, 1),
                seconds=round(state.seconds, 3),
            )
            state.sums = [0.0] * 4
            self.progress.step(step, mean, speed, left)
        due = step % config.save_every == 0 or last
        if config.eval_every and (step % config.eval_every == 0 or last):
            due |= self._validate(log)
        return due

    def _validate(self, log: Log) -> bool:
        """Whether the model is better than ever before."""
        state = self.state
        with _looking(self.task.model):
            figures = self.task.validate()
            text = self.task.sample()
        if text:
            log.write(step=state.step, sample=text)
            self.progress.sample(text)
        if not figures:
            return False
        if not math.isfinite(figures["loss"]):
            facts = f"the validation loss of step {state.step} is {figures['loss']}"
            raise TrainError(self._diverged(facts))
        log.write(step=state.step, valid=figures)
        better = state.best_loss is None or figures["loss"] < state.best_loss
        if better:
            state.best_step, state.best_loss = state.step, figures["loss"]
        shown = "   ".join(f"{name} {value:.4f}" for name, value in figures.items())
        mark = "   best so far" if better else ""
        self.progress.say(f"step {state.step}/{self.config.steps}   validation {shown}{mark}")
        if time.monotonic() - self._drawn > _DRAW_EVERY:
            self._draw()
        return better

    def _save(self, log: Log) -> None:
        state = self.state
        with self._writing(f"the checkpoint of step {state.step}"):
            log.sync()
            settings = dataclasses.asdict(self.config)
            self.saved = checkpoints.save(
                self.run_folder, self.task, self.optimizer, state, settings
            )
            checkpoints.thin_out(self.run_folder, self.config.keep, state.best_step)

    def _draw(self) -> None:
        if self.config.curve:
            with self._writing("the loss curve"):
                draw_curve(self.run_folder / LOG, self.run_folder / CURVE)
        self._drawn = time.monotonic()

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        def remedy() -> str:
            return f"{self._last()} Go on with: lmhead train --resume {self.run_folder}"

        with explained(f"write {what} in {self.run_folder}", remedy):
            yield

    def _diverged(self, facts: str) -> str:
        return (
            f"{facts}: training has diverged. {self._last()} A lower --learning-rate, a longer "
            "--warmup or a smaller --clip may help"
        )

    def _last(self) -> str:
        steps = steps_of(self.run_folder)
        if not steps:
            return "There is no checkpoint yet."
        return f"The last checkpoint, of step {steps[-1]}, is whole."


def make_optimizer(model: nn.Module, config: TrainConfig) -> AdamW:
    """AdamW; matrices decay, vectors (biases, norms) do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


@contextmanager
def _looking(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, after which random numbers go on as if nothing was."""
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        model.train()
