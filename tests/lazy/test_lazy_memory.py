"""No question that `LazyLogits` streams ever allocates logits, forward or backward.

The sizes are past the default of `max_bytes`: logits of 20 million elements, on a head so thin that
each question takes a fraction of a second.
"""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from lazy_and_dense import Twins, as_function, backward, ids, twins
from torch_watch import Allocations, count_products, no_tensor_of

from lmhead import LMHead

N, D, V = 500, 4, 40_000


@pytest.fixture(scope="module")
def case() -> Twins:
    return twins(5, 100, hidden_size=D, vocab=V, dtype=torch.float32)


def big(text: str) -> str:
    """The spellings are written for small sizes: give them the vocabulary of this file."""
    return text.replace("V", str(V))


@pytest.mark.parametrize(
    "spelling",
    [
        "F.cross_entropy(z.view(-1, V), ids(500))",
        "F.cross_entropy(z.view(-1, V), ids(500), reduction='none', label_smoothing=0.1).sum()",
        "F.cross_entropy(z.float().view(-1, V), ids(500), reduction='sum')",
        "F.cross_entropy((30 * torch.tanh(z / 30)).view(-1, V) * 0.5, ids(500))",
        "z.log_softmax(-1).gather(-1, ids(5, 100, 1)).sum()",
        "z.softmax(-1).gather(-1, ids(5, 100, 1)).sum()",
        "(z.gather(-1, ids(5, 100, 1)).squeeze(-1) - z.logsumexp(-1)).sum()",
        "z.logsumexp(-1).sum()",
        "z.max(-1).values.sum()",
        "z.topk(5).values.sum()",
        "torch.distributions.Categorical(logits=z).entropy().sum()",
        "torch.distributions.Categorical(logits=z).log_prob(ids(5, 100)).sum()",
    ],
)
def test_answers_with_gradients_allocate_no_logits(case: Twins, spelling: str) -> None:
    with no_tensor_of(N, V):
        answer = as_function(big(spelling))(case.lazy)
        gradients = torch.autograd.grad(answer, case.leaves, allow_unused=True)
    assert answer.isfinite()
    assert gradients[0] is not None


@pytest.mark.parametrize(
    "spelling",
    [
        "z.argmax(-1)",
        "(z.float() / 0.7).argmax(-1)",
        "z.softmax(-1).argmax(-1)",
        "torch.distributions.Categorical(logits=z).sample()",
        "torch.distributions.Categorical(logits=z).mode",
    ],
)
def test_tokens_allocate_no_logits(case: Twins, spelling: str) -> None:
    with no_tensor_of(N, V):
        tokens = as_function(big(spelling))(case.lazy)
    assert tokens.shape == (5, 100)


def test_selected_rows_cost_only_those_rows(case: Twins) -> None:
    with torch.no_grad():
        lazy = case.lazy
        assert count_products(lambda: lazy[:, -1].argmax(-1), 5, D, V) <= 1.05
        assert count_products(lambda: lazy.view(-1, V)[ids(7)].logsumexp(-1), 7, D, V) <= 1.05


def test_a_low_rank_delta_is_never_merged() -> None:
    size, vocab = 512, 40_000
    head = LMHead(size, vocab).requires_grad_(False)
    head.add_low_rank(2)
    hidden = torch.randn(4, size, requires_grad=True)
    with Allocations(limit=size * vocab):
        backward(F.cross_entropy(head(hidden), ids(4)))
    trained = [p for p in head.parameters() if p.requires_grad]
    assert len(trained) == 2
    assert all(p.grad is not None for p in trained)


def test_memory_of_detached_logits_is_shared() -> None:
    """What is written to the memory of detached logits is seen by the logits, as for a tensor."""
    made = []
    for lazy in (False, True):
        hidden = torch.linspace(-1, 1, 24).view(2, 3, 4).requires_grad_()
        weight = torch.linspace(-1, 1, 20).view(5, 4).requires_grad_()
        head = LMHead(4, 5)
        z = torch.func.functional_call(head, {"weight": weight}, (hidden,))
        z = z if lazy else hidden @ weight.T
        z.detach()[1].numpy()[0, 2] = 7.0
        values = z.softmax(-1)
        values.square().sum().backward()
        made.append([values.detach().sum(-1), z.logsumexp(-1), hidden.grad, weight.grad])
    for mine, true in zip(*made, strict=True):
        torch.testing.assert_close(mine, true)


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize(
    "spelling",
    [
        "F.cross_entropy(z, ids(8))",
        "z.logsumexp(-1).sum()",
        "(z / 2).exp().sum()",
        "z.softmax(-1).square().sum()",
        "z.log_softmax(-1).gather(-1, ids(8, 1)).sum()",
        "z.view(2, 4, -1)[:, 1].amax(-1).sum()",
        "(z.softmax(-1) * z.log_softmax(-1)).sum()",
        "F.kl_div(z.log_softmax(-1), (z * 2).softmax(-1), reduction='batchmean')",
        "z.topk(3).values.sum()",
        "z[..., [3, 5]].sum()",
    ],
)
def test_hidden_states_are_freed_with_the_result(spelling: str, retain: bool) -> None:
    """By their reference counts: not only when the garbage collector runs."""
    head = LMHead(16, 100)
    was_on = gc.isenabled()
    gc.disable()
    try:
        hidden = torch.randn(8, 16, requires_grad=True) * 1.0
        freed = weakref.ref(hidden)
        logits = head(hidden)
        if retain:
            logits.retain_grad()
        result = as_function(spelling)(logits)
        result.backward()
        assert freed() is not None
        del hidden, logits, result
        assert freed() is None
    finally:
        if was_on:
            gc.enable()
