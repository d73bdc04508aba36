"""No tensor crashes the core: 2,100 calls with odd ones, in processes of their own."""

import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from preloaded_python import preloaded_python
from torch._subclasses.fake_tensor import FakeTensorMode

import lmhead
from lmhead.sweep import kernels
from native.odd_tensors import freed

CALLS = 1050


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize(
    ("program", "seed"), [("odd_tensors", 0), ("odd_tensors", 1), ("binding_calls", 2)]
)
def test_odd_tensors_end_in_answers_or_exceptions(program: str, seed: int) -> None:
    done = subprocess.run(
        [preloaded_python(), "-m", f"native.{program}", str(CALLS), str(seed)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        timeout=500,
    )
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-3000:]}"
    words = done.stdout.split()
    answers, refused = (int(words[words.index(name) - 1]) for name in ("answers,", "refused"))
    assert answers > CALLS / 10, done.stdout
    assert refused > CALLS / 5, done.stdout


def test_freed_storage_is_named() -> None:
    weight = torch.randn(50, 8)
    for n in (1, 9):
        with pytest.raises(ValueError, match="weight must have memory"):
            lmhead.query(torch.randn(n, 8), freed(weight), argmax=True)
        with pytest.raises(ValueError, match="hidden must have memory"):
            lmhead.query(freed(torch.randn(n, 8)), weight, argmax=True)


def test_the_core_refuses_what_it_cannot_read(core: ModuleType) -> None:
    out = torch.empty(3, 50, dtype=torch.float64)
    hidden, weight = torch.randn(3, 8), torch.randn(50, 8)
    with pytest.raises(ValueError, match="must have memory"):
        core.row_logits(hidden, freed(weight), out, 1)
    with pytest.raises(TypeError, match="plain CPU tensors"):
        core.row_logits(torch._neg_view(hidden), weight, out, 1)
    with pytest.raises(TypeError, match="plain CPU tensors"):
        kernels.views(torch._neg_view(hidden))


@pytest.mark.parametrize("n", [1, 8, 40])
def test_a_strided_bias_is_a_bias(n: int) -> None:
    random = torch.Generator().manual_seed(n)
    hidden, weight = (torch.randn(k, 8, generator=random) for k in (n, 50))
    bias = torch.randn(50, 2, generator=random)[:, 0]
    for given in (bias, bias.contiguous()):
        found = lmhead.query(hidden, weight, bias=given, argmax=True, entropy=True)
        want = hidden @ weight.T + bias
        assert found.argmax is not None
        assert torch.equal(found.argmax, want.argmax(-1))
    targets = torch.zeros(n, dtype=torch.int64)
    loss = lmhead.linear_cross_entropy(hidden, weight, targets, bias=bias)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(want, targets))


def test_any_number_of_threads_is_taken(core: ModuleType) -> None:
    weight, out = torch.ones(5000, 16), torch.empty(2, 5000, dtype=torch.float64)
    core.row_logits(torch.ones(2, 16), weight, out, 2**31 - 1)
    assert (out == 16).all()


def test_tensors_without_dense_numbers_are_named() -> None:
    hidden, weight = torch.randn(3, 8), torch.randn(50, 8)
    for odd, message in (
        (FakeTensorMode().from_tensor(weight), "weight must hold numbers; got a FakeTensor"),
        (weight.to_sparse(), "weight must be a dense tensor; got torch.sparse_coo"),
        (weight.to_mkldnn(), "weight must be a dense tensor; got torch._mkldnn"),
    ):
        for call in (
            lambda w: lmhead.query(hidden, w, argmax=True),
            lambda w: lmhead.linear_cross_entropy(hidden, w, torch.zeros(3, dtype=torch.int64)),
        ):
            with pytest.raises(TypeError, match=message):
                call(odd)


@pytest.mark.parametrize("given", [None, 3, [[1.0]], np.ones((3, 8))])
def test_what_is_no_tensor_is_named(given: Any) -> None:
    weight = torch.randn(50, 8)
    with pytest.raises(TypeError, match="hidden must be a torch"):
        lmhead.query(given, weight, argmax=True)
    with pytest.raises(TypeError, match="weight must be a torch"):
        lmhead.query(weight[:3], given, argmax=True)
