"""Many answers about one head: their gradients are added up in one tensor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch_watch import Watch

from lmhead import LMHead, PerformanceWarning

N, V, D = 96, 4099, 24

ANSWERS: dict[str, Callable[[Any], Tensor]] = {
    "logsumexp": lambda z: z.logsumexp(-1).square().sum(),
    "sigmoid": lambda z: z.sigmoid().sum(-1).square().sum(),
    "std": lambda z: z.std(-1).sum(),
    "entropy": lambda z: (z.softmax(-1) * z.log_softmax(-1)).sum(-1).square().sum(),
    "part": lambda z: z[3:50].tanh().sum(-1).square().sum(),
    "loss": lambda z: torch.nn.functional.cross_entropy(z, torch.arange(N)),
}


class _Gradients(Watch):
    """Counts the tensors of the shape of the weight that are made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.made = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        had = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.shape == (V, D):
                self.made += t.untyped_storage()._cdata not in had
        return result


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, D).to(dtype), torch.randn(V, D).to(dtype) / D**0.5


def _total(z: Any, names: list[str]) -> Tensor:
    parts = [(i + 1) * ANSWERS[name](z) for i, name in enumerate(names)]
    return torch.stack([p.double() for p in parts]).sum()


def _head(weight: Tensor) -> LMHead:
    head = LMHead(D, V, bias=False, dtype=weight.dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
    return head


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("retain", [False, True])
def test_the_sum_is_that_of_dense_logits(dtype: torch.dtype, retain: bool) -> None:
    hidden, weight = _inputs(dtype)
    head, leaf = _head(weight), hidden.clone().requires_grad_()
    names = list(ANSWERS)
    total = _total(head(leaf), names)
    total.backward(retain_graph=retain)  # type: ignore[no-untyped-call]
    assert head.weight.grad is not None
    assert leaf.grad is not None
    if retain:
        first = head.weight.grad.clone()
        head.weight.grad = None
        total.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(head.weight.grad, first, rtol=1e-6, atol=1e-7)

    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    _total(h @ w.T, names).backward()  # type: ignore[no-untyped-call]
    error = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert w.grad is not None
    atol = error * float(w.grad.abs().max())
    assert head.weight.grad is not None
    torch.testing.assert_close(head.weight.grad.double(), w.grad, rtol=error, atol=atol)
    if not retain:
        torch.testing.assert_close(leaf.grad.double(), h.grad, rtol=error, atol=atol)


def test_one_gradient_of_the_weight_for_many_answers() -> None:
    """As many tensors of the weight's size are made for six answers as for two."""
    hidden, weight = _inputs(torch.float32)
    made = []
    streamed = ["logsumexp", "sigmoid"]
    for names in (streamed, [*streamed, "std", "entropy", "sigmoid", "logsumexp"]):
        head = _head(weight)
        total = _total(head(hidden), names)
        with _Gradients() as seen:
            total.backward()  # type: ignore[no-untyped-call]
        made.append(seen.made)
    assert made == [1, 1]


def test_the_gradient_of_an_answer_is_not_added_to_twice() -> None:
    """A gradient that autograd hands on may share memory with one that the caller holds."""
    hidden, weight = _inputs(torch.float32)
    head, leaf = _head(weight), hidden.clone().requires_grad_()
    z = head(leaf)
    with pytest.warns(PerformanceWarning, match="builds all logits"):
        dense = z.materialize()
    upstream = torch.randn(N, V)
    before = upstream.clone()
    torch.autograd.backward([dense, z.logsumexp(-1).sum(), z.tanh().sum()], [upstream, None, None])
    assert torch.equal(upstream, before)


def test_gradients_of_two_passes_are_kept_apart() -> None:
    """A pass that only reaches an operand leaves nothing behind for the next one."""
    hidden, weight = _inputs(torch.float32)
    head, scale = _head(weight), torch.tensor(2.0, requires_grad=True)
    z = head(hidden)
    one = (z * scale).sigmoid().sum()
    torch.autograd.grad(one, scale, retain_graph=True)
    (with_rest,) = torch.autograd.grad(one + z.logsumexp(-1).sum(), head.weight)
    w = weight.clone().requires_grad_()
    y = hidden @ w.T
    (expected,) = torch.autograd.grad((y * 2).sigmoid().sum() + y.logsumexp(-1).sum(), w)
    torch.testing.assert_close(with_rest, expected, rtol=1e-4, atol=1e-5)


def _small(lazy: bool) -> tuple[LMHead, Tensor, Tensor]:
    torch.manual_seed(0)
    head = LMHead(4, 7, dtype=torch.float64)
    hidden = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    dense = torch.nn.functional.linear(hidden, head.weight, head.bias)
    return head, hidden, head(hidden) if lazy else dense


def test_a_hook_may_run_a_backward_pass_of_the_same_head() -> None:
    results = []
    for lazy in (False, True):
        head, hidden, z = _small(lazy)
        divisor = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
        factor = torch.ones(7, dtype=torch.float64, requires_grad=True)
        outer = torch.nn.functional.cross_entropy(z / divisor, torch.arange(6))
        inner = (z * factor).sigmoid().sum()
        found: list[Tensor] = []

        def nested(_: Tensor, inner=inner, head=head, found=found) -> None:  # type: ignore[no-untyped-def]
            found += torch.autograd.grad(inner, head.weight, retain_graph=True)

        divisor.register_hook(nested)  # type: ignore[no-untyped-call]
        (outer + z.exp().mean()).backward()  # type: ignore[no-untyped-call]
        results.append([*found, head.weight.grad, hidden.grad, divisor.grad])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("answer", ["sigmoid", "std", "logsumexp"])
def test_a_retained_gradient_can_be_used_again(answer: str) -> None:
    results = []
    for lazy in (False, True):
        head, hidden, z = _small(lazy)
        z.retain_grad()
        ANSWERS[answer](z).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        kept: Any = z.grad
        z.backward(kept, retain_graph=True)  # type: ignore[no-untyped-call]
        z.backward(kept / 2)  # type: ignore[no-untyped-call]
        results.append([head.weight.grad, hidden.grad])
    torch.testing.assert_close(results[1], results[0])
