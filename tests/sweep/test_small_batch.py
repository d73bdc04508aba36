"""Fewer than 64 rows: the same answers as a sweep, by plain torch operations."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from compare import assert_close
from torch import Tensor
from torch_watch import Products, no_tensor_of

from lmhead import linear_cross_entropy, query
from lmhead.sweep import small_batch, swept_scores

# Rows and tokens: halves of the rows, blocks of the vocabulary; one row; two tokens.
SIZES = [(1, 50), (2, 2), (7, 65), (63, 400), (8, 5000), (63, 5001), (1, 40_000)]
D = 12


def leaves(rows: int, vocab: int, *, bias: bool = False) -> list[Tensor | None]:
    torch.manual_seed(rows * vocab)
    made = [torch.randn(rows, D) * 2, torch.randn(vocab, D), torch.randn(vocab) if bias else None]
    return [None if t is None else t.requires_grad_() for t in made]


@contextmanager
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collect the functions that did the work."""
    names: list[str] = []

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            return function(*args, **kwargs)

        return call

    for name in ("_loss_by_rows", "_loss", "_sums", "_direct_sums"):
        monkeypatch.setattr(small_batch, name, watched(name, getattr(small_batch, name)))
    yield names


def gradients(make: Callable[..., Tensor], tensors: list[Tensor | None]) -> list[Tensor]:
    wanted = [t for t in tensors if t is not None]
    return list(torch.autograd.grad(make(*tensors), wanted))


