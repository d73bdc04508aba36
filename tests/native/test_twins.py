"""Each binding against the torch operations that stand in for it."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from compare import assert_as_good_as, assert_close
from torch import Tensor

from lmhead.sweep import kernels
from lmhead.sweep.kernels import Coefficients, Pointwise
from native.conftest import Twin
from native.tiles import MAPS, SHAPES, Absorbed, Problem, problem

EVERY_SHAPE = pytest.mark.parametrize(("words", "tokens"), SHAPES)
EVERY_MAP = pytest.mark.parametrize("pointwise", MAPS.values(), ids=MAPS)


def absorb(p: Problem, *, entropy: bool = True) -> Absorbed:
    """Three tiles of unequal size through the step of a sweep."""
    source, running = p.source, p.start(entropy=entropy)
    top, rank = p.watchers()
    hiddens, vocab = source.take(slice(None)), source.vocab
    edges = sorted({0, vocab // 5, vocab // 2, vocab})
    for lo, hi in pairwise(edges):
        z = source.linear_tile(
            tuple(h.T.contiguous() for h in hiddens), lo, hi, torch.empty(hi - lo, source.rows)
        )
        scratch = torch.empty_like(z), torch.empty_like(z)
        bias = source.bias_tile(lo, hi)
        kernels.update_answers_(z, lo, bias, source.pointwise, running, scratch, top, rank)
    values, ids = top.answer(running.lse)
    return Absorbed(z, *running, values, ids, rank.answer(running.lse))


@EVERY_SHAPE
@EVERY_MAP
@pytest.mark.parametrize("ties", [False, True], ids=["random", "ties"])
def test_absorb(
    without: Twin[Absorbed],
    words: int,
    tokens: int,
    pointwise: Pointwise,
    ties: bool,
) -> None:
    p = problem(words, tokens, pointwise, ties=ties)
    ours, twin = absorb(p), without(lambda: absorb(p))
    assert_close(ours.z, twin.z, rtol=2e-6, atol=1e-6, what="logits")
    assert_close(ours.m, twin.m, rtol=2e-6, atol=1e-6, what="maximum")
    lse, true_lse = (a.m.double() + a.s.log() for a in (ours, twin))
    assert_close(lse, true_lse, atol=3e-6, what="lse")
    assert ours.t is not None
    assert twin.t is not None
    entropy, true_entropy = (a.s.log() - a.t / a.s for a in (ours, twin) if a.t is not None)
    assert_close(entropy, true_entropy, atol=5e-6, what="entropy")
    assert_close(ours.top_values, twin.top_values, rtol=1e-12, atol=1e-12, what="top values")
    assert torch.equal(ours.top_ids, twin.top_ids)
    assert torch.equal(ours.ranks, twin.ranks)


def test_absorb_without_entropy(without: Twin[Absorbed]) -> None:
    p = problem(100, 33, MAPS["identity"])
    ours, twin = absorb(p, entropy=False), without(lambda: absorb(p, entropy=False))
    assert ours.t is None
    assert torch.equal(ours.s, absorb(p).s)
    assert_close(ours.s, twin.s, rtol=1e-6)


def test_absorb_tokens_that_have_no_order(without: Twin[Absorbed]) -> None:
    p = problem(100, 33, MAPS["identity"])
    hidden = p.source.hiddens[0].clone()
    hidden[3, 0] = torch.nan
    p.source.weights[0][7] = 1e38  # the product is infinite where the hidden state is large
    p = Problem(type(p.source)((hidden,), p.source.weights, None, p.source.pointwise), p.ids)
    ours, twin = absorb(p), without(lambda: absorb(p))
    lse, true_lse = (a.m.double() + a.s.log() for a in (ours, twin))
    assert_close(lse, true_lse, atol=3e-6, rtol=1e-6, equal_nan=True, what="lse")
    assert bool(lse[3].isnan())
    assert (ours.top_ids[3] == -1).all()
    assert (ours.ranks[3] == -1).all()
    assert torch.equal(ours.top_ids, twin.top_ids)
    assert torch.equal(ours.ranks, twin.ranks)


def test_absorb_rows_whose_tokens_are_all_masked(without: Twin[Absorbed]) -> None:
    p = problem(100, 9, MAPS["identity"])
    assert p.source.bias is not None
    p.source.bias.fill_(-torch.inf)
    ours, twin = absorb(p), without(lambda: absorb(p))
    assert (ours.m == -torch.inf).all()
    assert (ours.s == 0).all()
    assert (ours.top_ids == -1).all()
    assert torch.equal(ours.top_ids, twin.top_ids)
    assert torch.equal(ours.ranks, twin.ranks)


def logits_and_lse(p: Problem) -> tuple[Tensor, Tensor]:
    z = p.source.dense().T.contiguous()
    return z, z.double().logsumexp(0)


PARTS: dict[str, Callable[[Tensor], Coefficients]] = {
    "a": lambda x: Coefficients(x[0]),
    "a, b": lambda x: Coefficients(x[0], x[1]),
    "a, mixed": lambda x: Coefficients(x[0], mixed=x[2]),
    "a, b, mixed": lambda x: Coefficients(x[0], x[1], mixed=x[2]),
}


@EVERY_SHAPE
@EVERY_MAP
@pytest.mark.parametrize("part", PARTS)
def test_gradient(
    without: Twin[Tensor],
    words: int,
    tokens: int,
    pointwise: Pointwise,
    part: str,
) -> None:
    p = problem(words, tokens, pointwise)
    z, lse = logits_and_lse(p)
    random = torch.Generator().manual_seed(0)
    numbers = torch.randn(3, tokens, generator=random)
    mix = torch.where(z[:, 0].isinf(), 0.0, torch.rand(words, generator=random))
    pick = torch.randint(words, (20,), generator=random)
    picks = pick, torch.arange(20) % tokens, torch.randn(20, generator=random)

    def run(dtype: torch.dtype) -> Tensor:
        tile = z.to(dtype, copy=True)
        result = kernels.gradient_(
            tile,
            lse,
            PARTS[part](numbers.to(dtype)),
            pointwise,
            scratch=(torch.empty_like(tile), torch.empty_like(tile)),
            mix=mix.to(dtype),
            picks=(picks[0], picks[1], picks[2].to(dtype)),
        )
        assert result.data_ptr() == tile.data_ptr()
        return result

    ours, truth = run(torch.float32), run(torch.float64)
    twin = without(lambda: run(torch.float32))
    assert_as_good_as(ours, twin, truth, 1e-6, dtype=torch.float32)


@EVERY_SHAPE
@EVERY_MAP
def test_softmax_gradient(
    without: Twin[tuple[Tensor, Tensor, Tensor]],
    words: int,
    tokens: int,
    pointwise: Pointwise,
) -> None:
    p = problem(words, tokens, pointwise)
    z, lse = logits_and_lse(p)
    a = torch.rand(tokens, generator=torch.Generator().manual_seed(0))

    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        tile = z.to(dtype, copy=True)
        columns = tile.new_full((words,), torch.nan)  # set
        rows = tile.new_full((tokens,), 0.25)  # added to
        scratch = torch.empty_like(tile), torch.empty_like(tile)
        kernels.softmax_gradient_(tile, lse, a.to(dtype), pointwise, columns, rows, scratch)
        return tile, columns, rows

    truth, twin = run(torch.float64), without(lambda: run(torch.float32))
    for name, x, y, true in zip(
        ("tile", "columns", "rows"), run(torch.float32), twin, truth, strict=True
    ):
        assert_as_good_as(x, y, true, 1e-6, dtype=torch.float32, what=name)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.999])
@pytest.mark.parametrize("n", [1, 33, 5000])
def test_tail_threshold(without: Twin[float], n: int, share: float) -> None:
    random = torch.Generator().manual_seed(n)
    mass = torch.randn(n, generator=random).mul(3).exp()
    mass[::7] = mass[0]  # equal entries are kept or set aside together
    threshold = kernels.tail_threshold(mass, share)
    limit = share * float(mass.double().sum())
    assert float(mass[mass < threshold].double().sum()) <= limit * (1 + 1e-12)
    assert float(mass[mass <= threshold].double().sum()) >= limit * (1 - 1e-12)
    twin = without(lambda: kernels.tail_threshold(mass, share))
    assert torch.equal(mass >= threshold, mass >= twin)


def test_tail_threshold_of_nothing_keeps_everything(without: Twin[float]) -> None:
    mass = torch.zeros(10)
    assert kernels.tail_threshold(mass, 0.02) == 0.0
    assert without(lambda: kernels.tail_threshold(mass, 0.02)) == 0.0


@pytest.mark.parametrize("width", [1, 7, 33])
def test_scatter_add(without: Twin[None], width: int) -> None:
    random = torch.Generator().manual_seed(0)
    into = torch.randn(100, width, generator=random)
    ids = torch.randperm(100, generator=random)[:71]
    rows = torch.randn(71, width, generator=random)
    twin = into.clone()
    kernels.scatter_add_(into, ids, rows)
    without(lambda: kernels.scatter_add_(twin, ids, rows))
    assert torch.equal(into, twin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 33, 576])
def test_pair_products(without: Twin[Tensor], width: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, width, generator=random).to(dtype)
    weight = torch.randn(50, width, generator=random).to(dtype)
    weight[49] = weight[2]
    rows = torch.randint(10, (300,), generator=random)
    ids = torch.randint(50, (300,), generator=random)
    ours = kernels.pair_products(hidden, weight, rows, ids, 2**20)
    twin = without(lambda: kernels.pair_products(hidden, weight, rows, ids, 2**20))
    assert_close(ours, twin, rtol=1e-12, atol=1e-12, dtype=torch.float64)
    two, last = (torch.full((10,), token) for token in (2, 49))
    all_rows = torch.arange(10)
    assert torch.equal(
        kernels.pair_products(hidden, weight, all_rows, two, 2**20),
        kernels.pair_products(hidden, weight, all_rows, last, 2**20),
    )
