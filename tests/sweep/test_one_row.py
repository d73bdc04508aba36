"""One token is answered from float64 logits: as the reference would, and as in a batch."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import lmhead
from lmhead.sweep import Pointwise, Questions, Source, exact_decisions, kernels, run_sweep

pytestmark = pytest.mark.skipif(kernels.core is None, reason="a path of the compiled core")


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
    weight[7] = weight[150] = weight[3]  # tokens that tie
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
    one = asked(hidden, weight)
    assert one.logsumexp is not None
    assert float(one.logsumexp) == pytest.approx(float(z.logsumexp(0)), rel=1e-7)


@pytest.mark.parametrize("size", [0.3, 0.7])
def test_gradients_where_the_model_is_sure(size: float) -> None:
    """p is all but 1: what is left of the gradient must not drown in another sum's rounding."""
    torch.manual_seed(2)
    weight = torch.randn(5000, 576)
    hidden = (size * 0.1 * weight[3][None]).requires_grad_()
    losses = [
        lmhead.linear_cross_entropy(rows, weight, torch.full((len(rows),), 3), reduction="sum")
        for rows in (hidden, hidden.expand(2, -1))
    ]
    one, two = (torch.autograd.grad(loss, hidden)[0] for loss in losses)
    log_prob = lmhead.query(hidden, weight, log_prob=torch.tensor([3])).log_prob
    assert log_prob is not None
    (asked,) = torch.autograd.grad(log_prob.sum(), hidden)
    torch.testing.assert_close(one, two / 2, rtol=0.05, atol=1e-9)
    torch.testing.assert_close(-asked, two / 2, rtol=0.05, atol=1e-9)


def test_what_has_no_gradient_is_asked_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that is being trained answers an argmax of one token as quickly."""

    def sweep(*_: object) -> None:
        pytest.fail("a sweep was made")

    monkeypatch.setattr(run_sweep, "answer", sweep)
    hidden, weight = torch.randn(1, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    best = lmhead.query(hidden, weight, argmax=True, top_k=3, rank=torch.tensor([1])).argmax
    assert best is not None
    assert int(best) == int((hidden @ weight.T).argmax())


def test_a_draw_near_the_end_is_a_token_that_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the tokens' probabilities add up to less than 1, the rest would go to any token."""

    def nearly_one(*shape: int, **options: Any) -> Tensor:
        return torch.full(shape, 1 - 1e-6, dtype=options["dtype"])

    torch.manual_seed(3)
    weight = torch.randn(5000, 576)
    head = lmhead.LMHead(576, 5000, bias=False)
    states = 3 * torch.randn(20, 1, 576)
    monkeypatch.setattr(torch, "rand", nearly_one)
    for hidden in states:
        logits = torch.func.functional_call(head, {"weight": weight}, (hidden,))
        drawn = logits.softmax(-1).multinomial(1)
        p = (hidden.double() @ weight.double().T)[0].softmax(0)
        assert float(p[drawn[0, 0]]) > 1e-12


def test_no_ids_and_infinite_logits_as_in_a_batch() -> None:
    hidden, weight = torch.randn(2, 8), torch.randn(50, 8)
    none = torch.zeros(1, 0, dtype=torch.int64)
    assert lmhead.query(hidden[:1], weight, rank=none).rank is not None
    bias = torch.zeros(50)
    bias[2] = math.inf
    batch, one = asked(hidden, weight, bias=bias), asked(hidden[:1], weight, bias=bias)
    assert batch.argmax is not None
    assert one.argmax is not None
    assert one.argmax[0] == batch.argmax[0]
    with torch.device("meta"):
        best = lmhead.query(hidden[:1], weight, argmax=True).argmax
    assert best is not None
    assert int(best) >= 0


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


def test_masked_tokens_fill_up_the_top() -> None:
    bias = torch.full((50,), -math.inf)
    bias[[40, 4]] = 0.0
    found = asked(torch.zeros(1, 8), torch.randn(50, 8), bias=bias)
    assert found.top_k is not None
    assert found.top_k.indices.tolist() == [[4, 40, 0, 1, 2]]


def test_which_questions_go_this_way() -> None:
    hidden, weight = torch.randn(1, 8), torch.randn(50, 8)
    source = Source((hidden,), (weight,), None, Pointwise())
    assert exact_decisions.answer_one_row(Questions(source, top_k=1)) is not None
    assert exact_decisions.answer_one_row(Questions(source, top_k=1, max_bytes=1024)) is None
    assert exact_decisions.answer_one_row(Questions(source, other=source)) is None
    two = Source((torch.randn(2, 8),), (weight,), None, Pointwise())
    assert exact_decisions.answer_one_row(Questions(two, top_k=1)) is None
    wide = Source((hidden.double(),), (weight.double(),), None, Pointwise())
    assert exact_decisions.answer_one_row(Questions(wide, top_k=1)) is None
