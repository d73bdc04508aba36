"""Decisions are the same, bit for bit, on every instruction set that this machine has."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lmhead import LMHead, Sampler
from lmhead.screen import ScreenedHead, screen_kernels
from lmhead.screen.build_copy import build
from lmhead.screen.states import States
from lmhead.sweep import kernels
from screen import heads


@pytest.fixture
def core(served_by: str) -> Iterator[ModuleType]:
    if kernels.core is None or served_by == "torch":
        pytest.skip("this is about the compiled core")
    before = kernels.core.instruction_set(), kernels.core.streams(), kernels.core.prefetch()
    yield kernels.core
    kernels.core.use(before[0])
    kernels.core.set_streams(*before[1])
    kernels.core.set_prefetch(*before[2])


@pytest.mark.parametrize("bits", [8, "4+4"])
def test_files_of_decisions_are_equal(core: ModuleType, tmp_path: Path, bits: Any) -> None:
    for name in core.instruction_sets():
        core.use(name)
        torch.save(_decisions(bits), tmp_path / f"{name}.pt")
    first, *others = (torch.load(tmp_path / f"{name}.pt") for name in core.instruction_sets())
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert torch.equal(mine, theirs)


def _decisions(bits: Any) -> list[torch.Tensor]:
    """Return tokens and scores of one hidden state and of batches; rows of equal scores too."""
    found = []
    sampler = Sampler(temperature=0.9, top_p=0.9, seed=3)
    for make, vocab, size in ((heads.outlier_columns, 1500, 200), (heads.plain, 700, 96)):
        random = torch.Generator().manual_seed(vocab)
        weight = make(vocab, size, random)
        weight[vocab // 2 : vocab // 2 + 20] = weight[:20]  # ties
        head = LMHead(size, vocab)
        head.weight = torch.nn.Parameter(weight, requires_grad=False)
        screen = ScreenedHead(head, bits=bits)
        hidden = heads.states(7, weight, random).float()
        for some in (hidden[:1], hidden[1:3], hidden):
            best = screen.topk(some, 5)
            found += [screen.argmax(some).token, best.indices, best.values]
            found.append(screen.sample(some, sampler).token)
    return found


@pytest.mark.parametrize("bits", [8, "4+4"])
@pytest.mark.parametrize("vocab", [1, 255, 259, 700])
def test_streams_and_prefetch_change_nothing(core: ModuleType, bits: Any, vocab: int) -> None:
    random = torch.Generator().manual_seed(vocab)
    weight = heads.plain(vocab, 200, random)
    copy = build(weight, bits=bits)
    states = States.of(copy, heads.states(1, weight, random))
    for name in core.instruction_sets():
        core.use(name)
        found = []
        for streams, prefetch in ((1, 0), (2, 0), (4, 1024)):
            core.set_streams(streams, streams)
            core.set_prefetch(prefetch, prefetch)
            found.append(screen_kernels.products(copy, states, None))
        for approx, top, _ in found[1:]:
            assert torch.equal(approx, found[0][0])
            assert torch.equal(top, found[0][1])


def test_states_of_all_16_bits(core: ModuleType) -> None:
    states = torch.tensor([-32768, 32767, -1, 255, -256, 256, 0, 1]).repeat(2, 16).to(torch.int16)
    states[1] = states[1].roll(3)
    codes = torch.randint(-127, 128, (300, 128), dtype=torch.int8)
    nothing, ones = torch.zeros(300, 0, dtype=torch.int16), torch.ones(300)
    scale = torch.ones(2, dtype=torch.float64)
    wanted = (codes.double() @ states.double().T).T.float()
    for name in core.instruction_sets():
        core.use(name)
        for rows in (1, 2):
            approx, top = torch.empty(rows, 300), torch.empty(rows, 2)
            given = (codes, None, nothing, ones, ones, None, states[:rows].contiguous())
            core.screen_products(
                *given, nothing[:rows], scale[:rows], scale[:rows], None, approx, top, 1
            )
            assert torch.equal(approx, wanted[:rows])
