"""One worker: one job at a time, a bounded queue, deadlines, and abandoned jobs."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, TypeVar

import pytest

from lmhead.server.request_limits import Limits
from lmhead.server.worker import Cancellation, Cancelled, QueueFull, Worker
from server.serve_tiny import finish

T = TypeVar("T")


async def run(worker: Worker, job: Callable[[Cancellation], T]) -> T:
    """Return the result of a job of one step."""
    async with aclosing(worker.stream(lambda c: iter([job(c)]), single=True)) as results:
        return await anext(results)


def test_jobs_run_one_after_another() -> None:
    running, most = 0, 0

    def job(_: Cancellation) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.005)
        running -= 1
        return 7

    async def main() -> list[int]:
        worker = Worker(Limits(waiting=5))
        return await asyncio.gather(*(run(worker, job) for _ in range(5)))

    assert finish(main()) == [7] * 5
    assert most == 1


def test_a_full_queue_says_when_to_retry() -> None:
    release = threading.Event()

    async def main() -> None:
        worker = Worker(Limits(waiting=2))
        tasks = [asyncio.ensure_future(run(worker, lambda _: release.wait(5))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as busy:
            await run(worker, lambda _: True)
        assert busy.value.seconds >= 1
        release.set()
        assert all(await asyncio.gather(*tasks))
        await asyncio.sleep(0.01)
        assert worker.waiting == 0
        assert await run(worker, lambda _: 3) == 3

    finish(main())


def test_jobs_of_other_limits_have_their_own_queue() -> None:
    """Requests to one API leave room for those to the other, which has the same worker."""
    release = threading.Event()

    async def main() -> None:
        worker, many = Worker(Limits(waiting=1)), Limits(waiting=2, seconds=5)

        async def run(job: Any, limits: Limits | None = None) -> Any:
            async with aclosing(
                worker.stream(lambda c: iter([job(c)]), single=True, limits=limits)
            ) as results:
                return await anext(results)

        tasks = [asyncio.ensure_future(run(lambda _: release.wait(5), many)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await run(lambda _: True, many)
        tasks.append(asyncio.ensure_future(run(lambda _: 1)))
        await asyncio.sleep(0)
        assert worker.waiting == 3
        with pytest.raises(QueueFull):
            await run(lambda _: True)
        release.set()
        assert all(await asyncio.gather(*tasks))

    finish(main())


def test_a_job_that_takes_too_long_is_cancelled() -> None:
    cancelled = threading.Event()

    def job(cancellation: Cancellation) -> None:
        try:
            while True:
                cancellation.check()
                time.sleep(0.001)
        except Cancelled:
            cancelled.set()
            raise

    async def main() -> None:
        worker = Worker(Limits(seconds=0.05))
        with pytest.raises(TimeoutError):
            await run(worker, job)
        assert await asyncio.to_thread(cancelled.wait, 2)
        await asyncio.sleep(0.01)
        assert worker.waiting == 0

    finish(main())


def test_a_waiting_job_whose_asker_left_is_never_begun() -> None:
    release, began = threading.Event(), threading.Event()

    async def main() -> None:
        worker = Worker(Limits())
        first = asyncio.ensure_future(run(worker, lambda _: release.wait(5)))
        second = asyncio.ensure_future(run(worker, lambda _: began.set()))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.sleep(0.01)
        assert worker.waiting == 1
        release.set()
        await first
        assert await run(worker, lambda _: 1) == 1

    finish(main())
    assert not began.is_set()


def test_an_error_of_a_job_arrives_and_the_worker_goes_on() -> None:
    def job(_: Cancellation) -> None:
        raise KeyError("x")

    async def main() -> None:
        worker = Worker(Limits())
        with pytest.raises(KeyError):
            await run(worker, job)
        assert await run(worker, lambda _: 1) == 1

    finish(main())
