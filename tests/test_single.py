"""One token is answered from float64 logits: as the reference would, and as in a batch."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import lmhead
from lmhead.sweep import Pointwise, Questions, Source, native, single

pytestmark = pytest.mark.skipif(native.core is None, reason="a path of the compiled core")


def asked(hidden: Tensor, weight: Tensor, **options: Any) -> lmhead.Answers:
    ids = torch.tensor([3]).expand(len(hidden))
    return lmhead.query(
        hidden,
        weight,
        log_prob=ids,
        rank=ids,
        entropy=True,
        logsumexp=True,
        argmax=True,
        top_k=5,
        **options,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "scale": 0.7}])
def test_the_answers_are_those_of_a_batch(dtype: torch.dtype, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 40).to(dtype)
    weight, bias = torch.randn(300, 40).to(dtype), torch.randn(300).to(dtype)
    weight[7] = weight[150] = weight[3]  # words that tie
    bias[7] = bias[150] = bias[3]
    bias[10] = -math.inf
    batch = asked(hidden, weight, bias=bias, **options)
    for row in range(2):
        one = asked(hidden[row : row + 1], weight, bias=bias, **options)
        for name in ("rank", "argmax"):
            assert torch.equal(getattr(one, name)[0], getattr(batch, name)[row])
        assert one.top_k is not None
        assert batch.top_k is not None
        assert torch.equal(one.top_k.indices[0], batch.top_k.indices[row])
        for name in ("log_prob", "entropy", "logsumexp"):
            torch.testing.assert_close(
                getattr(one, name)[0], getattr(batch, name)[row], rtol=2e-5, atol=2e-5
            )


def test_it_is_as_good_as_float64() -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(1, 200), torch.randn(5000, 200)
    z = (hidden.double() @ weight.double().T)[0]
    one = asked(hidden.requires_grad_(), weight)
    assert one.logsumexp is not None
    assert one.log_prob is not None
    assert float(one.logsumexp.detach()) == pytest.approx(float(z.logsumexp(0)), rel=1e-7)
    (grad,) = torch.autograd.grad(one.log_prob.sum(), hidden)
    want = weight[3].double() - z.softmax(0) @ weight.double()
    torch.testing.assert_close(grad[0].double(), want, rtol=1e-5, atol=3e-5)


def test_a_row_without_an_order() -> None:
    weight = torch.randn(50, 8)
    nothing = asked(torch.randn(1, 8), weight, bias=torch.full((50,), -math.inf))
    broken = asked(torch.full((1, 8), math.nan), weight)
    for answers in (nothing, broken):
        assert answers.argmax is not None
        assert answers.rank is not None
        assert answers.top_k is not None
        assert answers.argmax.tolist() == answers.rank.tolist() == [-1]
        assert answers.top_k.indices.tolist() == [[-1] * 5]


def test_masked_words_fill_up_the_top() -> None:
    bias = torch.full((50,), -math.inf)
    bias[[40, 4]] = 0.0
    found = asked(torch.zeros(1, 8), torch.randn(50, 8), bias=bias)
    assert found.top_k is not None
    assert found.top_k.indices.tolist() == [[4, 40, 0, 1, 2]]


def test_which_questions_go_this_way() -> None:
    hidden, weight = torch.randn(1, 8), torch.randn(50, 8)
    source = Source((hidden,), (weight,), None, Pointwise())
    assert single.serves(Questions(source, top_k=1))
    assert not single.serves(Questions(source, top_k=1, max_bytes=1024))
    assert not single.serves(Questions(source, other=source))
    two = Source((torch.randn(2, 8),), (weight,), None, Pointwise())
    assert not single.serves(Questions(two, top_k=1))
    wide = Source((hidden.double(),), (weight.double(),), None, Pointwise())
    assert not single.serves(Questions(wide, top_k=1))
