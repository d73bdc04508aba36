"""First derivatives with create_graph=True, and second derivatives, against dense logits."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from lazy_and_dense import materialized
from torch import Tensor

from lmhead import LMHead, divergence, linear_cross_entropy, query

N, D, V = 4, 3, 7
TARGETS = torch.tensor([1, 5, 0, 3])
INPUT_IDS = torch.tensor([0, 1, 2, 6])

pytestmark = pytest.mark.filterwarnings("ignore::lmhead.PerformanceWarning")


class Model:
    """A head, lazy or dense, and hidden states: free, or computed from the weight (tied)."""

    def __init__(self, *, lazy: bool, tied: bool, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.lazy = lazy
        self.weight, self.bias = torch.nn.Parameter(randn(V, D)), torch.nn.Parameter(randn(V))
        free = randn(N, D).requires_grad_()
        self.hidden = F.embedding(INPUT_IDS, self.weight).tanh() * 1.5 if tied else free
        self.leaves = [self.weight, self.bias, *([] if tied else [free])]
        self._head = LMHead(D, V, bias=True, dtype=dtype)
        self._head.weight, self._head.bias = self.weight, self.bias

    def logits(self, hidden: Tensor | None = None) -> Any:
        hidden = self.hidden if hidden is None else hidden
        return self._head(hidden) if self.lazy else F.linear(hidden, self.weight, self.bias)


Loss = Callable[[Model], Any]


def of_logits(loss: Callable[[Any], Any]) -> Loss:
    return lambda m: loss(m.logits())


def jsd(p: Any, q: Any) -> Any:
    mixture = torch.logaddexp(p.log_softmax(-1), q.log_softmax(-1)) - math.log(2)
    to_mixture = partial(F.kl_div, mixture, log_target=True, reduction="sum")
    return (to_mixture(p.log_softmax(-1)) + to_mixture(q.log_softmax(-1))) / 2


def written_columns(z: Any) -> Any:
    z[:, 1:] *= 2
    return z.logsumexp(-1).square().sum()


def written_entries(m: Model) -> Any:
    z = m.logits()
    z[..., 2:4] += m.hidden[:, :2]
    return z.sigmoid().sum()


def written_row(m: Model) -> Any:
    z = m.logits()
    z[0] = z[1].clone() * m.hidden[0, 0]
    return z.sigmoid().sum()


def scored_in_place(z: Any) -> Any:
    return z.div_(0.7).masked_fill_(torch.arange(V) == 2, -5.0).softmax(-1).square().sum()


def hooked(m: Model) -> Any:
    z = m.logits()
    z.register_hook(lambda grad: grad * torch.linspace(0.5, 2, V, dtype=grad.dtype))
    return F.cross_entropy(z, TARGETS) + z.sigmoid().sum()


def hooked_with_hidden(m: Model) -> Any:
    z = m.logits()
    z.register_hook(lambda grad: grad * m.hidden[:, :1])
    return F.cross_entropy(z, TARGETS)


def hooked_twice(m: Model) -> Any:
    z = m.logits()
    z.register_hook(lambda grad: grad.square())
    y = z * m.hidden[:, :1]
    y.register_hook(lambda grad: grad.tanh())
    return F.cross_entropy(y, TARGETS) + (y * z).logsumexp(-1).sum()


def hooked_jsd(m: Model) -> Any:
    z = m.logits()
    z.register_hook(lambda grad: grad * m.hidden[:, :1])
    return jsd(z, m.logits(m.hidden * 0.5))


def of_one_linear(m: Model) -> Any:
    if m.lazy:
        return linear_cross_entropy(m.hidden, m.weight, TARGETS, bias=m.bias)
    return F.cross_entropy(m.logits(), TARGETS)


def queried(m: Model) -> Any:
    if m.lazy:
        found = query(m.hidden, m.weight, bias=m.bias, entropy=True, log_prob=TARGETS)
        return (found.entropy * found.log_prob).sum()
    log_p = m.logits().log_softmax(-1)
    return (-(log_p.exp() * log_p).sum(-1) * log_p.gather(-1, TARGETS[:, None])[:, 0]).sum()


def diverged(kind: str) -> Loss:
    def loss(m: Model) -> Any:
        other = m.hidden.flip(0) * 0.5
        if m.lazy:
            return divergence((m.hidden, m.weight), (other, m.weight), kind=kind).sum()
        p, q = ((hidden @ m.weight.T).log_softmax(-1) for hidden in (m.hidden, other))
        if kind == "jsd":
            return jsd(p, q)
        return F.kl_div(q, p, log_target=True, reduction="sum")

    return loss


LOSSES: dict[str, Loss] = {
    "cross_entropy": of_logits(lambda z: F.cross_entropy(z, TARGETS)),
    "log_softmax": of_logits(lambda z: z.log_softmax(-1).gather(-1, TARGETS[:, None]).sum()),
    "logsumexp": of_logits(lambda z: z.logsumexp(-1).square().sum()),
    "entropy": of_logits(lambda z: (z.softmax(-1) * z.log_softmax(-1)).sum()),
    "sigmoid": of_logits(lambda z: z.sigmoid().sum()),
    "one_column": of_logits(lambda z: z[..., 1].square().sum()),
    "some_rows": of_logits(lambda z: z[torch.tensor([2, 0, 2])].sigmoid().sum()),
    "top": of_logits(lambda z: z.topk(2).values.square().sum()),
    "norm": of_logits(lambda z: z.norm(dim=-1).sum()),
    "standardized": of_logits(lambda z: (z / z.std(-1, keepdim=True)).sigmoid().sum()),
    "minus_largest": of_logits(lambda z: (z - z.amax(-1, keepdim=True)).exp().sum(-1).log().sum()),
    "times_logsumexp": of_logits(lambda z: (z * z.logsumexp(-1, keepdim=True)).sigmoid().sum()),
    "plus_flipped": of_logits(lambda z: (z + z.flip(0)).sigmoid().sum()),
    "plus_first": of_logits(lambda z: (z + z[:1]).sigmoid().sum()),
    "concatenated": of_logits(lambda z: torch.cat([z, z[:2]]).sigmoid().square().sum()),
    "built": of_logits(lambda z: z.cumsum(-1).square().sum()),
    "shifted_kl": of_logits(
        lambda z: F.kl_div(z[:, 1:].log_softmax(-1), z[:, :-1].softmax(-1), reduction="sum")
    ),
    "written_columns": of_logits(written_columns),
    "scored_in_place": of_logits(scored_in_place),
    "written_entries": written_entries,
    "written_row": written_row,
    "hooked": hooked,
    "hooked_with_hidden": hooked_with_hidden,
    "hooked_twice": hooked_twice,
    "hooked_jsd": hooked_jsd,
    "times_hidden": lambda m: (m.logits() * m.hidden[:, :1]).sigmoid().sum(),
    "plus_weight": lambda m: (m.logits() + m.weight.sum(-1)).sigmoid().sum(),
    "cross_entropy_plus_weight": lambda m: F.cross_entropy(
        m.logits() + m.weight.square().sum(-1), TARGETS
    ),
    "temperature": lambda m: F.cross_entropy(m.logits() / m.hidden.square().mean(), TARGETS),
    "kl_of_two_calls": lambda m: F.kl_div(
        m.logits().log_softmax(-1), m.logits(m.hidden.flip(0)).softmax(-1), reduction="sum"
    ),
    "jsd_of_two_calls": lambda m: jsd(m.logits(), m.logits(m.hidden.flip(0))),
    "product_of_two_calls": lambda m: (
        m.logits().sigmoid() * m.logits(2 * m.hidden).sigmoid()
    ).sum(),
    "hidden_from_logits": lambda m: m.logits(m.logits().softmax(-1) @ m.weight).sigmoid().sum(),
    "linear_cross_entropy": of_one_linear,
    "query": queried,
    "kl": diverged("kl"),
    "jsd": diverged("jsd"),
}


def derivatives(loss: Loss, model: Model, order: int = 2) -> list[Tensor]:
    """Return the first derivatives, then those of their squared norm, and so on."""
    value, found = materialized(loss(model)), []
    for _ in range(order):
        grads = torch.autograd.grad(value, model.leaves, create_graph=True, materialize_grads=True)
        value = torch.stack([grad.square().sum() for grad in grads]).sum()
        found += [grad.detach() for grad in grads]
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["plain", "tied"])
@pytest.mark.parametrize("name", LOSSES)
def test_first_and_second_derivatives(name: str, tied: bool) -> None:
    ours, theirs = (
        derivatives(LOSSES[name], Model(lazy=lazy, tied=tied, dtype=torch.float64))
        for lazy in (True, False)
    )
    for found, expected in zip(ours, theirs, strict=True):
        assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("tied", [False, True], ids=["plain", "tied"])
@pytest.mark.parametrize("name", ["cross_entropy", "log_softmax", "entropy", "sigmoid", "kl"])
def test_derivatives_in_float32(name: str, tied: bool) -> None:
    ours, theirs = (
        derivatives(LOSSES[name], Model(lazy=lazy, tied=tied, dtype=torch.float32))
        for lazy in (True, False)
    )
    for found, expected in zip(ours, theirs, strict=True):
        assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["logsumexp", "top", "sigmoid", "linear_cross_entropy", "hooked"])
def test_third_derivatives(name: str) -> None:
    ours, theirs = (
        derivatives(LOSSES[name], Model(lazy=lazy, tied=True, dtype=torch.float64), order=3)
        for lazy in (True, False)
    )
    for found, expected in zip(ours, theirs, strict=True):
        assert_close(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ["sigmoid", "plus_flipped", "kl_of_two_calls", "jsd", "hooked"])
def test_copies_of_saved_tensors(name: str) -> None:
    results = []
    for lazy in (True, False):
        model = Model(lazy=lazy, tied=True, dtype=torch.float64)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copy: copy):
            results.append(derivatives(LOSSES[name], model))
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("changed", ["weight", "hidden"])
@pytest.mark.parametrize("name", ["cross_entropy", "sigmoid", "times_hidden", "kl", "hooked"])
def test_a_tensor_modified_before_the_double_backward_pass_is_an_error(
    name: str, changed: str
) -> None:
    model = Model(lazy=True, tied=False, dtype=torch.float64)
    value = LOSSES[name](model)
    with torch.no_grad():
        getattr(model, changed).mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        torch.autograd.grad(value, model.leaves, create_graph=True)


def test_logits_with_hooks_that_no_result_depends_on() -> None:
    hidden = torch.randn(3, 5, requires_grad=True)
    z: Any = LMHead(5, 7)(hidden)
    z.retain_grad()
    z.zero_()
    (grad,) = torch.autograd.grad(z.logsumexp(-1).sum(), hidden, create_graph=True)
    assert not grad.any()
