"""The loss of a real model on real text: SmolLM2-135M on four windows of WikiText-2."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from compare import assert_as_good_as, assert_close
from safetensors.torch import load_file
from shared_data import SMOLLM2_HEAD, SMOLLM2_STATES, needs
from torch import Tensor

import lmhead

FILES = (SMOLLM2_STATES, SMOLLM2_HEAD)

pytestmark = needs(*FILES)


class Real(NamedTuple):
    hidden: Tensor  # (2048, 576) float32
    weight: Tensor  # (49152, 576) float16
    targets: Tensor  # (2048,)
    nll: Tensor  # (2048,) as the float32 model gave them


@pytest.fixture(scope="module")
def real() -> Real:
    states, head = (load_file(file) for file in FILES)
    return Real(states["hidden"], head["weight"], states["targets"].long(), states["nll"])


def test_mean_loss(real: Real) -> None:
    loss = lmhead.linear_cross_entropy(real.hidden, real.weight.float(), real.targets)
    assert_close(loss, 3.185, atol=0.001, dtype=torch.float32)


def test_loss_of_each_token(real: Real) -> None:
    nll = lmhead.linear_cross_entropy(
        real.hidden, real.weight.float(), real.targets, reduction="none"
    )
    assert_close(nll, real.nll, atol=0.01, dtype=torch.float32)


def test_lazy_head_and_query_give_the_same(real: Real) -> None:
    some = slice(0, 256)
    linear = torch.nn.Linear(576, 49152, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(real.weight.float(), requires_grad=False)
    head = lmhead.LMHead.from_linear(linear)
    lazy = F.cross_entropy(head(real.hidden[some]), real.targets[some], reduction="none")
    asked = lmhead.query(real.hidden[some], linear.weight, log_prob=real.targets[some])
    assert_close(lazy, real.nll[some], atol=0.01)
    assert asked.log_prob is not None
    assert_close(-asked.log_prob, real.nll[some], atol=0.01)


def test_gradients_of_some_tokens(real: Real) -> None:
    """Against torch in float64, as good as torch in float32."""
    some = slice(0, 64)
    grads: list[tuple[Tensor, ...]] = []
    for dtype in (torch.float32, torch.float32, torch.float64):
        hidden = real.hidden[some].to(dtype, copy=True).requires_grad_()
        weight = real.weight.to(dtype, copy=True).requires_grad_()
        if grads:
            loss = F.cross_entropy(F.linear(hidden, weight), real.targets[some])
        else:
            loss = lmhead.linear_cross_entropy(hidden, weight, real.targets[some])
        grads.append(torch.autograd.grad(loss, (hidden, weight)))
    for ours, plain, truth in zip(*grads, strict=True):
        assert_as_good_as(ours, plain, truth, 1e-6, dtype=torch.float32)
