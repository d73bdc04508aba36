"""Products of the sweep: the core's and torch's, as precise as each other."""

import pytest
import torch
from compare import assert_as_good_as
from torch import Tensor

from lmhead.sweep import kernels
from lmhead.sweep import source as products

SHAPES = [(64, 64, 8192), (71, 1024, 577), (1500, 70, 333), (513, 257, 256)]


@pytest.fixture(autouse=True)
def by_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply by the core on every machine, whatever the size."""
    if kernels.core is None:
        pytest.skip("without the compiled core")
    monkeypatch.setattr(products, "_MIN_SIZE", 1)
    monkeypatch.setattr(products, "core_is_faster", lambda: True)


def matrices(m: int, n: int, inner: int, *, transposed: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(m + n + inner)
    a = torch.randn(inner, m).T if transposed else torch.randn(m, inner)
    return a, torch.randn(inner, n)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("m", "n", "inner"), SHAPES)
def test_product(m: int, n: int, inner: int, transposed: bool, add: bool) -> None:
    a, b = matrices(m, n, inner, transposed=transposed)
    start = torch.randn(m, n)
    truth = a.double() @ b.double() + (start.double() if add else 0.0)
    plain = torch.addmm(start, a, b, beta=int(add))
    made = start.clone()
    assert products._by_core(made, a, b)
    assert products.product_(made, a, b, add=add) is made
    assert_as_good_as(made, plain, truth, 1e-6)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_same_bits_on_any_number_of_threads(transposed: bool) -> None:
    a, b = matrices(300, 700, 1577, transposed=transposed)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(products.product_(torch.empty(300, 700), a, b))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], each) for each in results)


def test_not_a_number_and_infinity_stay_in_their_rows_and_columns() -> None:
    a, b = matrices(100, 80, 400, transposed=False)
    a[3, 5], b[7, 11] = torch.nan, torch.inf
    made = products.product_(torch.empty(100, 80), a, b)
    wrong = ~made.isfinite()
    assert bool(made[3].isnan().all())
    assert int(wrong.sum()) == 80 + 99
    assert bool(wrong[:, 11].all())


@pytest.mark.parametrize("kind", ["strided", "double", "requested"])
def test_torch_multiplies_the_rest(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = matrices(70, 80, 90, transposed=False)
    if kind == "strided":
        a = torch.randn(70, 180)[:, ::2]
    if kind == "double":
        a, b = a.double(), b.double()
    if kind == "requested":
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    out = torch.empty(70, 80, dtype=a.dtype)
    assert not products._by_core(out, a, b)
    assert torch.equal(products.product_(out, a, b), a @ b)


def test_the_choice_is_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("LMHEAD_PRODUCTS", "mkl")
    with pytest.raises(ValueError, match=r"LMHEAD_PRODUCTS must be .*; got 'mkl'"):
        products.core_is_faster.__wrapped__()
    monkeypatch.setenv("LMHEAD_PRODUCTS", "torch")
    assert products.core_is_faster.__wrapped__() is False
    monkeypatch.setenv("LMHEAD_PRODUCTS", "core")
    assert products.core_is_faster.__wrapped__() is True
