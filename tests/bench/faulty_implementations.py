"""Implementations with faults that a benchmark must detect. Loaded by fresh processes too."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import count

import torch

from benchmarks import loss, sample
from benchmarks.inputs import Inputs
from benchmarks.task import Implementation, Results, Step, UnavailableError, by_name

MIB = 2**20
CORRECT = loss.TASK.implementations["eager"]


def a_wrong_gradient(inputs: Inputs) -> Step:
    step = CORRECT.prepare(inputs)

    def wrong() -> Results:
        results = step()
        return {**results, "weight_grad": results["weight_grad"] * 1.01}

    return wrong


def right_once(inputs: Inputs) -> Step:
    """Return a step that is right when it is checked, wrong when it is timed."""
    step, calls = CORRECT.prepare(inputs), count()

    def changing() -> Results:
        results = step()
        return (
            results if next(calls) == 0 else {**results, "hidden_grad": results["hidden_grad"] * 0}
        )

    return changing


def missing(inputs: Inputs) -> Step:  # noqa: ARG001
    raise UnavailableError("not installed")


def crashing(inputs: Inputs) -> Step:  # noqa: ARG001
    return lambda: os._exit(7)


def failing(inputs: Inputs) -> Step:
    """Return a step that works when it is checked and fails when it is timed."""
    step, calls = CORRECT.prepare(inputs), count()
    return lambda: step() if next(calls) == 0 else {"loss": torch.ones(2) @ torch.ones(3)}


def allocating(inputs: Inputs) -> Step:  # noqa: ARG001
    """Return a step with 96 MiB of temporary memory and 32 MiB of results, which also prints."""

    def allocate() -> Results:
        print("a line that is not the growth")
        freed = torch.ones(64 * MIB // 4)
        del freed
        temporary = torch.ones(96 * MIB // 4)
        return {"loss": torch.full((32 * MIB // 4,), float(temporary[0]))}

    return allocate


TASK = replace(
    loss.TASK,
    module=__name__,
    implementations=by_name(
        CORRECT,
        Implementation("wrong", "a wrong gradient", a_wrong_gradient),
        Implementation("once", "right once", right_once),
        Implementation("missing", "missing", missing),
        Implementation("crashing", "crashing", crashing),
        Implementation("failing", "failing", failing),
        Implementation("ours", "ours, failing", failing, ours=True),
        Implementation("allocating", "allocating", allocating),
        loss.TASK.implementations["product"],
    ),
    baselines=("eager",),
)


# The peer's processor is another one.
CASES = (replace(sample.CASES[0], processor="MinPLogitsWarper"),)
