"""The processes ("ranks") of a command: those that `torchrun` started, or a single one.

Work that is done once, such as reading arguments and writing files, runs on rank 0: see
`Ranks.on_first`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

# Timeout of collectives: ranks wait while rank 0 reads or writes files. A lost rank is noticed at
# once: its connections are closed.
_TIMEOUT = timedelta(hours=24)

_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # set by torchrun

T = TypeVar("T")


class LostRankError(RuntimeError):
    """Another process of the run has ended."""


class Ranks:
    """The ranks of this run: `rank`, the number of this process, of `size` processes."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 only; every rank gets its result or raises its error."""
        if self.size == 1:
            return work()
        outcome: list[Any] = [None, None]
        if self.first:
            try:
                outcome[0] = work()
            except Exception as error:  # sent to the other ranks
                outcome[1] = error
        with self.communication():
            dist.broadcast_object_list(outcome)
        result, problem = outcome
        if problem is not None:
            raise problem
        return result  # type: ignore[no-any-return]

    def first_then_others(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, and if it succeeds, on the others."""
        done: list[T] = []
        self.on_first(lambda: done.append(work()))
        return done[0] if self.first else work()

    def gather_numbers(self, number: float) -> list[float]:
        """Return the numbers of all ranks, in their order."""
        if self.size == 1:
            return [number]
        numbers = [torch.zeros((), dtype=torch.float64) for _ in range(self.size)]
        with self.communication():
            dist.all_gather(numbers, torch.tensor(number, dtype=torch.float64))
        return [tensor.item() for tensor in numbers]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order; slower than `gather_numbers`."""
        values = [value] * self.size
        if self.size > 1:
            with self.communication():
                dist.all_gather_object(values, value)
        return values

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace the gradients by their sum over all ranks."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.size == 1 or not gradients:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        with self.communication():
            dist.all_reduce(flat)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, total in zip(gradients, torch.split(flat, sizes), strict=True):
            gradient.copy_(total.view_as(gradient))

    def seed_step(self, seed: int, step: int) -> None:
        """Seed dropout by step and rank; a single process keeps its random state."""
        if self.size > 1:
            state = np.random.SeedSequence([seed, step, self.rank]).generate_state(1, np.uint64)
            torch.manual_seed(int(state[0]))

    @contextmanager
    def communication(self) -> Iterator[None]:
        """Turn the errors of a lost connection into a `LostRankError`."""
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise LostRankError(
                f"rank {self.rank} lost the connection to another rank: "
                f"{str(error).splitlines()[0]}"
            ) from error


@contextmanager
def all_ranks() -> Iterator[Ranks]:
    """Join the processes that torchrun started; a single rank without it."""
    if dist.is_available() and dist.is_initialized():  # by the caller, who ends it as well
        yield Ranks(dist.get_rank(), dist.get_world_size())
    elif os.environ.keys() >= _VARIABLES and int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
        try:
            yield Ranks(dist.get_rank(), dist.get_world_size())
        finally:
            dist.destroy_process_group()
    else:
        yield Ranks()
