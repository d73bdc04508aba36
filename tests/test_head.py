"""`LMHead`: the weights of `nn.Linear`, shared and never copied, with bias, soft-cap and scale."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from lazy_and_dense import Twins, as_function, assert_same, backward, ids, materialized, twins
from torch import Tensor, nn

from lmhead import LMHead, PerformanceWarning

D, V = 5, 13


class Tied(nn.Module):
    """The smallest model with tied weights: embed a token, guess the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.head = LMHead.tied(self.embedding)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(torch.tanh(self.embedding(tokens)))


def is_tied(model: Tied) -> bool:
    return (
        model.head.weight is model.embedding.weight
        and model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
    )


# --- the same weights as nn.Linear ----------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16])
def test_starts_as_linear_does(bias: bool, dtype: torch.dtype | None) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(D, V, bias=bias, dtype=dtype)
    after_linear = torch.rand(1)
    torch.manual_seed(1)
    head = LMHead(D, V, bias=bias, dtype=dtype)
    assert torch.equal(torch.rand(1), after_linear), "it must draw as many random numbers"
    ours, theirs = head.state_dict(), linear.state_dict()
    assert list(ours) == list(theirs)
    for name in theirs:
        assert_close(ours[name], theirs[name], dtype=theirs[name].dtype)
    assert isinstance(head.weight, nn.Parameter)


def test_the_textbook_example() -> None:
    torch.manual_seed(0)
    head = LMHead(2, 3, bias=True)
    logits = materialized(head(torch.tensor([[0.0, 1.0], [2.0, 3.0]])))
    expected = [[0.3653, 0.0403, 0.1269], [1.1134, -2.1645, -0.0386]]
    assert_close(logits, torch.tensor(expected), atol=5.1e-5)


def test_device_of_the_caller() -> None:
    head = LMHead(D, V, bias=True, device="meta")
    assert {p.device.type for p in head.parameters()} == {"meta"}
    assert head(torch.empty(4, D, device="meta")).shape == (4, V)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_bias_softcap_and_scale(bias: bool, softcap: float | None, scale: float) -> None:
    case = twins(4, bias=bias, softcap=softcap, scale=scale)
    assert (case.head.softcap, case.head.scale) == (softcap, scale)
    assert (case.head.bias is not None) == bias
    assert_same(case, lambda z: F.cross_entropy(z, ids(4)))
    assert_same(case, lambda z: z.logsumexp(-1))
    assert_same(case, materialized)


def test_repr_names_the_sizes_and_the_options_in_use() -> None:
    plain = repr(LMHead(D, V))
    assert "LMHead" in plain
    assert "5" in plain
    assert "13" in plain
    assert "softcap" not in plain or "None" in plain
    full = repr(LMHead(D, V, bias=True, softcap=30.0, scale=0.5))
    for word in ["bias=True", "softcap=30.0", "scale=0.5"]:
        assert word in full


# --- sharing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_from_linear_shares_the_parameters(bias: bool) -> None:
    linear = nn.Linear(D, V, bias=bias)
    head = LMHead.from_linear(linear, softcap=4.0, scale=2.0)
    assert head.weight is linear.weight
    assert head.bias is linear.bias
    assert (head.softcap, head.scale) == (4.0, 2.0)
    backward(F.cross_entropy(head(torch.randn(3, D)), ids(3)))
    assert linear.weight.grad is not None


def test_tied_shares_the_weight_and_may_have_a_bias_of_its_own() -> None:
    embedding = nn.Embedding(V, D, dtype=torch.float64)
    head = LMHead.tied(embedding, bias=True, softcap=4.0, scale=2.0)
    assert head.weight is embedding.weight
    assert head.bias is not None
    assert head.bias.shape == (V,)
    assert head.bias.dtype == torch.float64
    assert (head.softcap, head.scale) == (4.0, 2.0)
    assert LMHead.tied(embedding).bias is None


def test_frozen_weights_stay_frozen() -> None:
    linear = nn.Linear(D, V).requires_grad_(False)
    assert not LMHead.from_linear(linear).weight.requires_grad


def test_ties_survive_a_change_of_dtype() -> None:
    model = Tied()
    for dtype in [torch.float64, torch.bfloat16, torch.float32]:
        model.to(dtype)
        assert is_tied(model)
        assert model.head.weight.dtype == dtype
        assert model(ids(3)).dtype == dtype


def test_ties_survive_a_state_dict() -> None:
    torch.manual_seed(0)
    model, other = Tied(), Tied()
    state = model.state_dict()
    assert set(state) == {"embedding.weight", "head.weight"}
    other.load_state_dict(state)
    assert is_tied(other)
    assert_close(other.head.weight, model.head.weight)
    assert other.head.weight is not model.head.weight


