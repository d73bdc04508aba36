"""`kept_log_prob`: what was reported when a token was drawn, again and with gradients."""

from typing import Any

import pytest
import torch
from compare import assert_close
from torch import Tensor

from lmhead import Sampler
from lmhead.sampling import kept_log_prob

CHAINS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5, "temperature": 0.7},
    "top_p": {"top_p": 0.8, "temperature": 1.3},
    "typical": {"typical_p": 0.5},
    "min_p": {"min_p": 0.2, "order": "llama.cpp", "temperature": 0.5},
    "one word": {"top_k": 1},
}
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap and scale": {"softcap": 4.0, "scale": 1.5},
}
EVERY_CHAIN = pytest.mark.parametrize("options", CHAINS.values(), ids=CHAINS)
EVERY_HEAD = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)


def problem(dtype: torch.dtype, head: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, 8, generator=random, dtype=torch.float64).to(dtype)
    weight = torch.randn(50, 8, generator=random, dtype=torch.float64).to(dtype)
    more = dict(head)
    if "bias" in head:
        more["bias"] = torch.randn(50, generator=random, dtype=torch.float64).to(dtype)
    return hidden, weight, more


def dense(hidden: Tensor, weight: Tensor, more: dict[str, Any]) -> Tensor:
    z: Tensor = hidden @ weight.T
    if "bias" in more:
        z = torch.add(z, more["bias"])
    z = z * float(more.get("scale", 1.0))
    cap: float | None = more.get("softcap")
    return z if cap is None else torch.tanh(z / cap) * cap


def definition(z: Tensor, token: Tensor, kept: list[Tensor], temperature: float) -> Tensor:
    """The docstring's second line, row by row."""
    rows = [
        (row / temperature)[ids].log_softmax(0)[ids == t][0]
        for row, t, ids in zip(z.flatten(0, -2), token.flatten(), kept, strict=True)
    ]
    return torch.stack(rows).reshape(token.shape)


@pytest.mark.both_cores
@EVERY_CHAIN
@EVERY_HEAD
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_is_what_was_sampled(
    options: dict[str, Any], head: dict[str, Any], dtype: torch.dtype
) -> None:
    hidden, weight, more = problem(dtype, head)
    sampled = Sampler(seed=3, **options)(dense(hidden, weight, more), position=torch.arange(12))
    t = options.get("temperature", 1.0)
    again = kept_log_prob(hidden, weight, sampled.token, sampled.kept, temperature=t, **more)
    assert again.shape == (3, 4)
    atol = 1e-10 if dtype == torch.float64 else 2e-5
    assert_close(again, sampled.log_prob, atol=atol)


@EVERY_CHAIN
@EVERY_HEAD
@pytest.mark.parametrize("max_bytes", [None, 2000])
def test_gradients(options: dict[str, Any], head: dict[str, Any], max_bytes: int | None) -> None:
    hidden, weight, more = problem(torch.float64, head)
    sampled = Sampler(seed=3, **options)(dense(hidden, weight, more), position=torch.arange(12))
    t = options.get("temperature", 1.0)
    upstream = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = [hidden, weight, *([more["bias"]] if "bias" in more else [])]
    for x in inputs:
        x.requires_grad_()
    ours = kept_log_prob(
        hidden, weight, sampled.token, sampled.kept, temperature=t, max_bytes=max_bytes, **more
    )
    truth = definition(dense(hidden, weight, more), sampled.token, list(sampled.kept), t)
    assert_close(ours, truth, atol=1e-11)
    for mine, true in zip(
        torch.autograd.grad((ours * upstream).sum(), inputs),
        torch.autograd.grad((truth * upstream).sum(), inputs),
        strict=True,
    ):
        assert_close(mine, true, atol=1e-10, what="gradient")


def test_what_cannot_be() -> None:
    hidden, weight = torch.randn(2, 8), torch.randn(50, 8)
    kept = [torch.tensor([1, 2]), torch.tensor([3])]
    token = torch.tensor([1, 3])
    with pytest.raises(ValueError, match="temperature must be above 0; got 0"):
        kept_log_prob(hidden, weight, token, kept, temperature=0.0)
    with pytest.raises(ValueError, match="kept must have one list per token, 2; got 1"):
        kept_log_prob(hidden, weight, token, kept[:1])
    with pytest.raises(ValueError, match="kept must hold the token of every row"):
        kept_log_prob(hidden, weight, torch.tensor([1, 4]), kept)
    with pytest.raises(ValueError, match="kept must hold the token of every row"):
        kept_log_prob(hidden, weight, torch.tensor([1, 0]), kept)
