"""The compiled steps against the torch operations that stand in for them, on every machine set."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from lmhead.screen import screen_kernels
from lmhead.screen.build_copy import build
from lmhead.screen.candidates import Pairs
from lmhead.screen.quantized_weight import BLOCK, Rotation, pack, unpack
from lmhead.screen.states import States
from lmhead.sweep import kernels
from screen import heads


@pytest.fixture
def core(served_by: str) -> Iterator[ModuleType]:
    if kernels.core is None or served_by == "torch":
        pytest.skip("these tests compare the compiled core with torch")
    before = kernels.core.instruction_set()
    yield kernels.core
    kernels.core.use(before)


def on_torch(monkeypatch: pytest.MonkeyPatch, function: Any, *args: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "core", None)
        return function(*args)


@pytest.mark.parametrize("bits", [8, "4+4"])
@pytest.mark.parametrize("vocab", [1, 5, BLOCK, 3 * BLOCK + 7])
@pytest.mark.parametrize("size", [3, 200])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("threads", [1, 3])
def test_both_give_the_same(
    core: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    bits: Any,
    vocab: int,
    size: int,
    rows: int,
    threads: int,
) -> None:
    random = torch.Generator().manual_seed(vocab + size)
    weight = heads.outlier_columns(vocab, size, random)
    copy = build(weight, bits=bits)
    states = States.of(copy, heads.states(rows, weight, random))
    bias = heads.normal(vocab, random=random).double()
    bias[0] = -torch.inf
    wanted, wanted_top, _ = on_torch(monkeypatch, screen_kernels.products, copy, states, bias)
    limits = wanted.quantile(0.6, dim=1).double().nan_to_num(neginf=-1.0)
    monkeypatch.setattr(kernels, "threads", lambda: threads)
    for name in core.instruction_sets():
        core.use(name)
        approx, top, _ = screen_kernels.products(copy, states, bias)
        # A product and a sum may be one instruction: the last bit of float32 may differ.
        torch.testing.assert_close(approx, wanted, rtol=2e-7, atol=1e-30)
        torch.testing.assert_close(top, wanted_top, rtol=2e-7, atol=1e-30)
        found = screen_kernels.select(copy, wanted, wanted_top, states.e, states.n, limits)
        for ours, theirs in zip(
            found,
            on_torch(
                monkeypatch,
                screen_kernels.select,
                copy,
                wanted,
                wanted_top,
                states.e,
                states.n,
                limits,
            ),
            strict=True,
        ):
            assert torch.equal(ours, theirs)
        pairs = Pairs(*found)
        given = (copy, states, wanted, pairs.rows, pairs.ids)
        refined = on_torch(monkeypatch, screen_kernels.refine, *given)
        torch.testing.assert_close(screen_kernels.refine(*given), refined, rtol=1e-14, atol=1e-9)


@pytest.mark.parametrize("size", [1, 3, 64, 200, 576, 1000, 2048])
@pytest.mark.parametrize("leading", [0, 16, None])
def test_states_are_prepared_alike(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch, size: int, leading: int | None
) -> None:
    random = torch.Generator().manual_seed(size)
    weight = heads.plain(300, size, random)
    copy = build(weight, leading=min(leading, size // 16 * 16) if leading else leading)
    hidden = heads.states(5, weight, random)
    wanted = on_torch(monkeypatch, States.of, copy, hidden)
    for name in core.instruction_sets():
        core.use(name)
        ours = States.of(copy, hidden)
        for field in ("main", "lead"):
            # A rounding to the nearest integer may go either way at a half.
            off = (getattr(ours, field).int() - getattr(wanted, field).int()).abs()
            assert off.numel() == 0 or int(off.max()) <= 1
        for field in ("scales", "lead_scales", "base", "e"):
            torch.testing.assert_close(
                getattr(ours, field), getattr(wanted, field), rtol=1e-9, atol=1e-12
            )
        torch.testing.assert_close(ours.n, wanted.n, rtol=1e-2, atol=1e-12)


@pytest.mark.usefixtures("core")
def test_integer_products_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows of equal entries along a state of equal entries: the largest sums there are.
    size = 4096
    copy = build(torch.randn(BLOCK, size), bits=8, leading=0)
    assert copy.whole is not None
    copy.whole.fill_(127)
    object.__setattr__(copy, "norm", 127 * size**0.5)
    object.__setattr__(copy, "rotation", Rotation(torch.ones(size, dtype=torch.int8), _identity()))
    states = States.of(copy, torch.ones(2, size))
    assert int(states.main.double().sum(1).max()) * 127 < 2**31
    wanted = on_torch(monkeypatch, screen_kernels.products, copy, states, None).approx
    assert torch.equal(screen_kernels.products(copy, states, None).approx, wanted)


def _identity() -> tuple[torch.Tensor, ...]:
    return (torch.eye(64, dtype=torch.float64),) * 2


def test_nothing_found_and_everything_found() -> None:
    weight = heads.plain(300, 10, torch.Generator().manual_seed(0))
    copy = build(weight)
    states = States.of(copy, weight[:2])
    approx, top, _ = screen_kernels.products(copy, states, None)
    for limit, count in ((1e9, 0), (-torch.inf, 300)):
        limits = torch.full((2,), limit, dtype=torch.float64)
        counts, ids = screen_kernels.select(copy, approx, top, states.e, states.n, limits)
        assert counts.tolist() == [count, count]
        assert ids.tolist() == [*range(count)] * 2


@pytest.mark.parametrize("bits", [8, "4+4"])
@pytest.mark.parametrize("rows", [1, 3])
def test_forbidden_tokens_are_not_read(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch, rows: int, bits: Any
) -> None:
    random = torch.Generator().manual_seed(rows)
    weight = heads.plain(700, 40, random)
    copy = build(weight, bits=bits)
    states = States.of(copy, weight[:rows])
    allowed = torch.randint(-(2**31), 2**31, (rows, 22), generator=random).int()
    allowed[:, 3:9] = 0
    allowed[:, 9:19] = -1
    wanted = on_torch(monkeypatch, screen_kernels.products, copy, states, None, allowed)
    forbidden = wanted.approx[0] == -torch.inf
    assert wanted.tokens_read == 700 - int(forbidden.sum())
    copy.scales[forbidden] = torch.nan
    for name in core.instruction_sets():
        core.use(name)
        got = screen_kernels.products(copy, states, None, allowed)
        torch.testing.assert_close(got.approx, wanted.approx, rtol=2e-7, atol=1e-30)
        torch.testing.assert_close(got.block_top, wanted.block_top, rtol=2e-7, atol=1e-30)
        assert got.tokens_read == wanted.tokens_read


def test_the_core_refuses_what_does_not_fit(core: ModuleType) -> None:
    weight = heads.plain(300, 10, torch.Generator().manual_seed(0))
    copy = build(weight)
    states = States.of(copy, weight[:2])
    approx, top, _ = screen_kernels.products(copy, states, None)
    codes = (copy.whole, None, copy.lead, copy.scales, copy.lead_scales, None)
    given = (states.main, states.lead, states.scales, states.lead_scales, None)
    with pytest.raises(ValueError, match="approx must be"):
        core.screen_products(*codes, *given, approx[:, 1:].contiguous(), top, 1)
    with pytest.raises(ValueError, match="block_max must be"):
        core.screen_products(*codes, *given, approx, top[:, 1:].contiguous(), 1)
    with pytest.raises(ValueError, match="not both"):
        core.screen_products(None, *codes[1:], *given, approx, top, 1)
    with pytest.raises(ValueError, match="multiple of 64"):
        core.screen_products(*codes, given[0][:, 1:].contiguous(), *given[1:], approx, top, 1)
    with pytest.raises(ValueError, match="threads"):
        core.screen_products(*codes, *given, approx, top, 0)
    with pytest.raises(TypeError):
        core.screen_products(*codes, *given, approx.double(), top, 1)


def test_nibbles_come_back() -> None:
    entries = torch.randint(16, (9, 192), generator=torch.Generator().manual_seed(0))
    packed = pack(entries)
    assert packed.shape == (9, 96)
    assert torch.equal(unpack(packed).long(), entries)


@pytest.mark.parametrize("size", [1, 64, 65, 576, 640, 1000, 2048, 64 * 131])
def test_a_rotation_keeps_lengths_and_spreads(size: int) -> None:
    rotation = Rotation.of(size)
    assert rotation.padded % 64 == 0
    assert 0 <= rotation.padded - size < (128 if size == 64 * 131 else 64)
    unit = torch.eye(size, dtype=torch.float64)[: min(size, 3)]
    turned = rotation(unit)
    torch.testing.assert_close(turned @ turned.T, unit @ unit.T, rtol=0, atol=1e-13)
    assert float(turned.abs().max()) <= 1.5 / rotation.padded**0.5