def of_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swept_scores, "MAX_ROWS", 0)
    monkeypatch.setattr(small_batch, "MAX_ROWS", 0)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("rows", "vocab"), SIZES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss(
    rows: int, vocab: int, bias: bool, reduction: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = leaves(rows, vocab, bias=bias)
    targets = torch.randint(vocab, (rows,))

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets, bias=bias, reduction=reduction)

    with taken(monkeypatch) as names:
        value, grads = loss(*tensors), gradients(loss, tensors)  # type: ignore[arg-type]
        with torch.no_grad():
            assert_close(loss(*tensors), value.detach(), rtol=1e-6, atol=1e-6)  # type: ignore[arg-type]
    assert names.count("_loss") == 3
    assert names.count("_loss_by_rows") == (3 if rows * vocab <= 2**15 else 0)
    hidden, weight, add = (None if t is None else t.double() for t in tensors)
    dense = torch.nn.functional.linear(hidden, weight, add)  # type: ignore[arg-type]
    truth = torch.nn.functional.cross_entropy(dense, targets, reduction=reduction)
    assert value.dtype == torch.float32
    # Logits of about 10, in float32.
    atol = 2e-6 * (rows if reduction == "sum" else 1)
    assert_close(value.double(), truth, rtol=3e-7, atol=atol)
    of_sweep(monkeypatch)
    assert_close(value, loss(*tensors), rtol=3e-7, atol=atol)  # type: ignore[arg-type]
    for ours, swept in zip(grads, gradients(loss, tensors), strict=True):
        assert_close(ours, swept, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("asked", ["log_prob", "entropy", "all"])
@pytest.mark.parametrize(("rows", "vocab"), SIZES)
def test_sums(
    rows: int, vocab: int, asked: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = leaves(rows, vocab, bias=bias)
    ids = torch.randint(vocab, (rows, 3))
    choices: dict[str, dict[str, Any]] = {
        "log_prob": {"log_prob": ids},
        "entropy": {"entropy": True},
        "all": {"log_prob": ids, "entropy": True, "logsumexp": True},
    }
    questions = choices[asked]
    mix = torch.randn(rows, 5).double()

    def total(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found = query(hidden, weight, bias=bias, **questions)
        made = torch.zeros((), dtype=torch.float64)
        if found.log_prob is not None:
            made = made + (found.log_prob * mix[:, :3]).sum()
        if found.entropy is not None:
            made = made + (found.entropy * mix[:, 3]).sum()
        if found.logsumexp is not None:
            made = made + (found.logsumexp * mix[:, 4]).sum()
        return made

    with taken(monkeypatch) as names:
        value, grads = total(*tensors), gradients(total, tensors)  # type: ignore[arg-type]
    assert set(names) == {"_direct_sums" if rows * vocab <= 2**12 else "_sums"}
    of_sweep(monkeypatch)
    assert_close(value, total(*tensors), rtol=1e-5, atol=1e-5)  # type: ignore[arg-type]
    for ours, swept in zip(grads, gradients(total, tensors), strict=True):
        assert_close(ours, swept, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize(("rows", "vocab"), [(1, 50), (7, 65), (63, 500)])
def test_plain_log_probabilities(rows: int, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _ = leaves(rows, vocab)
    assert hidden is not None
    assert weight is not None
    ids = torch.randint(vocab, (rows,))
    with taken(monkeypatch) as names:
        found = query(hidden, weight, log_prob=ids).log_prob
    assert names == []
    grads = torch.autograd.grad(found.sum(), (hidden, weight))
    of_sweep(monkeypatch)
    swept = query(hidden, weight, log_prob=ids).log_prob
    assert_close(found, swept, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(grads, torch.autograd.grad(swept.sum(), (hidden, weight)), strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "vocab"), [(5, 40), (9, 5000)])
def test_second_passes_and_second_derivatives(rows: int, vocab: int) -> None:
    hidden, weight, _ = leaves(rows, vocab)
    assert hidden is not None
    assert weight is not None
    ids = torch.randint(vocab, (rows,))
    for make in (
        lambda h: linear_cross_entropy(h, weight, ids),
        lambda h: query(h, weight, log_prob=ids[:, None], entropy=True).entropy.sum(),
    ):
        value = make(hidden)
        first, again = (torch.autograd.grad(value, hidden, retain_graph=True)[0] for _ in range(2))
        assert_close(first, again, rtol=1e-6, atol=1e-7)
        (half,) = torch.autograd.grad(value, hidden, torch.tensor(0.5), retain_graph=True)
        assert_close(half, first / 2, rtol=1e-5, atol=1e-7)
        (graph,) = torch.autograd.grad(value, hidden, create_graph=True)
        assert_close(graph, first, rtol=1e-4, atol=1e-6)
        (second,) = torch.autograd.grad(graph.square().sum(), hidden)
        assert second.abs().max() > 0


@pytest.mark.parametrize(("rows", "vocab"), [(2, 30), (20, 61), (9, 5000)])
def test_no_tensor_of_the_size_of_the_logits_and_three_products(rows: int, vocab: int) -> None:
    hidden, weight, _ = leaves(rows, vocab)
    assert hidden is not None
    assert weight is not None
    hidden, weight = (torch.randn(len(t), 1, requires_grad=True) for t in (hidden, weight))
    ids = torch.randint(vocab, (rows,))
    for make in (
        lambda: linear_cross_entropy(hidden, weight, ids),
        lambda: query(hidden, weight, log_prob=ids).log_prob.sum(),
        lambda: query(hidden, weight, log_prob=ids, entropy=True).log_prob.sum(),
    ):
        with no_tensor_of(rows, vocab), Products() as products:
            torch.autograd.grad(make(), (hidden, weight))
        assert products.flops <= 3.05 * 2 * rows * vocab


@pytest.mark.parametrize(("rows", "vocab"), [(4, 30), (9, 5000)])
def test_what_is_not_finite_is_left_to_the_sweep(rows: int, vocab: int) -> None:
    hidden, weight, _ = leaves(rows, vocab)
    assert hidden is not None
    assert weight is not None
    ids = torch.zeros(rows, dtype=torch.int64)
    bias = torch.zeros(vocab)
    bias[0] = -torch.inf
    assert linear_cross_entropy(hidden, weight, ids, bias=bias) == torch.inf
    found = query(hidden, weight, bias=bias, log_prob=ids + 1, entropy=True)
    assert found.entropy.isfinite().all()
    grads = torch.autograd.grad(found.entropy.sum() + found.log_prob.sum(), (hidden, weight))
    assert all(g.isfinite().all() for g in grads)
    with torch.no_grad():
        hidden[1] = torch.nan
    assert query(hidden, weight, log_prob=ids).log_prob.isnan().tolist() == [
        row == 1 for row in range(rows)
    ]


def test_no_cycle_keeps_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _ = leaves(9, 5000)
    assert hidden is not None
    assert weight is not None
    kept: list[weakref.ref[Tensor]] = []
    sums = small_batch._sums

    def watched(*args: Any, **kwargs: Any) -> Any:
        made = sums(*args, **kwargs)
        kept.append(weakref.ref(made.largest))
        return made

    monkeypatch.setattr(small_batch, "_sums", watched)
    gc.disable()
    try:
        found = query(hidden, weight, log_prob=torch.zeros(9, 1, dtype=torch.int64)).log_prob
        assert kept[0]() is not None
        del found
        assert kept[0]() is None
    finally:
        gc.enable()


def test_errors_are_those_of_the_sweep() -> None:
    hidden, weight = torch.randn(3, D), torch.randn(50, D)
    with pytest.raises(ValueError, match=r"targets must be in \[0, 50\) or ignore_index; got 50"):
        linear_cross_entropy(hidden, weight, torch.tensor([1, 50, 2]))
    with pytest.raises(ValueError, match=r"log_prob must be in \[0, 50\); got -1"):
        query(hidden, weight, log_prob=torch.tensor([1, -1, 2]))
    with pytest.raises(ValueError, match="targets must have shape"):
        linear_cross_entropy(hidden, weight, torch.tensor([1, 2]))
    weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="weight must have memory"):
        linear_cross_entropy(hidden, weight, torch.tensor([1, 2, 3]))
