"""Around a call: `torch.func`, `torch.compile` and `torch.autocast` keep the numbers of torch."""

import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_as_good_as, assert_close
from lazy_and_dense import backward, ids, twins
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vmap

from lmhead import LMHead, linear_cross_entropy, query

N, D, V = 6, 4, 9
TARGETS = ids(N, vocab=V)


def tensors(*leading: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    hidden = torch.randn(*leading, N, D, dtype=torch.float64)
    return hidden, torch.randn(V, D, dtype=torch.float64)


def dense(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets, **options)


def assert_alike(ours: Any, theirs: Any) -> None:
    ours, theirs = (x if isinstance(x, tuple) else (x,) for x in (ours, theirs))
    for a, e in zip(ours, theirs, strict=True):
        assert_close(a, e, rtol=1e-11, atol=1e-13)


# --- torch.func -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_func_grad(reduction: Any) -> None:
    hidden, weight = tensors()
    ours = grad(linear_cross_entropy, argnums=(0, 1))(hidden, weight, TARGETS, reduction=reduction)
    theirs = grad(dense, argnums=(0, 1))(hidden, weight, TARGETS, reduction=reduction)
    assert_alike(ours, theirs)


@pytest.mark.parametrize("first", ["hidden", "weight"])
@pytest.mark.parametrize("second", ["hidden", "weight"])
def test_func_grad_of_grad(first: str, second: str) -> None:
    hidden, weight = tensors()
    inner, outer = ({"hidden": 0, "weight": 1}[name] for name in (first, second))

    def twice(loss: Any) -> Any:
        def slope(hidden: Tensor, weight: Tensor) -> Tensor:
            gradient: Tensor = grad(loss, argnums=inner)(hidden, weight, TARGETS)
            return gradient.square().sum()

        return grad(slope, argnums=outer)(hidden, weight)

    assert_alike(twice(linear_cross_entropy), twice(dense))


def test_jacrev_of_jacrev() -> None:
    hidden, weight = tensors()

    def hessian(loss: Any) -> Any:
        return jacrev(jacrev(lambda h: loss(h, weight, TARGETS)))(hidden)

    assert_alike(hessian(linear_cross_entropy), hessian(dense))


def test_func_grad_of_a_module() -> None:
    head = LMHead(D, V, bias=True, dtype=torch.float64)
    hidden, _ = tensors()
    parameters = {name: p.detach() for name, p in head.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(functional_call(head, parameters, (hidden,)), TARGETS)

    ours = grad(loss)(parameters)
    theirs = grad(lambda p: F.cross_entropy(F.linear(hidden, p["weight"], p["bias"]), TARGETS))(
        parameters
    )
    for name in parameters:
        assert_alike(ours[name], theirs[name])


def test_vmap_over_hidden_and_targets() -> None:
    hidden, weight = tensors(3)
    targets = ids(3, N, vocab=V)
    over: dict[str, Any] = {"in_dims": (0, None, 0)}
    assert_alike(
        vmap(linear_cross_entropy, **over)(hidden, weight, targets),
        vmap(dense, **over)(hidden, weight, targets),
    )


def test_vmap_over_weights() -> None:
    hidden, weight = tensors()
    weights = torch.stack([weight, weight.flip(0), -weight])
    over: dict[str, Any] = {"in_dims": (None, 0, None)}
    assert_alike(
        vmap(linear_cross_entropy, **over)(hidden, weights, TARGETS),
        vmap(dense, **over)(hidden, weights, TARGETS),
    )


def test_per_sample_gradients() -> None:
    hidden, weight = tensors(3)
    targets = ids(3, N, vocab=V)
    targets[1, 2] = -100

    def per_sample(loss: Any) -> Any:
        return vmap(grad(loss, argnums=(0, 1)), in_dims=(0, None, 0))(hidden, weight, targets)

    assert_alike(per_sample(linear_cross_entropy), per_sample(dense))


def test_vmap_of_one_token() -> None:
    hidden, weight = tensors()
    over: dict[str, Any] = {"in_dims": (0, None, 0)}
    assert_alike(
        vmap(grad(linear_cross_entropy, argnums=1), **over)(hidden, weight, TARGETS),
        vmap(grad(dense, argnums=1), **over)(hidden, weight, TARGETS),
    )


def test_jacrev() -> None:
    hidden, weight = tensors()

    def ours(weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, TARGETS, reduction="none")

    assert_alike(
        jacrev(ours)(weight),
        jacrev(lambda w: dense(hidden, w, TARGETS, reduction="none"))(weight),
    )


def test_jacrev_and_vmap_of_query() -> None:
    hidden, weight = tensors()

    def ours(hidden: Tensor) -> tuple[Tensor | None, ...]:
        answers = query(hidden, weight, log_prob=TARGETS, entropy=True, logsumexp=True)
        return answers.log_prob, answers.entropy, answers.logsumexp

    def theirs(hidden: Tensor) -> tuple[Tensor, ...]:
        logits = F.linear(hidden, weight)
        log_p = logits.log_softmax(-1)
        picked = log_p.gather(-1, TARGETS[:, None])[:, 0]
        return picked, -(log_p.exp() * log_p).sum(-1), logits.logsumexp(-1)

    assert_alike(jacrev(ours)(hidden), jacrev(theirs)(hidden))
    many = torch.stack([hidden, -hidden])
    assert_alike(vmap(ours)(many), vmap(theirs)(many))


# --- torch.compile --------------------------------------------------------------------------------

# torch itself warns so when a graph breaks where a tensor with a history is alive.
QUIET = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)
BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler"),
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
@QUIET
def test_compile_keeps_the_numbers_of_a_training_step(backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    body = torch.nn.Linear(D, D)
    head = LMHead(D, V, bias=True)
    parameters = [*body.parameters(), *head.parameters()]

    def step(hidden: Tensor, targets: Tensor) -> Tensor:
        trunk = torch.tanh(body(hidden))
        return linear_cross_entropy(trunk, head.weight, targets, bias=head.bias)

    compiled = torch.compile(step, backend=backend)
    hidden = torch.randn(N, D)
    for targets in (TARGETS, TARGETS.flip(0)):
        ours, theirs = compiled(hidden, targets), step(hidden, targets)
        assert_close(ours, theirs, rtol=1e-5)
        for a, e in zip(
            torch.autograd.grad(ours, parameters),
            torch.autograd.grad(theirs, parameters),
            strict=True,
        ):
            assert_close(a, e, rtol=1e-4, atol=1e-6)


@QUIET
def test_compile_keeps_the_numbers_of_a_lazy_head() -> None:
    torch._dynamo.reset()
    case = twins(N, dtype=torch.float32)

    def step(hidden: Tensor) -> Tensor:
        return F.cross_entropy(case.head(torch.tanh(hidden)), ids(N))

    ours, theirs = torch.compile(step, backend="aot_eager")(case.hidden), step(case.hidden)
    assert_close(ours, theirs, rtol=1e-5)
    for a, e in zip(
        torch.autograd.grad(ours, case.leaves),
        torch.autograd.grad(theirs, case.leaves),
        strict=True,
    ):
        assert_close(a, e, rtol=1e-4, atol=1e-6)


# --- torch.autocast -------------------------------------------------------------------------------


def run_under_autocast(loss: Any, leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(*leaves)
    return value, list(torch.autograd.grad(value, leaves))


@pytest.mark.parametrize("spelling", ["functional", "lazy", "query"])
def test_autocast(spelling: str) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(64, 32, requires_grad=True), torch.randn(200, 32, requires_grad=True)]
    targets = ids(64, vocab=200)
    head = LMHead(32, 200)
    head.weight = torch.nn.Parameter(leaves[1])
    leaves[1] = head.weight

    def ours(hidden: Tensor, weight: Tensor) -> Any:
        if spelling == "functional":
            return linear_cross_entropy(hidden, weight, targets)
        if spelling == "lazy":
            return F.cross_entropy(head(hidden), targets)
        log_prob = query(hidden, weight, log_prob=targets).log_prob
        assert log_prob is not None
        return -log_prob.mean()

    value, gradients = run_under_autocast(ours, leaves)
    plain, plain_gradients = run_under_autocast(lambda h, w: dense(h, w, targets), leaves)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    truth = dense(exact[0], exact[1], targets)
    assert_as_good_as(value, plain, truth, 1e-3, dtype=plain.dtype)
    for a, p, e in zip(gradients, plain_gradients, torch.autograd.grad(truth, exact), strict=True):
        assert_as_good_as(a, p, e, 1e-2, dtype=p.dtype)


def test_autocast_of_the_lazy_head_looks_like_linear() -> None:
    head, linear = LMHead(D, V), torch.nn.Linear(D, V)
    hidden = torch.randn(N, D)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = head(hidden), linear(hidden)
    assert ours.dtype == theirs.dtype


def test_autocast_backward_outside_the_region() -> None:
    head = LMHead(D, V)
    hidden = torch.randn(N, D, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(head(hidden), TARGETS)
    backward(loss)
    assert head.weight.grad is not None
    assert head.weight.grad.dtype == torch.float32
