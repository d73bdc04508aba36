"""All products of hidden states with the weight: one order of sums, whatever else changes."""

from types import ModuleType

import pytest
import torch
from compare import assert_close
from torch import Tensor

from lmhead.sweep import Pointwise, Source, kernels

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def lanes(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the products by the definition: lane i mod 8, then halves; (B, D), (V, D)."""
    missing = (0, -hidden.shape[1] % 8)
    h, w = (torch.nn.functional.pad(t.double(), missing) for t in (hidden, weight))
    sums = torch.zeros(len(h), len(w), 8, dtype=torch.float64)
    for i in range(0, h.shape[1], 8):
        sums += h[:, None, i : i + 8] * w[None, :, i : i + 8]
    for half in (4, 2, 1):
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a · b + c of float32 tensors, rounded once.

    The product is exact in float64; its sum with c is rounded to odd before it becomes float32.
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    added = total - product
    error = (product - (total - added)) + (c - added)
    bits = total.contiguous().view(torch.int64)
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    even = (error != 0) & ~error.isnan() & (bits % 2 == 0)
    return torch.where(even, bits + towards, bits).view(torch.float64).float()


def float_lanes(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the float32 products by the definition: lane i mod 16, parts of 1024 entries."""
    missing = (0, -hidden.shape[1] % 16)
    h, w = (torch.nn.functional.pad(t.float(), missing) for t in (hidden, weight))
    total = torch.zeros(len(h), len(w), dtype=torch.float64)
    for part, other in zip(torch.split(h, 1024, dim=1), torch.split(w, 1024, dim=1), strict=True):
        sums = torch.zeros(len(h), len(w), 16)
        for i in range(0, part.shape[1], 16):
            sums = fused(part[:, None, i : i + 16], other[None, :, i : i + 16], sums)
        for half in (8, 4, 2, 1):
            sums = sums[..., :half] + sums[..., half:]
        total += sums[..., 0]
    return total.float()


def logits(
    core: ModuleType, hidden: Tensor, weight: Tensor, threads: int = 1, *, exact: bool = True
) -> Tensor:
    dtype = torch.float64 if exact else torch.float32
    out = torch.full((len(hidden), len(weight)), torch.nan, dtype=dtype)
    core.row_logits(hidden, weight, out, threads)
    return out


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [1, 8, 19, 576])
def test_row_logits_are_the_definition_on_every_instruction_set(
    core: ModuleType, dtype: torch.dtype, width: int
) -> None:
    random = torch.Generator().manual_seed(width)
    weight = torch.randn(251, width, generator=random).to(dtype)
    hidden = torch.randn(19, width, generator=random)
    want = lanes(hidden, weight)
    best = core.instruction_set()
    try:
        for name in core.instruction_sets():
            core.use(name)
            for rows in (1, 2, 3, 5, 8, 19):
                for threads in (1, 3):
                    found = logits(core, hidden[:rows], weight, threads)
                    assert torch.equal(found, want[:rows]), (name, rows, threads)
    finally:
        core.use(best)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [1, 16, 19, 576, 1024, 2051])
def test_float_logits_are_the_definition_on_every_instruction_set(
    core: ModuleType, dtype: torch.dtype, width: int
) -> None:
    random = torch.Generator().manual_seed(width)
    weight = torch.randn(61, width, generator=random).to(dtype)
    hidden = torch.randn(19, width, generator=random)
    want = float_lanes(hidden, weight)
    best = core.instruction_set()
    try:
        for name in core.instruction_sets():
            core.use(name)
            for rows in (1, 2, 3, 5, 8, 19):
                found = logits(core, hidden[:rows], weight, 1 + rows % 2, exact=False)
                assert torch.equal(found, want[:rows]), (name, rows)
    finally:
        core.use(best)
    size = hidden.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    error = (want - hidden.double() @ weight.double().T).abs()
    assert bool((error <= 2.0**-17 * size).all())


def test_logits_that_float32_cannot_sum_are_summed_in_float64() -> None:
    random = torch.Generator().manual_seed(1)
    weight, hidden = torch.randn(40, 32, generator=random), torch.randn(3, 32, generator=random)
    weight[:, [0, 8]] = 0.0
    want = hidden.double() @ weight.double().T
    weight[:, 0], weight[:, 8], hidden[1, [0, 8]] = 1e6, -1e6, 1e38
    hidden[[0, 2], 0] = hidden[[0, 2], 8] = 0.0
    with torch.no_grad():
        found = Source((hidden,), (weight,), None, Pointwise()).row_logits()
        alone = Source((hidden[1:2],), (weight,), None, Pointwise()).row_logits()
    assert torch.equal(found[1:2], alone)
    assert_close(found, want.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_row_logits_are_the_pair_products(core: ModuleType, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 77, generator=random).to(dtype)
    hidden = torch.randn(11, 77, generator=random).to(dtype)
    rows, ids = torch.cartesian_prod(torch.arange(11), torch.arange(300)).unbind(1)
    pairs = kernels.pair_products(hidden, weight, rows, ids, 2**20)
    assert torch.equal(logits(core, hidden.float(), weight), pairs.view(11, 300))
    found = kernels.row_logits(hidden, weight.requires_grad_())
    assert found is not None
    assert torch.equal(found, pairs.view(11, 300))
    assert kernels.row_logits(hidden.double(), weight) is None
    assert kernels.row_logits(hidden, weight.detach().T.contiguous().T) is None


def test_infinities_and_nans_come_through(core: ModuleType) -> None:
    weight, hidden = torch.ones(5, 9), torch.ones(3, 9)
    weight[2, 8], hidden[1, 0] = torch.inf, torch.nan
    found = logits(core, hidden, weight)
    assert found[0].tolist() == [9, 9, torch.inf, 9, 9]
    assert found[1].isnan().all()


@pytest.mark.parametrize(("rows", "vocab"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_is_no_work(core: ModuleType, rows: int, vocab: int) -> None:
    assert logits(core, torch.ones(rows, 4), torch.ones(vocab, 4)).shape == (rows, vocab)
