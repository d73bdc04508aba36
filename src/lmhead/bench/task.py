"""What is compared: a task, and the implementations of it.

An implementation imports its library when it is prepared, in its own process: a library that is
missing skips this implementation and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from lmhead.bench.data import Inputs

    Results = dict[str, Tensor]
    # What is timed: one call from hidden states to results.
    Step = Callable[[], Results]
    Prepare = Callable[[Inputs], Step]


class UnavailableError(Exception):
    """An implementation cannot run here; the message says what is missing."""


@dataclass(frozen=True)
class Implementation:
    """One way to do a task.

    Attributes:
        name: for the command line.
        label: for tables, e.g. the call that a user would write.
        prepare: takes the inputs, returns the step that is timed.
        package: whose version stands beside its results, if it is neither torch's nor ours.
        tolerance: of its results, where it differs from the task's.
        work: products it counts for, where it differs from the task's.
        ours: whether it is lmhead's.
    """

    name: str
    label: str
    prepare: Prepare
    package: str | None = None
    tolerance: Mapping[str, float] = field(default_factory=dict)
    work: int | None = None
    ours: bool = False


@dataclass(frozen=True)
class Task:
    """A task, and everybody who does it.

    Attributes:
        name: "loss" or "query".
        title: what is computed, in words.
        module: where a worker process finds the task: `module`.TASK.
        implementations: by name, in the order of the table.
        products: N x V x D matrix products of the exact task.
        baselines: whom the others' times are divided by.
        tolerance: largest error of a result against float64 by type of the inputs: relative
            Frobenius error of numbers, share of the tokens for ids.
        headings: of the results, in tables.
    """

    name: str
    title: str
    module: str
    implementations: Mapping[str, Implementation]
    products: int
    baselines: tuple[str, ...]
    tolerance: Mapping[str, Mapping[str, float]]
    headings: Mapping[str, str]

    def pick(self, names: tuple[str, ...], option: str = "only") -> list[Implementation]:
        """The named ones in the order of the table; all if none is named."""
        unknown = [name for name in names if name not in self.implementations]
        if unknown:
            known = ", ".join(self.implementations)
            raise ValueError(f"{option} must name some of {known}; got {unknown[0]!r}")
        return [i for i in self.implementations.values() if not names or i.name in names]

    def too_far(self, name: str, dtype: str, errors: Mapping[str, float]) -> list[str]:
        """The results whose error is above the tolerance, or not a number."""
        allowed = {**self.tolerance[dtype], **self.implementations[name].tolerance}
        return [result for result, error in errors.items() if not error <= allowed[result]]


def by_name(*implementations: Implementation) -> dict[str, Implementation]:
    """A dictionary in the given order."""
    return {implementation.name: implementation for implementation in implementations}
