"""Threads and instruction sets: which of them serve must not show in the results."""

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from compare import assert_close
from torch import Tensor

from lmhead.sweep import kernels
from native.test_twins import absorb, logits_and_lse
from native.tiles import MAPS, problem


@pytest.fixture
def threads() -> Iterator[None]:
    """Lets a test set the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def instruction_sets(core: ModuleType) -> Iterator[list[str]]:
    """Lets a test choose among them."""
    best = core.instruction_set()
    yield core.instruction_sets()
    core.use(best)


def everything(pointwise: str) -> dict[str, Tensor]:
    """One result of every kernel, from tiles that do not depend on the number of threads."""
    p = problem(700, 300, MAPS[pointwise])
    z, lse = logits_and_lse(p)
    results = {"z": z.clone()}
    running, (top, rank) = p.start(), p.watchers()
    tile = torch.randn(700, 300, generator=torch.Generator().manual_seed(1)) * 3
    scratch = torch.empty_like(tile), torch.empty_like(tile)
    kernels.update_answers_(tile, 0, None, p.source.pointwise, running, scratch, top, rank)
    results |= {"logits": tile, "m": running.m, "s": running.s, "values": top.values}
    assert running.t is not None
    results["t"] = running.t
    # Of the counts, what the tile could not decide depends on the weight, which is another one.
    results["counts"] = rank.counts
    numbers = torch.randn(2, 300, generator=torch.Generator().manual_seed(2))
    results["gradient"] = kernels.gradient_(
        z.clone(), lse, kernels.Coefficients(*numbers), p.source.pointwise, scratch=scratch
    )
    columns, rows = torch.zeros(700), torch.zeros(300)
    results["part"] = kernels.softmax_gradient_(
        z.clone(), lse, numbers[0], p.source.pointwise, columns, rows, scratch
    )
    results |= {"columns": columns, "rows": rows}
    pairs = torch.randint(300, (500,), generator=torch.Generator().manual_seed(3))
    hidden, weight = p.source.hiddens[0], p.source.weights[0]
    results["products"] = kernels.pair_products(hidden, weight, pairs, pairs, 2**20)
    into = weight.clone()
    kernels.scatter_add_(into, torch.randperm(700)[:0], hidden[:0])
    kernels.scatter_add_(into, torch.arange(699, 399, -1), hidden)
    return results | {"sums": into}


@pytest.mark.usefixtures("core", "threads")
@pytest.mark.parametrize("pointwise", ["identity", "softcap"])
def test_threads_do_not_change_a_bit(pointwise: str) -> None:
    torch.set_num_threads(1)
    one = everything(pointwise)
    for number in (2, 3):
        torch.set_num_threads(number)
        for name, result in everything(pointwise).items():
            if name != "z":
                assert torch.equal(result, one[name]), f"{name} with {number} threads"


@pytest.mark.parametrize("pointwise", ["identity", "softcap"])
def test_instruction_sets_agree(
    core: ModuleType, instruction_sets: list[str], pointwise: str
) -> None:
    assert core.instruction_set() == instruction_sets[0], "the best is chosen"
    best = everything(pointwise)
    for name in instruction_sets[1:]:
        core.use(name)
        assert core.instruction_set() == name
        for what, result in everything(pointwise).items():
            scale = float(best[what].double().abs().nan_to_num(posinf=0.0).max())
            assert_close(result, best[what], rtol=2e-6, atol=1e-6 * scale, what=f"{name}: {what}")


def test_answers_do_not_depend_on_the_instruction_set(
    core: ModuleType, instruction_sets: list[str]
) -> None:
    p = problem(300, 33, MAPS["softcap"], ties=True)
    best = absorb(p)
    for name in instruction_sets:
        core.use(name)
        found = absorb(p)
        assert torch.equal(found.top_ids, best.top_ids)
        assert torch.equal(found.ranks, best.ranks)


def test_an_unknown_instruction_set_is_refused(core: ModuleType) -> None:
    before = core.instruction_set()
    with pytest.raises(ValueError, match="cannot run the kernels for abacus"):
        core.use("abacus")
    assert core.instruction_set() == before


def test_the_baseline_is_always_there(instruction_sets: list[str]) -> None:
    assert instruction_sets[-1] == "baseline"


COUNT = """
import os, torch
from lmhead.sweep import kernels
torch.set_num_threads(3)
core, tile = kernels.core, torch.randn(2000, 600)
matrix = torch.randn(500, 500)
def work():
    matrix @ matrix
    core.softmax(tile.clone(), None, (1.0, 0.0, False, 1.0, 0.0), torch.zeros(600),
                 torch.zeros(600, dtype=torch.float64), None, 0, *[None] * 8, kernels.threads())
    torch.randn(2000, 600).exp_()
(tile * 2).exp_()
before = len(os.listdir("/proc/self/task"))
for _ in range(5):
    work()
print(core.thread_runtime(), before, len(os.listdir("/proc/self/task")), sep=";")
"""


@pytest.mark.usefixtures("core")
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_torch_and_the_core_share_their_threads() -> None:
    run = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    runtime, before, after = run.stdout.strip().split(";")
    assert runtime == "torch's OpenMP"
    assert int(after) == int(before), "the core has started threads of its own"
