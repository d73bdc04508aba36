"""The copy made in the compiled core, and its file in the cache folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmhead import LMHead, ScreenedHead
from lmhead.screen import copy_cache
from lmhead.screen.build_copy import build, mean_row
from lmhead.screen.copy_cache import cached_copy
from lmhead.sweep import kernels

SETS = [] if kernels.core is None else kernels.core.instruction_sets()


@pytest.fixture(params=SETS or [None])
def instruction_set(request: pytest.FixtureRequest, served_by: str) -> Iterator[None]:
    if kernels.core is None or served_by == "torch":
        pytest.skip("these tests compare the compiled core with torch")
    before = kernels.core.instruction_set()
    kernels.core.use(request.param)
    yield
    kernels.core.use(before)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("bits", [8, "4+4"])
@pytest.mark.parametrize("size", [3, 64, 200, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_make_the_same_copy(
    monkeypatch: pytest.MonkeyPatch, bits: Any, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    weight = (torch.randn(301, size) * torch.rand(301, 1)).to(dtype)
    weight[5] = 0.0
    weight[6, -1] = 1000.0
    ours = build(weight, bits=bits).tensors()
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "core", None)
        theirs = build(weight, bits=bits).tensors()
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        if expected.is_floating_point():
            torch.testing.assert_close(ours[name], expected, rtol=1e-6, atol=0)
        else:
            # Where a quotient lies between two integers, the last bit of float64 decides.
            off = ours[name] != expected
            assert off.double().mean() < 1e-3 if off.numel() else True, name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite(value: float) -> None:
    weight = torch.randn(300, 64)
    weight[299, 63] = value
    with pytest.raises(ValueError, match="weight must be finite"):
        build(weight)


@pytest.mark.usefixtures("instruction_set")
def test_the_mean_row() -> None:
    weight = torch.randn(5000, 37)
    expected = weight.double().mean(0)
    torch.testing.assert_close(mean_row(weight), expected, rtol=1e-12, atol=1e-15)


class TestHash:
    @pytest.mark.skipif(kernels.core is None, reason="this is about the compiled core")
    def test_it_is_the_same_on_every_instruction_set(self) -> None:
        core = kernels.compiled()
        before = core.instruction_set()
        bytes = torch.randint(256, (5000,), dtype=torch.uint8)
        found = set()
        for name in core.instruction_sets():
            core.use(name)
            found |= {core.hash_bytes(bytes, threads) for threads in (1, 2)}
        core.use(before)
        assert len(found) == 1

    @pytest.mark.skipif(kernels.core is None, reason="this is about the compiled core")
    def test_every_byte_counts(self) -> None:
        core = kernels.compiled()
        bytes = torch.zeros(3000, dtype=torch.uint8)
        found = {core.hash_bytes(bytes, 1)}
        for i in range(0, 3000, 7):
            bytes[i] = 1
            found.add(core.hash_bytes(bytes, 1))
            bytes[i] = 0
        assert len(found) == 1 + len(range(0, 3000, 7))


class TestCache:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path))
        monkeypatch.setattr(copy_cache, "MIN_CACHED_BYTES", 0)
        return tmp_path / "screen"

    @pytest.fixture
    def weight(self) -> torch.Tensor:
        torch.manual_seed(0)
        return torch.randn(400, 64)

    @pytest.mark.parametrize("bits", [8, "4+4"])
    def test_a_copy_is_made_once(
        self, folder: Path, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch, bits: Any
    ) -> None:
        first = cached_copy(weight, bits=bits).tensors()
        assert len(list(folder.iterdir())) == 1
        monkeypatch.setattr(copy_cache, "build", None)
        again = cached_copy(weight.clone(), bits=bits).tensors()
        assert first.keys() == again.keys()
        assert all(torch.equal(first[name], again[name]) for name in first)

    def test_another_weight_gets_another_copy(self, folder: Path, weight: torch.Tensor) -> None:
        cached_copy(weight)
        weight[17, 3] += 1.0
        assert torch.equal(cached_copy(weight).scales, build(weight).scales)
        cached_copy(weight, bits="4+4")
        cached_copy(weight.half())
        assert len(list(folder.iterdir())) == 4

    @pytest.mark.parametrize("damage", ["a byte", "cut", "empty"])
    def test_a_damaged_file_is_made_again(
        self, folder: Path, weight: torch.Tensor, damage: str
    ) -> None:
        cached_copy(weight)
        file = next(folder.iterdir())
        content = bytearray(file.read_bytes())
        content[-100] ^= 1
        file.write_bytes(bytes({"a byte": content, "cut": content[:5000], "empty": b""}[damage]))
        found, expected = cached_copy(weight).tensors(), build(weight).tensors()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert file.stat().st_size == len(content)
        assert file.read_bytes() != content

    def test_a_folder_that_cannot_be_made(
        self, tmp_path: Path, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "file" / "inside"))
        assert torch.equal(cached_copy(weight).scales, build(weight).scales)

    def test_a_head_reads_it(self, folder: Path) -> None:
        head = LMHead(64, 400)
        hidden = torch.randn(5, 64)
        ScreenedHead(head, cache=True)
        screened = ScreenedHead(head, cache=True)
        assert torch.equal(screened.argmax(hidden).token, ScreenedHead(head).argmax(hidden).token)
        assert len(list(folder.iterdir())) == 1
        with pytest.raises(ValueError, match="cache must be False with calibration"):
            ScreenedHead(head, calibration=hidden, cache=True)
