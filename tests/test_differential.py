"""The reference in long double, and the comparison of `scripts.reliability.differential`."""

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from scripts.reliability import differential, long_double
from scripts.reliability.long_double import LongDouble

PROGRAMS: dict[str, Callable[[Any], Any]] = {
    **{f"step {i}": step for i, step in enumerate(differential.STEPS)},
    **{f"end {i}": end for i, end in enumerate(differential.ENDS)},
    "masked": lambda z: z.masked_fill(torch.eye(4, 7, dtype=torch.bool), 2.0) * z,
    "gather": lambda z: z.gather(-1, torch.tensor([[3], [0], [6], [1]])).squeeze(-1) / 3,
    "logaddexp": lambda z: z.logaddexp(z * 0.5) - z.tanh(),
    "row terms": lambda z: z.softmax(-1) / z.logsumexp(-1, keepdim=True) - z,
    "number of a row": lambda z: -(z * torch.arange(7.0)) + torch.ones(4, 1),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_values_and_gradients_are_those_of_torch(program: Callable[[Any], Any]) -> None:
    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 5, generator=made, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 5, generator=made, dtype=torch.float64, requires_grad=True)
    value = program(hidden @ weight.T)
    want = [value, *torch.autograd.grad((value * value).sum(), [hidden, weight])]
    leaves = [LongDouble(hidden), LongDouble(weight)]
    ours = program(leaves[0] @ leaves[1].T)
    got = [ours.value, *long_double.gradients([ours * ours], leaves)]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(
            a.astype(np.float64), b.detach().numpy(), rtol=1e-12, atol=1e-13, strict=True
        )


def test_more_precise_than_float64() -> None:
    given = [1.0, 1e-10, -1.0, 3e-11]
    exact = sum(map(Fraction, given))
    found = (LongDouble([given]) @ LongDouble([[1.0]] * 4)).value[0, 0]
    assert abs(Fraction(*found.as_integer_ratio()) - exact) < Fraction(1, 2**62)
    assert abs(Fraction(sum(given)) - exact) > Fraction(1, 2**58)


def cases(dtype: torch.dtype, kind: str) -> tuple[Any, Any, Any]:
    """Draw a problem of a dtype with several rows and tokens."""
    for seed in range(1000):
        problem = differential.Problem(random.Random(seed))
        if problem.dtype == dtype and problem.rows > 2 and problem.vocab > 30:
            return problem, *differential.CASES[kind](problem)
    raise AssertionError("no seed gives such a problem")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", differential.CASES)
def test_a_planted_error_is_found(dtype: torch.dtype, kind: str) -> None:
    problem, ours, plain = cases(dtype, kind)
    assert differential.beyond(problem, ours, plain) is None
    for name, value in ours.items():
        changed = value.clone()
        flat = changed.view(-1)
        if changed.is_floating_point():
            flat[-1] += 4000 * differential.STORED[dtype] * (1 + float(changed.abs().max()))
        else:
            flat[-1] = (flat[-1] + 1) % problem.vocab
        found = differential.beyond(problem, ours | {name: changed}, plain)
        assert found is not None
        assert found.startswith(name)
        flat.copy_(value.reshape(-1))
        if changed.is_floating_point():
            flat[0] = torch.nan
            assert differential.beyond(problem, ours | {name: changed}, plain) is not None


def test_every_input_is_nudged() -> None:
    """By one rounding of its dtype, which must not be lost in a product of lower precision."""
    problem, _, _ = cases(torch.float64, "loss")
    before = differential.leaves_of(problem, LongDouble)
    problem.nudge = 2.0**-53
    for name, after in differential.leaves_of(problem, LongDouble).items():
        change = np.abs(after.value / before[name].value - 1)
        np.testing.assert_allclose(change.astype(np.float64), 2.0**-53, rtol=1e-2)
