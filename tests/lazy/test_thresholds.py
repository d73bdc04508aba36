"""Lazy logits compared with values that were taken from them: rounding must not decide."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lmhead import LMHead

N, V, D, K = 40, 500, 64, 10
TARGETS = torch.randint(V, (N, 1), generator=torch.Generator().manual_seed(3))
SOME = torch.rand(N, V, generator=torch.Generator().manual_seed(4)) < 0.5
pytestmark = pytest.mark.filterwarnings("ignore::lmhead.PerformanceWarning")

PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "logits": lambda z: z,
    "softmax": lambda z: z.softmax(-1),
    "log_softmax": lambda z: z.log_softmax(-1),
    "temperature": lambda z: z / 0.7,
    "penalty": lambda z: torch.where(z < 0, z * 1.2, z / 1.2),
    "masked": lambda z: z.masked_fill(SOME, -math.inf),
}
# The K-th largest value of each row.
THRESHOLDS: dict[str, Callable[[Any], Any]] = {
    "topk": lambda z: z.topk(K).values[:, -1:],
    "kthvalue": lambda z: z.kthvalue(V + 1 - K, -1, keepdim=True).values,
    "sort": lambda z: z.sort(-1, descending=True).values[:, K - 1 : K],
    "gather": lambda z: z.gather(-1, z.detach().topk(K).indices[:, -1:]),
    "materialize": lambda z: z.materialize().topk(K).values[:, -1:],
    "rows": lambda z: torch.stack([row.topk(K).values[-1:] for row in z]),
}


def lazy(*, trained: bool = False) -> Any:
    torch.manual_seed(0)
    head = LMHead(D, V).requires_grad_(trained)
    return head(torch.randn(N, D))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_k_largest_are_not_below_the_kth(program: str, threshold: str, trained: bool) -> None:
    z = PROGRAMS[program](lazy(trained=trained))
    kth = THRESHOLDS[threshold](z)
    assert ((z >= kth).sum(-1) == K).all()
    assert ((z < kth).sum(-1) == V - K).all()
    assert ((z == kth).sum(-1) == 1).all()


@pytest.mark.parametrize("build", ["sort", "cumsum", "argsort"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_threshold_from_before_the_tensor_was_built(program: str, build: str) -> None:
    z = PROGRAMS[program](lazy())
    kth = z.topk(K).values[:, -1:]
    getattr(z, build)(-1)
    assert ((z >= kth).sum(-1) == K).all()


@pytest.mark.parametrize("program", ["logits", "softmax", "temperature"])
def test_thresholds_that_are_numbers(program: str) -> None:
    z = PROGRAMS[program](lazy())
    for row in z:
        assert int((row >= row.topk(K).values[-1].item()).sum()) == K
    one = PROGRAMS[program](lazy()[:1])
    assert int((one >= torch.topk(one, K)[0][..., -1, None]).sum()) == K


def test_differences_from_a_value_of_the_row() -> None:
    z = lazy()
    best, kth = z.amax(-1, keepdim=True), z.topk(K).values[:, -1:]
    assert ((z - best == 0).sum(-1) == 1).all()
    assert ((z - best > 0).sum(-1) == 0).all()
    assert ((z - kth >= 0).sum(-1) == K).all()
    assert ((kth - z <= 0).sum(-1) == K).all()
    assert (((z - z.gather(-1, TARGETS)) == 0).sum(-1) == 1).all()


@pytest.mark.parametrize("threshold", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("program", PROGRAMS)
def test_infinite_thresholds(program: str, threshold: float) -> None:
    z = PROGRAMS[program](lazy())
    dense = z.materialize()
    limit = torch.full((N, 1), threshold)
    for compare in (torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne):
        assert torch.equal(compare(z, limit).sum(-1), compare(dense, limit).sum(-1))


def test_top_k_of_fewer_allowed_tokens() -> None:
    allowed = torch.zeros(N, V, dtype=torch.bool)
    allowed[:, [0, 3, 5]] = True

    def filtered(z: Any) -> Tensor:
        z = z.masked_fill(~allowed, -math.inf)
        kth = z.topk(K).values[:, -1:]
        return z.masked_fill(z < kth, -math.inf).softmax(-1)  # type: ignore[no-any-return]

    kept = filtered(lazy()).materialize()  # type: ignore[attr-defined]
    assert torch.equal(kept > 0, allowed)


@pytest.mark.parametrize("number", [0.5, 0.1, -1.0, 3.0])
def test_numbers_that_were_written_down_are_compared_as_they_are(number: float) -> None:
    z = lazy()
    z[:, 0] = number * (1 + 2e-7)
    z[:, 1] = number
    stored = z.materialize()[:, :2]
    assert torch.equal((z > number).materialize()[:, :2], stored > number)
    assert torch.equal((z == number).materialize()[:, :2], stored == number)