def test_a_head_loads_the_state_of_a_linear() -> None:
    linear = nn.Linear(D, V)
    head = LMHead(D, V, bias=True)
    head.load_state_dict(linear.state_dict())
    assert_close(head.weight, linear.weight)
    nn.Linear(D, V).load_state_dict(head.state_dict())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_ties_survive_a_copy(how: str) -> None:
    model = Tied()
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert is_tied(other)
    assert other.head.weight.data_ptr() != model.head.weight.data_ptr()
    assert_close(other(ids(3)).logsumexp(-1), model(ids(3)).logsumexp(-1))


def test_a_tied_weight_gets_the_sum_of_both_gradients() -> None:
    torch.manual_seed(0)
    model = Tied().double()
    weight = model.embedding.weight
    tokens, targets = ids(9), ids(9).flip(0)
    backward(F.cross_entropy(model(tokens), targets))
    dense = F.cross_entropy(torch.tanh(F.embedding(tokens, weight)) @ weight.T, targets)
    (expected,) = torch.autograd.grad(dense, [weight])
    assert_close(weight.grad, expected, rtol=1e-12, atol=1e-14)
    assert len(list(model.parameters())) == 1


# --- a low-rank delta -----------------------------------------------------------------------------


def low_rank(
    rank: int = 2, *, frozen: bool, **options: Any
) -> tuple[Twins, nn.Parameter, nn.Parameter]:
    """A head with W + B A, its A and its B."""
    case = twins(6, **options)
    before = {id(p) for p in case.head.parameters()}
    case.head.add_low_rank(rank)
    added = [p for p in case.head.parameters() if id(p) not in before]
    assert len(added) == 2
    (a,) = [p for p in added if p.shape == (rank, D)]
    (b,) = [p for p in added if p.shape == (V, rank)]
    case.head.weight.requires_grad_(not frozen)
    return case, a, b


def test_low_rank_changes_nothing_at_first() -> None:
    case, a, b = low_rank(frozen=True)
    assert torch.count_nonzero(b) == 0
    assert torch.count_nonzero(a) == a.numel()
    assert a.requires_grad
    assert b.requires_grad
    assert {a.dtype, b.dtype} == {torch.float64}
    assert_close(case.lazy.logsumexp(-1), case.dense.logsumexp(-1), rtol=1e-12)
    assert "rank" in repr(case.head)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(
    "question",
    [
        "F.cross_entropy(z, ids(6))",
        "F.cross_entropy(z, ids(6), reduction='none') @ torch.arange(6).double()",
        "z.log_softmax(-1).gather(-1, ids(6, 2)).square().sum()",
        "z.logsumexp(-1).square().sum()",
        "z.max(-1).values.square().sum()",
        "z[..., 4].square().sum()",
        "(z / 2 + 1).logsumexp(-1).square().sum()",
    ],
)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_low_rank_trains_as_the_merged_weight_would(
    frozen: bool, question: str, softcap: float | None
) -> None:
    case, a, b = low_rank(frozen=frozen, softcap=softcap, scale=0.7)
    with torch.no_grad():
        b.copy_(torch.randn(b.shape, dtype=b.dtype))
    base = case.head.weight.detach().clone()

    assert case.head.bias is not None
    merged = 0.7 * (case.hidden @ (case.head.weight + b @ a).T + case.head.bias)
    if softcap is not None:
        merged = softcap * torch.tanh(merged / softcap)
    leaves = [case.hidden, *(p for p in case.head.parameters() if p.requires_grad)]
    ask = as_function(question)
    ours, theirs = ask(case.lazy), ask(merged)
    assert_close(ours, theirs, rtol=1e-12)
    for actual, expected in zip(
        torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True
    ):
        assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(case.head.weight, base)


def test_low_rank_on_a_tied_head_leaves_the_embedding_alone() -> None:
    model = Tied()
    before = model.embedding.weight.detach().clone()
    model.head.add_low_rank(2)
    assert is_tied(model)
    assert torch.equal(model.embedding.weight, before)
    model.to(torch.float64)
    backward(F.cross_entropy(model(ids(4)), ids(4)))
    other = copy.deepcopy(model)
    assert is_tied(other)
    assert len(list(other.parameters())) == 3


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "scale": -0.5}])
def test_trace_and_export_record_the_dense_computation(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    head = LMHead(8, 40, bias=True, **options).add_low_rank(2)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.normal_()
            if name == "bias":
                parameter[3] = -torch.inf
    first, second = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    exported = torch.export.export(head, (first,)).module()
    traced = torch.jit.trace(head, (first,))  # type: ignore[no-untyped-call]
    with pytest.warns(PerformanceWarning):
        expected = head(second).materialize()
    for made in (exported, traced):
        torch.testing.assert_close(made(second), expected)
