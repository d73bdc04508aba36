"""Argmax and top-k of 2 to 16 rows from float32 sums: always the order of the float64 logits."""

import pytest
import torch
from compare import assert_close
from torch import Tensor

from lmhead.sweep import Pointwise, Questions, Source, few_rows, row_answers
from lmhead.sweep.few_rows import answer_few_rows

D, VOCAB = 80, 700
MAPS = {
    "identity": Pointwise(),
    "scale": Pointwise(scale=0.37, shift=0.1),
    "softcap": Pointwise(scale=0.1, outer=10.0),
}


def near_ties(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return hidden states and a weight with groups of equal and nearly equal tokens."""
    random = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, D, generator=random)
    weight = torch.randn(VOCAB // 10, D, generator=random).repeat(10, 1)
    # A few units in the last place of single entries: less than float32 sums can tell apart.
    off = torch.randint(-1, 2, (VOCAB, D), generator=random) * (torch.arange(VOCAB) % 3)[:, None]
    return hidden.to(dtype), (weight * (1 + off * torch.finfo(dtype).eps)).to(dtype)


def in_float64(source: Source, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best by float64 logits of all tokens, ties to the lowest id."""
    z = source.at(torch.arange(source.vocab).expand(source.rows, -1))
    values, ids = z.sort(dim=1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "tile"), [(2, 700), (9, 1 << 18), (16, 16 * 300)])
@pytest.mark.parametrize("k", [1, 13])
def test_order_is_that_of_float64(
    name: str,
    dtype: torch.dtype,
    rows: int,
    tile: int,
    k: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(few_rows, "_TILE", tile)
    hidden, weight = near_ties(rows, dtype)
    bias = None if name == "identity" else torch.linspace(-0.1, 0.1, VOCAB).round(decimals=1)
    if bias is not None:
        bias[::7] = -torch.inf
    source = Source((hidden,), (weight,), bias, MAPS[name])
    with torch.no_grad():
        answer = answer_few_rows(Questions(source, top_k=k, entropy=True))
        assert answer is not None
        sums, top = answer
        values, ids = in_float64(source, k)
        assert top.top_ids is not None
        assert torch.equal(top.top_ids, ids)
        assert torch.equal(top.top_values, values)
        z = source.at(torch.arange(VOCAB).expand(rows, -1))
    log_p = z.log_softmax(1)
    entropy = -torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0.0).sum(1)
    assert_close(sums.lse, z.logsumexp(1), atol=2e-6)
    assert_close(sums.entropy, entropy, atol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e35])
def test_rows_that_float32_cannot_hold_are_left_to_the_sweep(value: float) -> None:
    hidden, weight = near_ties(4, torch.float32)
    hidden[2, 5] = value
    questions = Questions(Source((hidden,), (weight,), None, Pointwise()), top_k=3)
    with torch.no_grad():
        assert answer_few_rows(questions) is None
        _, top = row_answers(questions)
    assert top.top_ids is not None
    assert bool((top.top_ids[[0, 1, 3]] >= 0).all())


def test_best_tokens_that_are_masked_are_left_to_the_sweep() -> None:
    hidden, weight = near_ties(3, torch.float32)
    bias = torch.full((VOCAB,), -torch.inf)
    bias[:4] = 0.0
    source = Source((hidden,), (weight,), bias, Pointwise())
    with torch.no_grad():
        assert answer_few_rows(Questions(source, top_k=5)) is None
        assert answer_few_rows(Questions(source, top_k=4)) is not None
