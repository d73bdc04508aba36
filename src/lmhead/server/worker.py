"""One worker thread with a bounded queue, deadlines and cancellation.

In:  jobs, functions of a `Cancellation` that return a result or an iterator of results.
Out: their results, or `QueueFull`, or `TimeoutError`.

A job whose client has disconnected, or whose deadline has passed, is not started; a running job
ends at its next `cancellation.check()`, which models call before each layer.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from lmhead.models import LanguageModel
from lmhead.server.request_limits import Limits

_T = TypeVar("_T")


class QueueFull(Exception):  # noqa: N818
    """Too many jobs are waiting; `seconds` says when to retry."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"too many requests are waiting; retry in {seconds} s")
        self.seconds = seconds


class Cancelled(Exception):  # noqa: N818
    """The job's client has disconnected, or its deadline has passed."""


class Cancellation:
    """Cancellation token with a deadline.

    >>> cancellation = Cancellation(seconds=60)
    >>> cancellation.check()
    >>> cancellation.cancel()
    >>> cancellation.check()
    Traceback (most recent call last):
    lmhead.server.worker.Cancelled: the request was cancelled
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._cancelled = threading.Event()
        self.renew()

    def renew(self) -> None:
        """Move the deadline: a part of the result is there, and the next one has as much time."""
        self._deadline = time.monotonic() + self._seconds

    @property
    def seconds_left(self) -> float:
        """Time until the deadline."""
        return self._deadline - time.monotonic()

    def cancel(self) -> None:
        """Cancel the job."""
        self._cancelled.set()

    def check(self) -> None:
        """Raise `Cancelled` if the job should end."""
        if self._cancelled.is_set():
            raise Cancelled("the request was cancelled")
        if time.monotonic() > self._deadline:
            raise Cancelled("the deadline has passed")


# Makes the results of a request, one after the other.
Job = Callable[[Cancellation], Iterator[_T]]


class Worker:
    """Run jobs in one thread, in turns: each running job makes one step, then the next one does.

    A job is an iterator; a new one starts without waiting for the others to finish.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._new: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._waiting: Counter[Limits] = Counter()
        self._typical = 1.0  # moving average of a job's seconds

    @property
    def waiting(self) -> int:
        """Number of jobs that run or wait."""
        return self._waiting.total()

    async def stream(
        self, job: Job[_T], *, single: bool = False, limits: Limits | None = None
    ) -> AsyncGenerator[_T, None]:
        """Yield what a job yields, as it comes; if `single`, only the first.

        `limits` replaces those of the worker for this job. Jobs of different limits are counted
        apart, so that those of one API leave room for those of another. Raises `QueueFull` if
        `limits.waiting` jobs run or wait, TimeoutError if there is no result in `limits.seconds`.
        """
        limits = limits or self.limits
        if self._waiting[limits] >= limits.waiting:
            raise QueueFull(max(1, round(self.waiting * self._typical)))
        cancellation = Cancellation(limits.seconds)
        entry = _Job(job, cancellation, asyncio.get_running_loop(), single, limits)
        with self._lock:
            self._waiting[limits] += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="lmhead-worker", daemon=True)
            self._thread.start()
        self._new.put(entry)
        try:
            while True:
                try:
                    left = max(cancellation.seconds_left, 0.0)
                    kind, value = await asyncio.wait_for(entry.results.get(), left)
                except asyncio.TimeoutError:
                    raise TimeoutError("the deadline has passed") from None
                if kind == "done":
                    return
                if kind == "error":
                    if isinstance(value, Cancelled):
                        raise TimeoutError(str(value)) from None
                    raise value
                yield value
                if single:
                    return
        finally:
            # Whatever the outcome, no more results are needed.
            cancellation.cancel()
            if not entry.started:
                self._release(entry)

    def _work(self) -> None:
        """Run in the worker's thread: take new jobs, and let each make one step."""
        running: deque[_Job] = deque()
        while True:
            while not running or not self._new.empty():
                entry = self._new.get()
                if entry is None:
                    return
                running.append(entry)
            entry = running.popleft()
            result = entry.step()
            if result[0] == "result" and not entry.single:
                running.append(entry)
            else:
                self._typical = 0.7 * self._typical + 0.3 * entry.seconds
                self._release(entry)
            entry.send(result)

    def _release(self, entry: _Job) -> None:
        """Count a job as finished, once."""
        with self._lock:
            self._waiting[entry.limits] -= not entry.released
            entry.released = True

    def close(self) -> None:
        """Accept no more jobs and drop those that wait."""
        self._new.put(None)


@dataclass(eq=False)
class _Job:
    """A job in the worker, and the queue of its results in the event loop."""

    job: Job[Any]
    cancellation: Cancellation
    loop: asyncio.AbstractEventLoop
    single: bool
    limits: Limits
    results: asyncio.Queue[tuple[str, Any]] = field(default_factory=asyncio.Queue)
    seconds: float = 0.0  # of all steps
    started: bool = False
    released: bool = False
    steps: Iterator[Any] | None = None

    def step(self) -> tuple[str, Any]:
        """Make one step; return ("result", value), ("error", exception) or ("done", None)."""
        started = time.monotonic()
        self.started = True
        try:
            self.cancellation.check()
            if self.steps is None:
                self.steps = self.job(self.cancellation)
            return "result", next(self.steps)
        except StopIteration:
            return "done", None
        except BaseException as error:
            return "error", error
        finally:
            self.seconds += time.monotonic() - started

    def send(self, result: tuple[str, Any]) -> None:
        """Pass a result to the event loop, if that still runs."""
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.results.put_nowait, result)


def layers_of(models: Iterable[LanguageModel]) -> list[nn.Module]:
    """Return the layers of models: the entries of every `nn.ModuleList`."""
    bodies = (model.body for model in models)
    lists = (
        module
        for body in bodies
        if isinstance(body, nn.Module)
        for module in body.modules()
        if isinstance(module, nn.ModuleList)
    )
    return list(dict.fromkeys(layer for each in lists for layer in each))


@contextmanager
def call_before(layers: Iterable[nn.Module], call: Callable[[], object]) -> Iterator[None]:
    """Call a function before each of these layers, within this block; it may raise.

    The layers must not be in use elsewhere meanwhile.

    >>> import torch
    >>> from lmhead.head import LMHead
    >>> from lmhead.nn import LlamaBody, LlamaConfig
    >>> body = LlamaBody(LlamaConfig(50, 16, 24, 3, 4, 2))
    >>> model = LanguageModel(body, LMHead.tied(body.embedding))
    >>> calls = []
    >>> with call_before(layers_of([model]), lambda: calls.append("layer")):
    ...     _ = model.hidden(torch.tensor([[1, 2]]))
    >>> _ = model.hidden(torch.tensor([[1, 2]]))
    >>> len(calls)
    3
    """

    def before(module: nn.Module, args: Any) -> None:  # noqa: ARG001
        call()

    hooks = [layer.register_forward_pre_hook(before) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
