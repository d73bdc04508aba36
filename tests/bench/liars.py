"""A task with implementations that a benchmark must see through. Loaded by worker processes."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from lmhead.bench import losses, samples
from lmhead.bench.task import Implementation, UnavailableError, by_name

if TYPE_CHECKING:
    from lmhead.bench.data import Inputs
    from lmhead.bench.task import Results, Step

MIB = 2**20
HONEST = losses.TASK.implementations["eager"]


def a_wrong_gradient(inputs: Inputs) -> Step:
    step = HONEST.prepare(inputs)

    def lie() -> Results:
        results = step()
        return {**results, "weight_grad": results["weight_grad"] * 1.01}

    return lie


def right_once(inputs: Inputs) -> Step:
    """Right when it is checked, wrong when it is timed."""
    step, calls = HONEST.prepare(inputs), count()

    def lie() -> Results:
        results = step()
        return (
            results if next(calls) == 0 else {**results, "hidden_grad": results["hidden_grad"] * 0}
        )

    return lie


def missing(inputs: Inputs) -> Step:  # noqa: ARG001
    raise UnavailableError("nobody has it")


def crashing(inputs: Inputs) -> Step:  # noqa: ARG001
    return lambda: os._exit(7)


def talking(inputs: Inputs) -> Step:
    """What a library prints must not be taken for an answer."""
    step = HONEST.prepare(inputs)

    def talk() -> Results:
        print("a word on standard output")
        os.system("echo and one from a child")
        return step()

    return talk


def hungry(inputs: Inputs) -> Step:  # noqa: ARG001
    """Takes 96 MiB for a moment and returns 32 of them."""
    import torch

    def eat() -> Results:
        freed = torch.ones(64 * MIB // 4)
        del freed
        temporary = torch.ones(96 * MIB // 4)
        return {"loss": torch.full((32 * MIB // 4,), float(temporary[0]))}

    return eat


TASK = replace(
    losses.TASK,
    module=__name__,
    implementations=by_name(
        HONEST,
        Implementation("wrong", "a wrong gradient", a_wrong_gradient),
        Implementation("once", "right once", right_once),
        Implementation("missing", "missing", missing),
        Implementation("crashing", "crashing", crashing),
        Implementation("ours", "ours, crashing", crashing, ours=True),
        Implementation("talking", "talking", talking),
        Implementation("hungry", "hungry", hungry),
        losses.TASK.implementations["product"],
    ),
    baselines=("eager",),
)


# A sampler that claims to do what it does not.
CASES = (replace(samples.CASES[0], options={"temperature": 0.8, "top_p": 0.5}),)
