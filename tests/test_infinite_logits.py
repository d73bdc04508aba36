"""Infinite logits and logits that float32 cannot hold: the rules of docs/lazy.md, for all heads."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from torch import Tensor

import lmhead
from lmhead import AdaptiveHead, HierarchicalHead, LMHead, Sampler, ScreenedHead, reference

V, D = 300, 16
BOTH = pytest.mark.both_cores


def linear_head(weight: Tensor, bias: Tensor | None = None, **options: Any) -> LMHead:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias, requires_grad=False)
    return LMHead.from_linear(linear, **options)


def given(rows: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, D, generator=random) * scale
    return hidden, torch.randn(V, D, generator=random) * scale


@BOTH
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_logit_of_plus_infinity_is_the_largest(rows: int) -> None:
    """As in torch: the token is the argmax, the logsumexp is inf."""
    hidden, weight = given(rows)
    bias = torch.zeros(V)
    bias[[7, 200]] = math.inf
    dense = hidden @ weight.T + bias
    ids = torch.full((rows,), 7)
    found = lmhead.query(
        hidden,
        weight,
        bias=bias,
        argmax=True,
        logsumexp=True,
        entropy=True,
        top_k=3,
        rank=ids,
        log_prob=ids,
    )
    assert found.argmax.tolist() == dense.argmax(-1).tolist() == [7] * rows
    assert found.top_k.indices[:, :2].tolist() == [[7, 200]] * rows
    assert found.top_k.indices[:, 2].tolist() == (hidden @ weight.T).argmax(-1).tolist()
    assert found.top_k.values[:, :2].tolist() == [[math.inf] * 2] * rows
    assert found.logsumexp.tolist() == dense.logsumexp(-1).tolist() == [math.inf] * rows
    assert found.rank.tolist() == [0] * rows
    assert found.log_prob.isnan().all(), "inf - inf: how they share the mass is not defined"
    assert found.entropy.isnan().all()
    others = lmhead.query(hidden, weight, bias=bias, log_prob=ids + 1, rank=ids + 193)
    assert others.log_prob.tolist() == [-math.inf] * rows
    assert others.rank.tolist() == [1] * rows


@BOTH
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_finite_inputs_that_overflow_are_ordered_by_float64(rows: int, dtype: torch.dtype) -> None:
    hidden, weight = (t.to(dtype) for t in given(rows, 1e25))
    truth = hidden.double() @ weight.double().T
    found = lmhead.query(
        hidden, weight, argmax=True, top_k=5, rank=truth.argmin(-1), logsumexp=True, entropy=True
    )
    assert (truth.abs() > torch.finfo(torch.float32).max).any(), "not a case of overflow"
    assert found.argmax.tolist() == truth.argmax(-1).tolist()
    assert found.top_k.indices.tolist() == truth.topk(5).indices.tolist()
    assert found.rank.tolist() == [V - 1] * rows
    assert found.logsumexp.tolist() == [math.inf] * rows, "in float32"
    assert_close(found.entropy, torch.zeros(rows), atol=1e-12)
    head = linear_head(weight)
    assert head(hidden).argmax(-1).tolist() == truth.argmax(-1).tolist()
    assert ScreenedHead(head).argmax(hidden).token.tolist() == truth.argmax(-1).tolist()
    assert Sampler(temperature=0.0)(head(hidden)).token.tolist() == truth.argmax(-1).tolist()


@BOTH
def test_an_infinite_row_leaves_the_others_alone() -> None:
    hidden, weight = given(9)
    clean = lmhead.query(hidden, weight, argmax=True, logsumexp=True, entropy=True)
    hidden[4] = 3e38
    hidden[6, 2] = math.nan
    found = lmhead.query(hidden, weight, argmax=True, logsumexp=True, entropy=True)
    truth = (hidden.double() @ weight.double().T).argmax(-1)
    assert found.argmax[4] == truth[4]
    assert found.argmax[6] == -1
    assert found.logsumexp[6].isnan()
    others = [0, 1, 2, 3, 5, 7, 8]
    assert found.argmax[others].tolist() == clean.argmax[others].tolist()
    assert_close(found.logsumexp[others], clean.logsumexp[others], rtol=1e-6)
    assert_close(found.entropy[others], clean.entropy[others], rtol=1e-5)


@BOTH
@pytest.mark.parametrize("place", ["weight", "bias"])
def test_a_nan_in_the_head_gives_no_token(place: str) -> None:
    hidden, weight = given(3)
    bias = torch.zeros(V)
    bias[0] = math.inf
    (weight[5] if place == "weight" else bias[5:6]).fill_(math.nan)
    found = lmhead.query(hidden, weight, bias=bias, argmax=True, logsumexp=True)
    assert found.argmax.tolist() == [-1] * 3
    assert found.logsumexp.isnan().all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_an_infinite_hidden_state_as_torch_has_it(bad: float) -> None:
    """Some logits +inf, some -inf, or a NaN where a weight is 0."""
    hidden, weight = given(3)
    hidden[1, 0] = bad
    dense = hidden @ weight.T
    assert lmhead.query(hidden, weight, argmax=True).argmax.tolist() == dense.argmax(-1).tolist()
    weight[9, 0] = 0.0
    assert lmhead.query(hidden, weight, argmax=True).argmax[1] == -1


HEADS: dict[str, Callable[[], Any]] = {
    "linear": lambda: LMHead(D, V),
    "adaptive": lambda: AdaptiveHead(D, V, cutoffs=[50, 100]),
    "balanced": lambda: HierarchicalHead(D, V, tree="balanced"),
    "8-ary": lambda: HierarchicalHead(D, V, tree="balanced", arity=8),
}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_states_that_are_not_finite_never_yield_a_sampled_token(kind: str, bad: float) -> None:
    head = HEADS[kind]().requires_grad_(False)
    hidden, _ = given(3)
    clean = head(hidden).argmax(-1)
    hidden[1, 3] = bad
    with pytest.raises(ValueError, match=r"logits must be finite or -inf.*row 1"):
        Sampler(seed=0)(head(hidden))
    logits = head(hidden)
    assert logits.argmax(-1)[[0, 2]].tolist() == clean[[0, 2]].tolist()
    losses = F.cross_entropy(logits, torch.tensor([1, 2, 3]), reduction="none")
    assert losses[[0, 2]].isfinite().all()
    assert not losses[1].isfinite()
    if kind != "linear":  # factors saturate or become NaN: the row is not defined
        assert logits.argmax(-1)[1] == -1
        assert logits.topk(2).indices[1].tolist() == [-1, -1]
        assert logits.logsumexp(-1)[1].isnan()
        assert losses[1].isnan()


@BOTH
@pytest.mark.parametrize("scale", [0.0, -1.0, -0.3, 2.0])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_bias_of_minus_infinity_masks_for_any_scale(scale: float, softcap: float | None) -> None:
    hidden, weight = (t.double() for t in given(4))
    bias = torch.randn(V, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    bias[::3] = -math.inf
    targets = torch.tensor([1, 2, 4, 5])
    options: Any = {"bias": bias, "scale": scale, "softcap": softcap}
    truth = reference.head_logits(
        hidden.numpy(), weight.numpy(), bias=bias.numpy(), scale=scale, softcap=softcap
    )
    found = lmhead.query(hidden, weight, log_prob=targets, entropy=True, argmax=True, **options)
    ids = targets.numpy()
    assert_close(found.log_prob, reference.log_prob(truth, ids), rtol=1e-9, atol=1e-12)
    assert_close(found.entropy, reference.entropy(truth), rtol=1e-9)
    assert found.argmax.tolist() == truth.argmax(-1).tolist()
    leaf = hidden.clone().requires_grad_()
    loss = lmhead.linear_cross_entropy(leaf, weight, targets, label_smoothing=0.1, **options)
    loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert loss.isfinite()
    assert leaf.grad.isfinite().all()
    head = linear_head(weight, bias, scale=scale, softcap=softcap)
    assert head(hidden).argmax(-1).tolist() == truth.argmax(-1).tolist()
    token = Sampler(seed=0)(head(hidden)).token
    assert (token % 3 != 0).all()
