"""The best tokens of one row in one call, and step by step: the same tokens, values and counts."""

import math

import pytest
import torch

from lmhead.screen import screen_kernels
from lmhead.screen.build_copy import build
from lmhead.screen.candidates import Candidates, decide
from lmhead.screen.quantized_weight import BLOCK, QuantizedWeight
from lmhead.sweep import Pointwise, Source, kernels
from screen import heads


def candidates(
    weight: torch.Tensor,
    hidden: torch.Tensor,
    bias: torch.Tensor | None,
    copy: QuantizedWeight | None = None,
) -> Candidates:
    source = Source((hidden,), (weight,), bias, Pointwise())
    wide = None if bias is None else bias.double()
    return Candidates(copy or build(weight), source, wide)


@pytest.mark.parametrize("kind", ["plain", "outlier_columns", "twins"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("k", [1, 2, 9])
def test_one_call_and_many_steps(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, biased: bool, k: int
) -> None:
    random = torch.Generator().manual_seed(k)
    vocab = 9 * BLOCK + 5
    if kind == "twins":
        weight = heads.plain(7, 48, random)[torch.randint(7, (vocab,), generator=random)]
    else:
        weight = getattr(heads, kind)(vocab, 48, random)
    weight = weight.to(dtype)
    bias = heads.normal(vocab, random=random) if biased else None
    if bias is not None:
        bias[3] = -torch.inf
    for hidden in heads.states(6, weight.float(), random).to(dtype):
        found = candidates(weight, hidden[None], bias)
        ours = decide(found, k)
        with monkeypatch.context() as patch:
            patch.setattr(Candidates, "decide_in_core", lambda *_: None)
            steps = decide(candidates(weight, hidden[None], bias), k)
        assert bool(ours.decided) == bool(steps.decided)
        if bool(ours.decided):
            assert torch.equal(ours.ids, steps.ids)
            assert torch.equal(ours.values, steps.values)
            assert int(ours.rescored) >= k


def test_a_copy_of_another_weight_is_noticed() -> None:
    random = torch.Generator().manual_seed(1)
    weight = heads.plain(BLOCK * 3, 32, random)
    hidden = heads.states(1, weight, random)
    found = candidates(weight + 0.5, hidden, None, copy=build(weight))
    with pytest.raises(RuntimeError, match="outside its bounds"):
        decide(found, 2)


def test_masked_tokens_among_the_best_are_not_decided() -> None:
    weight = heads.plain(BLOCK + 1, 8, torch.Generator().manual_seed(2))
    bias = torch.full((len(weight),), -torch.inf)
    bias[5] = 0.0
    assert not bool(decide(candidates(weight, weight[:1], bias), 2).decided)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_best_of_the_approximate_ones(rows: int) -> None:
    random = torch.Generator().manual_seed(rows)
    approx = torch.randn(rows, 5 * BLOCK + 3, generator=random)
    approx[:, 7] = approx[:, 700] = 4.0
    padded = torch.nn.functional.pad(approx, (0, BLOCK - 3), value=-math.inf)
    top = padded.view(rows, -1, BLOCK).amax(2).contiguous()
    for k in (1, 2, 6):
        ids = screen_kernels.best(approx, top, k)
        assert ids.shape == (rows, k)
        assert bool((ids.diff(dim=1) > 0).all())
        chosen = approx.gather(1, ids).sort(descending=True).values
        assert torch.equal(chosen, approx.topk(k).values)


def test_both_ways_are_there() -> None:
    """The one call is what serves a plain head, if there is a core."""
    weight = heads.plain(BLOCK * 2, 8, torch.Generator().manual_seed(4))
    found = candidates(weight, weight[:1], None)
    assert (found.decide_in_core(1, 256) is not None) == (kernels.core is not None)
