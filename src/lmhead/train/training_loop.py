"""`Trainer`: the training loop, from the batches of a task to checkpoints of a trained model.

for each step:
    set the learning rate
    for each batch of the step: loss, backward; gradients add up
    clip the gradient, AdamW
    at intervals: log line, validation, sample text, checkpoint

The losses of a step are divided by the number of targets in all its batches: `accumulate` batches
of 4 rows give the gradient of one batch of 4 · accumulate rows, even if rows differ in length.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from lmhead.models.checkpoint import checkpoint_of, steps_of
from lmhead.parallel.process_ranks import Ranks
from lmhead.progress import Progress
from lmhead.train import checkpoints
from lmhead.train.model_sharding import make_optimizer, shard_model
from lmhead.train.nonfinite import NonFiniteError, find_nonfinite, watch_outputs
from lmhead.train.run_files import TrainError, os_errors_as_train_errors
from lmhead.train.task import Task
from lmhead.train.train_config import TrainConfig
from lmhead.train.training_log import TrainingLog, draw_curve

LOG, CURVE = "log.jsonl", "loss.png"
_DRAW_EVERY = 60.0  # seconds
_ONE_SIGNAL = 2.0  # seconds


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    step: int  # steps completed
    # best_step, best_loss: step and loss of the best validation; None without validation
    best_step: int | None
    best_loss: float | None
    checkpoint: Path  # folder of the last checkpoint
    signal: int | None  # SIGINT, SIGTERM or SIGHUP if it ended the run early, else None
    seconds: float  # time spent on steps
    tokens: int  # targets trained on


class Trainer:
    """Train a task in a folder, from its last checkpoint if there is one.

    The caller has locked the folder (`run_files.locked`). `progress` is None to report to standard
    error, `ranks` None to train in this process only.
    """

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        run: Path,
        progress: Progress | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.task, self.config, self.run_folder = task, config, run
        self.ranks = Ranks() if ranks is None else ranks
        self.progress = Progress(plain=True) if progress is None else progress
        optimizer = make_optimizer(task.model, config)
        self.state = self.ranks.first_then_others(
            lambda: checkpoints.restore_latest(run, task, optimizer, self.progress.print)
        )
        self.sharding, self.optimizer = shard_model(task, optimizer, config, self.ranks)
        self._drawn = time.monotonic()

    def run(self) -> Result:
        """Train to the last step, or until SIGINT, SIGTERM or SIGHUP."""
        config, state = self.config, self.state
        self.task.model.train()
        with GracefulShutdown() as shutdown, self._open_log() as log:
            while True:
                stopped_by = int(max(self.ranks.gather_numbers(shutdown.signal or 0)))
                if stopped_by or state.step >= config.steps:
                    break
                try:
                    norm = self.step()
                except NonFiniteError as error:  # the optimizer step was not taken
                    self._save(log, last_good=True)
                    raise TrainError(self._diverged(str(error))) from error
                if self._report(log, norm):
                    self._save(log)
            self._save(log)  # writes nothing if the last step has its checkpoint
            if log:
                self._draw()
        self.progress.close()
        return Result(
            step=state.step,
            best_step=state.best_step,
            best_loss=state.best_loss,
            checkpoint=checkpoint_of(self.run_folder, state.step),
            signal=stopped_by if state.step < config.steps else None,
            seconds=state.seconds,
            tokens=state.tokens,
        )

    @contextmanager
    def _open_log(self) -> Iterator[TrainingLog | None]:
        """Open the log on rank 0; None on the others, which write nothing."""
        if not self.ranks.first:
            yield None
            return
        with self._writing("the log"), TrainingLog(self.run_folder / LOG, self.state.step) as log:
            yield log

    def step(self) -> float:
        """Take one optimizer step; return the gradient norm before clipping."""
        config, state, task, ranks = self.config, self.state, self.task, self.ranks
        sharding = self.sharding
        start = time.perf_counter()
        random_state = torch.get_rng_state()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(state.step, config)
        batches = [task.batch(state.step, micro) for micro in range(config.accumulate)]
        items = sum(task.items(batch) for batch in batches)
        ranks.seed_step(config.seed, state.step)
        total = 0.0
        for batch in batches:
            loss = sharding.loss(batch, items)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        total = sharding.total(total)
        sharding.sum_gradients()
        norm = sharding.clip(config.clip or math.inf)
        if not math.isfinite(total) or not math.isfinite(norm):
            torch.set_rng_state(random_state)
            ranks.seed_step(config.seed, state.step)
            cause = find_nonfinite(task.model, lambda b: sharding.loss(b, items), batches)
            causes = [c for c in ranks.gather(cause) if c]
            causes.sort(
                key=lambda c: "in the gradient" in c
            )  # a gradient may come from another rank
            torch.set_rng_state(random_state)  # the state of the last good step
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(
                f"the loss of step {state.step + 1} is {total:g} and the gradient norm {norm:g}: "
                + (causes[0] if causes else "the sum of the gradients overflows")
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = self._plausible(time.perf_counter() - start)
        state.step += 1
        state.tokens += items
        state.seconds += seconds
        state.sums = [a + b for a, b in zip(state.sums, (total, 1, items, seconds), strict=True)]
        return norm

    def _plausible(self, seconds: float) -> float:
        """Replace the duration of a step by the mean if the clock jumped (suspended machine)."""
        mean = self.state.seconds / self.state.step if self.state.step else math.inf
        return seconds if 0.0 <= seconds <= 60.0 + 100.0 * mean else min(mean, 60.0)

    def _report(self, log: TrainingLog | None, norm: float) -> bool:
        """Log and validate if due; return whether a checkpoint is due."""
        config, state = self.config, self.state
        step, last = state.step, state.step == config.steps
        if step % config.log_every == 0 or last:
            loss, speed = state.sums[0] / state.sums[1], state.sums[2] / max(state.sums[3], 1e-9)
            if log:
                log.write(
                    step=step,
                    loss=loss,
                    rate=learning_rate(step - 1, config),
                    norm=norm,
                    tokens=state.tokens,
                    tokens_per_second=round(speed, 1),
                    seconds=round(state.seconds, 3),
                )
            state.sums = [0.0] * 4
            left = (config.steps - step) * state.seconds / step
            self.progress(
                f"step {step}/{config.steps}   loss {loss:.4f}   {speed:,.0f} tokens/s   "
                f"{format_seconds(left)} left"
            )
        checkpoint_due = step % config.save_every == 0 or last
        if config.eval_every and (step % config.eval_every == 0 or last):
            checkpoint_due |= self._validate(log)
        return checkpoint_due

    def _validate(self, log: TrainingLog | None) -> bool:
        """Validate and sample; return whether the validation loss is the lowest so far."""
        state, evaluated = self.state, {}
        if self.sharding.everywhere:
            evaluated["all"] = self._evaluate()
        metrics, text, problem = self.ranks.on_first(
            lambda: evaluated["all"] if evaluated else self._evaluate()
        )
        if problem:
            raise TrainError(self._diverged(problem))
        if text and log:
            log.write(step=state.step, sample=text)
            self.progress.print(_quote(text))
        if not metrics:
            return False
        if log:
            log.write(step=state.step, valid=metrics)
        best = state.best_loss is None or metrics["loss"] < state.best_loss
        if best:
            state.best_step, state.best_loss = state.step, metrics["loss"]
        shown = "   ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.progress.print(
            f"step {state.step}/{self.config.steps}   validation {shown}"
            + ("   best so far" if best else "")
        )
        if log and time.monotonic() - self._drawn > _DRAW_EVERY:
            self._draw()
        return best

    def _evaluate(self) -> tuple[dict[str, float], str, str]:
        """Return the metrics, sample text, and the problem if the loss is not finite."""
        with _evaluation(self.task.model):
            metrics = self.sharding.evaluate(self.task.validate)
            if math.isfinite(metrics.get("loss", 0.0)):
                return metrics, self.sharding.evaluate(self.task.sample), ""
            with watch_outputs(self.task.model) as nonfinite:
                self.sharding.evaluate(self.task.validate)
        cause = nonfinite[0] if nonfinite else "all module outputs are finite"
        problem = f"the validation loss of step {self.state.step} is {metrics['loss']:g}"
        return metrics, "", f"{problem}: {cause}"

    def _save(self, log: TrainingLog | None, *, last_good: bool = False) -> None:
        """Write a checkpoint and delete old ones; refuse to save inf or NaN.

        With `last_good` the run ends with an error: keep all checkpoints, skip what is not finite.
        """
        tensors = None
        if self.ranks.first or self.sharding.everywhere:
            tensors = checkpoints.collect(self.task, self.optimizer, keep=self.ranks.first)
        self.ranks.on_first(lambda: self._write(log, tensors, last_good))

    def _write(
        self, log: TrainingLog | None, tensors: checkpoints.Tensors | None, last_good: bool
    ) -> None:
        if log is None or tensors is None:  # not rank 0
            return
        state = self.state
        nonfinite = checkpoints.nonfinite_tensor(tensors)
        if nonfinite is not None and last_good:
            return
        if nonfinite is not None:
            raise TrainError(self._diverged(f"after step {state.step}, {nonfinite} is not finite"))
        with self._writing(f"the checkpoint of step {state.step}"):
            log.sync()
            settings = dataclasses.asdict(self.config)
            checkpoints.save(self.run_folder, self.task, tensors, state, settings)
            if not last_good:
                checkpoints.delete_old(self.run_folder, self.config.keep, state.best_step)

    def _draw(self) -> None:
        if self.config.curve:
            with self._writing("the loss curve"):
                draw_curve(self.run_folder / LOG, self.run_folder / CURVE)
        self._drawn = time.monotonic()

    def _writing(self, what: str) -> AbstractContextManager[None]:
        return os_errors_as_train_errors(
            f"write {what} in {self.run_folder}",
            lambda: f"{self._last()} Continue with: lmhead train --resume {self.run_folder}",
        )

    def _diverged(self, problem: str) -> str:
        return (
            f"training has diverged: {problem}. {self._last()} A new run with a lower "
            "--learning-rate, a longer --warmup or a smaller --clip may help"
        )

    def _last(self) -> str:
        steps = steps_of(self.run_folder)
        if not steps:
            return "There is no checkpoint yet."
        return f"The last checkpoint, of step {steps[-1]}, is complete."


class GracefulShutdown:
    """Record SIGINT, SIGTERM or SIGHUP instead of stopping; a second SIGINT interrupts as usual.

    Signals that are ignored (by nohup, say) stay ignored. Ctrl-C reaches the processes of torchrun
    twice, from the terminal and from torchrun: signals within two seconds count as one.

    Attributes:
        signal: the first signal received, else None.

    >>> with GracefulShutdown() as shutdown:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     shutdown.signal == signal.SIGTERM
    True
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._time = 0.0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> GracefulShutdown:
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                number = getattr(signal, name, None)  # Windows has no SIGHUP
                if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.signal is None:
            self.signal, self._time = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() > self._time + _ONE_SIGNAL:
            raise KeyboardInterrupt


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step (0 is the first): linear warm-up, then cosine decay.

    warm-up   rate · (step + 1) / (warmup + 1)
    decay     low + (rate - low) · (1 + cos(π · t)) / 2,  t from 0 to 1 at the last step

    >>> config = TrainConfig(steps=10, warmup=3, learning_rate=1.0, min_learning_rate=0.1)
    >>> [round(learning_rate(step, config), 2) for step in range(11)]
    [0.25, 0.5, 0.75, 1.0, 0.96, 0.83, 0.65, 0.45, 0.27, 0.14, 0.1]
    """
    high, low = config.learning_rate, config.min_learning_rate
    if step < config.warmup:
        return high * (step + 1) / (config.warmup + 1)
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return low + (high - low) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def format_seconds(seconds: float) -> str:
    """Format a duration.

    >>> format_seconds(5), format_seconds(65), format_seconds(3700)
    ('0:05', '1:05', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _quote(text: str) -> str:
    r"""Indent generated text, with control characters replaced: a terminal would execute them.

    >>> print(_quote("one\x1b[2J\ntwo"))
      │ one�[2J
      │ two
    """
    safe = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
    return "\n".join(f"  │ {line}" for line in safe.split("\n"))


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients; leave torch's random state unchanged."""
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        model.train()
