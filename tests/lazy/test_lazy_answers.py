"""Torch's own functions on `LazyLogits`: the answers and gradients of dense logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from lazy_and_dense import Twins, as_function, assert_same, ids, twins
from torch import Tensor
from torch.distributions import Categorical

from lmhead import LazyLogits

B, T, V = 2, 3, 13


@pytest.fixture(params=["plain", "softcap", "scale"])
def case(request: pytest.FixtureRequest) -> Twins:
    if request.param == "softcap":
        return twins(B, T, softcap=2.5)
    if request.param == "scale":
        return twins(B, T, scale=0.3, bias=False)
    return twins(B, T)


def categorical(logits: Any, validate: bool | None = None) -> Any:
    return Categorical(logits=logits, validate_args=validate)


# --- log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling",
    [
        "z.log_softmax(-1).gather(-1, ids(2, 3, 1)).squeeze(-1)",
        "z.log_softmax(dim=-1).gather(-1, ids(2, 3, 4))",
        "z.log_softmax(2).gather(2, ids(2, 3, 2))",
        "torch.log_softmax(z, -1).gather(-1, ids(2, 3, 1))",
        "torch.gather(torch.log_softmax(z, dim=-1), -1, ids(2, 3, 1))",
        "torch.gather(F.log_softmax(z, dim=-1), dim=-1, index=ids(2, 3, 1))",
        "F.log_softmax(z[:, :-1], dim=-1).gather(-1, ids(2, 2, 1))",
        "z.view(-1, V).log_softmax(-1)[torch.arange(6), ids(6)]",
        "z.log_softmax(-1)[..., tensor([3, 5])]",
        "z.log_softmax(-1).view(-1, V).gather(-1, ids(6, 1))",
        "z.log_softmax(-1, dtype=torch.float64).gather(-1, ids(2, 3, 1))",
        "(z / 0.7).log_softmax(-1).gather(-1, ids(2, 3, 1))",
        "z.gather(-1, ids(2, 3, 1)).squeeze(-1) - z.logsumexp(-1)",
        "-F.nll_loss(z.log_softmax(-1).view(-1, V), ids(6), reduction='none')",
        "z.softmax(-1).gather(-1, ids(2, 3, 4))",
        "torch.softmax(z, dim=-1).gather(-1, ids(2, 3, 1))",
        "F.softmax(z, dim=-1)[..., 4]",
        "z.log_softmax(-1).exp().gather(-1, ids(2, 3, 1))",
    ],
)
def test_log_probabilities(case: Twins, spelling: str) -> None:
    assert_same(case, as_function(spelling), lazy=False)


@pytest.mark.parametrize("spelling", ["z.log_softmax(-1)", "F.log_softmax(z, -1)", "z.softmax(-1)"])
def test_normalised_logits_are_lazy_too(case: Twins, spelling: str) -> None:
    assert_same(case, as_function(spelling), lazy=True)


def test_softmax_over_another_dimension_is_not_mistaken_for_one_over_tokens(case: Twins) -> None:
    with pytest.warns(match="LazyLogits|logits"):
        assert_same(case, as_function("z.softmax(1)"))


# --- reductions over the vocabulary ---------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling",
    [
        "z.logsumexp(-1)",
        "z.logsumexp(dim=-1, keepdim=True)",
        "z.logsumexp(2)",
        "torch.logsumexp(z, -1)",
        "torch.logsumexp(z, dim=-1, keepdim=True)",
        "z[:, -1].logsumexp(-1)",
        "z.argmax(-1)",
        "z.argmax(dim=-1)",
        "z.argmax(-1, keepdim=True)",
        "torch.argmax(z, dim=-1)",
        "torch.argmax(z[:, -1, :], dim=-1, keepdim=True)",
        "(-z).argmax(-1)",
        "z.softmax(-1).argmax(-1)",
        "z.log_softmax(-1).argmax(-1)",
        "z.max(-1).values",
        "z.max(-1)[0]",
        "z.max(dim=-1, keepdim=True).values",
        "z.max(-1).indices",
        "torch.max(z, dim=-1)[1]",
        "z.softmax(-1).max(-1).values",
        "z.log_softmax(-1).max(-1).values",
        "z.topk(4).values",
        "z.topk(4).indices",
        "z.topk(4, dim=-1)[0]",
        "z.topk(V).indices",
        "z.topk(k=2, dim=-1).values",
        "torch.topk(z, 3).values",
        "torch.topk(z[:, -1], 3, dim=-1).indices",
        "z.softmax(-1).topk(3).values",
        "z.log_softmax(-1).topk(3).values",
        "z.log_softmax(-1).topk(3).indices",
        "(z * -1).topk(3).indices",
        "torch.argmax(z.view(-1, V)[tensor([3, 1])], -1)",
    ],
)
def test_reductions(case: Twins, spelling: str) -> None:
    assert_same(case, as_function(spelling), lazy=False)


def test_ties_go_to_the_lowest_id() -> None:
    case = twins(4, vocab=9, trained=False)
    with torch.no_grad():
        for parameter in case.head.parameters():
            parameter[6] = parameter[2]
        case.hidden[:] = case.head.weight[2] * 10
    assert case.lazy.argmax(-1).tolist() == [2] * 4
    assert case.lazy.max(-1).indices.tolist() == [2] * 4
    assert case.lazy.topk(2).indices.tolist() == [[2, 6]] * 4


# --- losses ---------------------------------------------------------------------------------------

WEIGHTS = "torch.linspace(0.5, 2, V, dtype=torch.float64)"
PROBABILITIES = "torch.linspace(0, 2, 6 * V, dtype=torch.float64).view(6, V).softmax(-1)"


@pytest.mark.parametrize(
    "spelling",
    [
        "F.cross_entropy(z.view(-1, V), ids(6))",
        "F.cross_entropy(z.flatten(0, 1), ids(6), reduction='sum')",
        "F.cross_entropy(z.reshape(-1, V), ids(6), reduction='none')",
        "F.cross_entropy(z.view(-1, V), ids(6), label_smoothing=0.1)",
        f"F.cross_entropy(z.view(-1, V), ids(6), {WEIGHTS})",
        f"F.cross_entropy(z.view(-1, V), ids(6), weight={WEIGHTS}, label_smoothing=0.2)",
        "F.cross_entropy(z.view(-1, V), tensor([-100, 3, -100, 5, 0, 12]))",
        "F.cross_entropy(z.view(-1, V), tensor([1, 3, 1, 5, 0, 12]), ignore_index=1)",
        "F.cross_entropy(z.view(-1, V), tensor([0, 3, 1, 5, 0, 12]), ignore_index=0)",
        f"F.cross_entropy(z.view(-1, V), {PROBABILITIES})",
        f"F.cross_entropy(z.view(-1, V), {PROBABILITIES}, label_smoothing=0.1, reduction='sum')",
        "F.cross_entropy(z[..., :-1, :].contiguous().view(-1, V), ids(4))",
        "F.cross_entropy(z[0, 0], tensor(3))",
        "F.cross_entropy(input=z.view(-1, V), target=ids(6))",
        "torch.nn.CrossEntropyLoss()(z.view(-1, V), ids(6))",
        "torch.nn.CrossEntropyLoss(reduction='none', label_smoothing=0.1)(z.view(-1, V), ids(6))",
        "F.cross_entropy(z.view(-1, V) / 0.5 + 1, ids(6))",
        "F.nll_loss(F.log_softmax(z.view(-1, V), -1), ids(6))",
    ],
)
def test_losses(case: Twins, spelling: str) -> None:
    assert_same(case, as_function(spelling), lazy=False)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize(
    "spelling",
    [
        "(4 * torch.tanh(z / 4)).log_softmax(-1).gather(-1, ids(2, 3, 1))",
        "F.cross_entropy(4 * torch.tanh(z.view(-1, V) / 4), ids(6))",
        "F.cross_entropy((torch.tanh(z / 4) * 4).float().view(-1, V).double(), ids(6))",
    ],
)
def test_softcapping_written_out(spelling: str, scale: float) -> None:
    assert_same(twins(B, T, scale=scale), as_function(spelling), rtol=1e-5, atol=1e-6, lazy=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_loss_has_the_dtype_of_the_logits(dtype: torch.dtype) -> None:
    case = twins(6, dtype=dtype)
    ours, theirs = (F.cross_entropy(z, ids(6)) for z in (case.lazy, case.dense))
    assert ours.dtype == theirs.dtype
    assert F.cross_entropy(case.lazy.float(), ids(6)).dtype == torch.float32
    for gradient, leaf in zip(torch.autograd.grad(ours, case.leaves), case.leaves, strict=True):
        assert gradient.dtype == leaf.dtype


def test_an_all_ignored_batch_is_as_in_torch() -> None:
    case = twins(6)
    targets = torch.full((6,), -100)
    ours, theirs = (F.cross_entropy(z, targets) for z in (case.lazy, case.dense))
    assert_close(ours, theirs, equal_nan=True)
    assert F.cross_entropy(case.lazy, targets, reduction="sum") == 0


# --- Categorical(logits=...) ----------------------------------------------------------------------


@pytest.mark.parametrize("validate", [None, False], ids=["validated", "unvalidated"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda d: d.log_prob(ids(B, T)),
        lambda d: d.log_prob(ids(4, B, T)),
        lambda d: d.log_prob(torch.tensor(3)),
        lambda d: d.entropy(),
        lambda d: d.mode,
        lambda d: d.log_prob(ids(B, T)) + 0.1 * d.entropy(),
    ],
    ids=["log_prob", "log_prob of several", "log_prob of one", "entropy", "mode", "both"],
)
def test_categorical(case: Twins, ask: Callable[[Any], Any], validate: bool | None) -> None:
    assert_same(case, lambda z: ask(categorical(z, validate)), lazy=False)


def test_categorical_stays_lazy_and_knows_its_shape(case: Twins) -> None:
    lazy = categorical(case.lazy)
    assert isinstance(lazy.logits, LazyLogits)
    assert lazy.batch_shape == (B, T)
    assert lazy.param_shape == (B, T, V)


@pytest.mark.parametrize(
    "draw",
    [
        lambda z: categorical(z).sample(torch.Size([500])),
        lambda z: torch.multinomial(z.softmax(-1), 500, replacement=True).T,
    ],
    ids=["Categorical", "multinomial"],
)
def test_samples_follow_the_distribution(draw: Callable[[Any], Tensor]) -> None:
    rows, vocab = 4, 7
    case = twins(rows, vocab=vocab, trained=False)
    torch.manual_seed(0)
    samples = draw(case.lazy)
    assert samples.shape == (500, rows)
    assert samples.dtype == torch.long
    counts = F.one_hot(samples, vocab).sum(0)
    expected = 500 * case.dense.softmax(-1)
    chi_square = ((counts - expected) ** 2 / expected).sum(-1)
    # 6 degrees of freedom: 22.5 is passed once in a thousand.
    assert chi_square.max() < 22.5
    torch.manual_seed(0)
    assert torch.equal(draw(case.lazy), samples), "the same seed must give the same samples"


def test_one_sample_has_the_shape_of_the_batch(case: Twins) -> None:
    assert categorical(case.lazy).sample().shape == (B, T)
    assert torch.multinomial(case.lazy[:, -1].softmax(-1), 1).shape == (B, 1)


def test_tokens_of_probability_zero_are_legal() -> None:
    case = twins(4)
    assert case.head.bias is not None
    with torch.no_grad():
        case.head.bias[[0, 5]] = -torch.inf
    assert_same(case, lambda z: F.cross_entropy(z, torch.tensor([1, 2, 3, 4])))
    assert_same(case, lambda z: z.logsumexp(-1))
    entropy = categorical(case.lazy).entropy()
    kept = [v for v in range(V) if v not in (0, 5)]
    assert_close(entropy, categorical(case.dense[:, kept]).entropy(), rtol=1e-12)
    for gradient in torch.autograd.grad(entropy.sum(), case.leaves):
        assert torch.isfinite(gradient).all()
    torch.manual_seed(1)
    samples = categorical(case.lazy).sample(torch.Size([300]))
    assert not torch.isin(samples, torch.tensor([0, 5])).any()


ASKS: list[Callable[..., Any]] = [
    lambda z: z.logsumexp(-1).sum(),
    lambda z: z.log_softmax(-1)[..., 3].sum(),
    lambda z: F.cross_entropy(z.flatten(0, 1), torch.arange(B * T)),
    lambda z: z.topk(2, -1).values.sum(),
    lambda z: (z.tanh() * 2).sum(),
    lambda z: z.gather(-1, torch.ones(B, T, 1, dtype=torch.long)).sum(),
]


@pytest.mark.parametrize("way", ["retained", "clipped in a hook"])
@pytest.mark.parametrize("change", [lambda z: z, lambda z: z * 0.3, lambda z: z.flip(0), torch.sin])
@pytest.mark.parametrize("ask", ASKS)
def test_the_gradient_of_the_logits_themselves(
    ask: Callable[..., Any], change: Callable[..., Any], way: str
) -> None:
    """It is built where code looks at its entries."""
    case, found = twins(B, T), []
    for logits in (case.dense, case.lazy):
        z = change(logits)
        if way == "retained":
            z.retain_grad()
        else:
            z.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        total = ask(z)
        wanted = [*case.leaves, z] if way == "retained" else case.leaves
        grads = [*torch.autograd.grad(total, wanted, retain_graph=True)]
        if way == "retained":
            total.backward()
            grads.append(z.grad)
        found.append([grad.sum(0) for grad in grads])
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_autograd_grad_of_logits_that_answers_pass_by() -> None:
    logits = twins(B, T).lazy
    with pytest.raises(RuntimeError, match=r"needs logits.retain_grad\(\) before"):
        torch.autograd.grad(logits.logsumexp(-1).sum(), logits, allow_unused=True)
    case = twins(B, T)
    given = torch.randn(case.dense.shape, dtype=case.dense.dtype)
    expected = torch.autograd.grad(case.dense, case.leaves, given)
    for ours, theirs in zip(
        torch.autograd.grad(case.lazy, case.leaves, given), expected, strict=True
    ):
        assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ask", ASKS)
def test_a_hook_on_the_logits_leaves_the_gradients_as_they_are(ask: Callable[..., Any]) -> None:
    """FSDP2 hooks the output of each group of modules, `retain_grad` likewise."""
    case = twins(B, T)
    expected = torch.autograd.grad(ask(case.dense), case.leaves, retain_graph=True)
    logits = case.lazy
    logits.register_hook(lambda grad: grad)
    for found, right in zip(torch.autograd.grad(ask(logits), case.leaves), expected, strict=True):
        assert_close(found, right, rtol=1e-10, atol=1e-12)
