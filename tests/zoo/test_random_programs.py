"""Random programs of recorded operations, views, masks, writes and reductions: dense against lazy.

At least 2,000 programs a run. A failure prints the smallest program that Hypothesis finds; paste
its lines after making z and y to reproduce it. The tolerance is what a nudge of the inputs by one
part in 10^13 changes, times 100, plus a few roundings.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from torch import Tensor

from lmhead import PerformanceWarning
from zoo.catalogue import materialized
from zoo.programs import Environment, Program, programs

PROGRAMS = 2000


class StaleError(Exception):
    """The lazy run raised where memory is shared with a view: allowed."""


def run(
    program: Program, *, lazy: bool, grad: bool, nudge: float = 0.0
) -> tuple[list[Any], dict[str, Tensor]]:
    """Outputs and gradients."""
    with warnings.catch_warnings(), torch.set_grad_enabled(grad):
        environment = Environment(
            program.shape,
            program.vocab,
            lazy=lazy,
            max_bytes=program.max_bytes,
            softcap=program.softcap,
            nudge=nudge,
        )
        if program.aliased:
            warnings.simplefilter("ignore", PerformanceWarning)
        try:
            for line in program.lines:
                environment.run(line)
        except RuntimeError as error:
            note(f"{error!r} in {line!r}")
            if lazy and program.aliased:
                raise StaleError from error
            raise
        outputs = [materialized(o) for o in environment.outputs]
        return outputs, gradients(outputs, environment.leaves)


def gradients(outputs: list[Any], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    upstream = [torch.randn(o.shape, generator=random, dtype=torch.float64) for o in outputs]
    kept = [(o, u) for o, u in zip(outputs, upstream, strict=True) if o.requires_grad]
    if not kept:
        return {}
    found = torch.autograd.grad(
        [o for o, _ in kept], list(leaves.values()), [u for _, u in kept], allow_unused=True
    )
    return {
        name: torch.zeros_like(leaf) if g is None else g
        for (name, leaf), g in zip(leaves.items(), found, strict=True)
    }


def same(ours: Tensor, theirs: Tensor, nudged: Tensor, what: str) -> None:
    """Equal where the dense number is not NaN."""
    assert ours.shape == theirs.shape, what
    assert ours.dtype == theirs.dtype, what
    a, e, n = (t.detach().double() for t in (ours, theirs, nudged))
    infinite = e.isinf()
    assert torch.equal(a[infinite], e[infinite]), f"{what}: infinite numbers differ"
    finite = e.isfinite()
    moved = (n - e)[finite & n.isfinite()].abs()
    size = e[finite].abs()
    scale = max(1.0, float(size.max()) if size.numel() else 0.0)
    allowed = 1e-11 * scale + 100 * (float(moved.max()) if moved.numel() else 0.0)
    off = (a - e)[finite].abs()
    assert bool((off <= allowed).all()), (
        f"{what} is off by {float(off.max()):.3g}, allowed {allowed:.3g}\n"
        f"ours {ours}\ndense {theirs}"
    )


@settings(
    max_examples=PROGRAMS,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(program=programs())
@pytest.mark.timeout(1800)
def test_random_programs(program: Program) -> None:
    note(str(program))
    grad = True
    try:
        theirs, their_gradients = run(program, lazy=False, grad=grad)
    except RuntimeError:
        grad = False  # a write into what autograd saved for backward: compare the values
        theirs, their_gradients = run(program, lazy=False, grad=grad)
    nudged, nudged_gradients = run(program, lazy=False, grad=grad, nudge=1e-13)
    try:
        ours, our_gradients = run(program, lazy=True, grad=grad)
    except StaleError:
        return
    assert len(ours) == len(theirs)
    for k, (a, e, n) in enumerate(zip(ours, theirs, nudged, strict=True)):
        same(a, e, n, f"output {k}")
        assert a.requires_grad == e.requires_grad, f"requires_grad of output {k}"
    for name, gradient in their_gradients.items():
        if all(bool(g.isfinite().all()) for g in their_gradients.values()):
            same(our_gradients[name], gradient, nudged_gradients[name], f"gradient of {name}")
