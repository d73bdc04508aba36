"""One worker: a model answers one question at a time, and a few may wait.

In:  jobs, plain functions of a `Ticket`. Out: their results, or `Busy`, or `TimeoutError`.

A job whose asker has left, or whose time is up, is not begun; one that runs is told by its ticket,
and ends at its next `ticket.check()`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import anyio

from lmhead.server.limits import Limits

__all__ = ["Busy", "Gone", "Ticket", "Worker"]

_T = TypeVar("_T")


class Busy(Exception):  # noqa: N818
    """Too many wait; `seconds` says when to ask again."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"too many requests wait; try again in {seconds} s")
        self.seconds = seconds


class Gone(Exception):  # noqa: N818
    """Nobody waits for this job any more."""


class Ticket:
    """A job's leave to go on.

    >>> ticket = Ticket(seconds=60)
    >>> ticket.check()
    >>> ticket.cancel()
    >>> ticket.check()
    Traceback (most recent call last):
    lmhead.server.work.Gone: nobody waits for the answer
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """The asker has left."""
        self._cancelled.set()

    def check(self) -> None:
        """Raise `Gone` if there is no use in going on."""
        if self._cancelled.is_set():
            raise Gone("nobody waits for the answer")
        if time.monotonic() > self._end:
            raise Gone("the time is up")


class Worker:
    """Runs jobs one after another, in a thread of its own."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lmhead-worker")
        self._waiting = 0  # touched by the event loop alone
        self._typical = 1.0  # seconds of a job, lately

    @property
    def waiting(self) -> int:
        """How many jobs run or wait."""
        return self._waiting

    async def run(self, job: Callable[[Ticket], _T]) -> _T:
        """The job's result.

        Raises:
            Busy: `limits.waiting` jobs are here already.
            TimeoutError: the answer was not there in `limits.seconds`.
        """
        if self._waiting >= self.limits.waiting:
            raise Busy(max(1, round(self._waiting * self._typical)))
        ticket = Ticket(self.limits.seconds)
        done = self._pool.submit(self._begin, job, ticket)
        self._waiting += 1
        loop = asyncio.get_running_loop()
        done.add_done_callback(lambda _: _in_loop(loop, self._finished))
        try:
            with anyio.fail_after(self.limits.seconds):
                return await asyncio.wrap_future(done)
        except Gone as gone:
            raise TimeoutError(str(gone)) from None
        finally:
            # However it ends: who no longer waits needs no answer.
            ticket.cancel()
            done.cancel()

    def _begin(self, job: Callable[[Ticket], _T], ticket: Ticket) -> _T:
        ticket.check()
        began = time.monotonic()
        try:
            return job(ticket)
        finally:
            self._typical = 0.7 * self._typical + 0.3 * (time.monotonic() - began)

    def _finished(self) -> None:
        self._waiting -= 1

    def close(self) -> None:
        """No more jobs; what waits is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
