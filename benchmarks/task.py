"""A task (loss, query) and its implementations.

An implementation imports its library when it is prepared: a missing library skips this
implementation only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from benchmarks.inputs import Inputs

Results = dict[str, Tensor]
# The timed call, from hidden states to results.
Step = Callable[[], Results]
Prepare = Callable[[Inputs], Step]


class UnavailableError(Exception):
    """An implementation cannot run here; the message says what is missing."""


@dataclass(frozen=True)
class Implementation:
    """One way to do a task.

    Attributes:
        name: on the command line.
        label: in tables, e.g. the call that a user would write.
        prepare: takes the inputs, returns the step that is timed.
        package: whose version is reported, if it is neither torch nor lmhead.
        tolerance: of its results, where it differs from the task's.
        work: number of matrix products, where it differs from the task's.
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
    """A task and all its implementations.

    Attributes:
        name: "loss" or "query".
        title: what is computed.
        module: where a fresh process finds the task: `module`.TASK.
        implementations: by name, in the order of the table.
        products: number of N x V x D matrix products of the exact task.
        baselines: names of the implementations that times are divided by.
        tolerance: largest error of a result against float64 by dtype of the inputs: relative
            Frobenius error of numbers, fraction of the positions for ids.
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

    def pick(self, names: tuple[str, ...] = (), option: str = "only") -> list[Implementation]:
        """Return the named implementations in the order of the table; all if none is named."""
        unknown = [name for name in names if name not in self.implementations]
        if unknown:
            known = ", ".join(self.implementations)
            raise ValueError(f"{option} must name some of {known}; got {unknown[0]!r}")
        return [i for i in self.implementations.values() if not names or i.name in names]

    def ours(self) -> list[Implementation]:
        """Return lmhead's implementations."""
        return [i for i in self.implementations.values() if i.ours]

    def prepare(self, name: str, inputs: Path, max_bytes: int | None) -> Step:
        """Return the step of an implementation on inputs from a file."""
        loaded = replace(Inputs.load(inputs), max_bytes=max_bytes)
        return self.implementations[name].prepare(loaded)

    def too_far(self, name: str, dtype: str, errors: Mapping[str, float]) -> list[str]:
        """Return the results whose error is above the tolerance, or not a number."""
        allowed = {**self.tolerance[dtype], **self.implementations[name].tolerance}
        return [result for result, error in errors.items() if not error <= allowed[result]]


def by_name(*implementations: Implementation) -> dict[str, Implementation]:
    """Return a dictionary in the given order."""
    return {implementation.name: implementation for implementation in implementations}
