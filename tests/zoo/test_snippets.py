"""Every snippet of the catalogue: lazy logits give the values and gradients of dense ones.

One snippet alone: `pytest tests/zoo -k trl-grpo_loss`. The truth is the dense run in float64; the
tolerance is the error of the dense run in the same dtype, plus a few roundings of the largest value
(see tests/compare.py). Building the logits is an error except for the snippets of the written list.
"""

import re
import warnings
from functools import cache

import pytest
import torch
from torch import Tensor

import zoo.snippets  # noqa: F401
from lmhead import PerformanceWarning
from zoo.agreement import agree
from zoo.allocations import largest_allocation
from zoo.catalogue import SNIPPETS, Run, Sizes, Snippet, run

SIZES = Sizes()
LARGE = Sizes(B=4, T=8, V=2099, D=4)

# Room for about three rows of logits at a time.
FEW_ROWS = 3 * 8 * SIZES.V


every_snippet = pytest.mark.parametrize("name", sorted(SNIPPETS))
with_two_models = pytest.mark.parametrize("name", [n for n, s in sorted(SNIPPETS.items()) if s.two])


def expect(entry: Snippet) -> None:
    """Within `catch_warnings`: let a listed snippet build the logits."""
    if entry.builds is not None:
        warnings.simplefilter("ignore", PerformanceWarning)


@cache
def dense(name: str, dtype: torch.dtype) -> Run:
    """The run that several tests compare with; test_dense_against_dense repeats it."""
    return run(SNIPPETS[name], SIZES, dtype, lazy=False)


@every_snippet
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    entry = SNIPPETS[name]
    with warnings.catch_warnings():
        expect(entry)
        ours = run(entry, SIZES, dtype, lazy=True)
    agree(ours, dense(name, dtype), dense(name, torch.float64), dtype)


@every_snippet
def test_a_few_rows_at_a_time(name: str) -> None:
    """`max_bytes` holds three rows: the chunks must fit together."""
    entry = SNIPPETS[name]
    plain = dense(name, torch.float64)
    with warnings.catch_warnings():
        expect(entry)
        ours = run(entry, SIZES, torch.float64, lazy=True, max_bytes=FEW_ROWS)
    agree(ours, plain, plain, torch.float64)


@with_two_models
@pytest.mark.parametrize("first", [True, False], ids=["lazy-dense", "dense-lazy"])
def test_one_model_is_dense(name: str, first: bool) -> None:
    """A teacher that is an `nn.Linear` beside a student that is an `LMHead`, and the reverse."""
    entry = SNIPPETS[name]
    plain = dense(name, torch.float64)
    with warnings.catch_warnings():
        expect(entry)
        if not first and name == "in_place-add_other_model":
            warnings.simplefilter("ignore", PerformanceWarning)  # written into a tensor as large
        ours = run(entry, SIZES, torch.float64, lazy=first, other_lazy=not first)
    agree(ours, plain, plain, torch.float64)


@pytest.mark.parametrize(
    "name", [n for n, s in sorted(SNIPPETS.items()) if s.builds is None and s.large is None]
)
def test_the_logits_are_never_in_memory(name: str) -> None:
    """No operation, forward or backward, allocates half as many bytes as the logits take."""
    entry = SNIPPETS[name]
    limit = 4 * LARGE.B * LARGE.T * LARGE.V // 2
    largest = largest_allocation(entry, LARGE, max_bytes=limit // 2)
    assert largest.nbytes < limit, f"{largest.operation} allocated {largest.shape}"


@every_snippet
def test_dense_against_dense(name: str) -> None:
    """The runner and the snippet: two dense runs agree, no result is empty or without gradient."""
    entry = SNIPPETS[name]
    truth, plain = dense(name, torch.float64), dense(name, torch.float32)
    again = run(entry, SIZES, torch.float64, lazy=False)
    assert all(type(r) is Tensor and r.numel() for r in plain.results)
    agree(again, truth, truth, torch.float64)
    agree(plain, plain, truth, torch.float32)
    assert bool(truth.gradients) == entry.grad or all(not r.requires_grad for r in truth.results)


def test_there_are_enough() -> None:
    assert len(SNIPPETS) >= 120
    assert sum(s.grad for s in SNIPPETS.values()) >= 90
    builds = [s for s in SNIPPETS.values() if s.builds]
    assert len(builds) <= 12, "the list of snippets that may build the logits must stay short"
    assert all(re.search(r"\w+ \w+", s.builds or "") for s in builds), "each with its reason"
