"""The gradient filter: the loss exact, the gradients close, all mass kept, with every option."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from torch import Tensor

import lmhead
from lmhead import GradFilter, LMHead, linear_cross_entropy
from lmhead.sweep import kernels

N, V, D = 300, 2000, 24


def peaked(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A head that has learnt how frequent tokens are, states that tell contexts apart, and targets
    drawn from the softmax: so the tail is thin, and the loss is the entropy, as in a trained model.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, D, generator=generator)
    weight[:, 0] = -1.6 * torch.arange(1, V + 1).log()
    hidden = 0.4 * torch.randn(N, D, generator=generator)
    hidden[:, 0] = 1.0
    targets = (hidden @ weight.T).softmax(1).multinomial(1, generator=generator)[:, 0]
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def gradients(loss: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, tensors)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(params=["native", "torch"])
def _core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(kernels, "core", None)
    elif kernels.core is None:
        pytest.skip("the compiled core is not there")


on_both_cores = pytest.mark.usefixtures("_core")


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "bias": {"bias": torch.linspace(-1, 1, V)},
    "masked": {"bias": torch.where(torch.arange(V) % 7 == 0, -torch.inf, 0.0)},
    "scale": {"scale": 1.5},
    "softcap": {"softcap": 20.0},
    "smoothing": {"label_smoothing": 0.1},
    "class weight": {"class_weight": torch.linspace(0.5, 1.5, V)},
    "z-loss": {"z_loss": 1e-3},
    "num_items": {"num_items": 1000},
    "all": {
        "bias": torch.linspace(-1, 1, V),
        "scale": 1.1,
        "label_smoothing": 0.05,
        "class_weight": torch.linspace(0.5, 1.5, V),
        "z_loss": 1e-4,
    },
    "capped and smoothed": {"softcap": 20.0, "label_smoothing": 0.1},  # done exactly
}


@on_both_cores
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_exact_gradients_close(name: str) -> None:
    options = OPTIONS[name]
    hidden, weight, targets = peaked()
    targets = torch.where((torch.arange(N) % 9 == 0) | (targets % 7 == 0), -100, targets)
    exact = linear_cross_entropy(hidden, weight, targets, **options)
    filtered = linear_cross_entropy(hidden, weight, targets, grad_filter=0.02, **options)
    assert_close(filtered, exact, rtol=1e-6)
    truth = gradients(exact.sum(), hidden, weight)
    close = gradients(filtered.sum(), hidden, weight)
    for ours, right in zip(close, truth, strict=True):
        assert 0 < relative(ours, right) < 0.03 or "capped" in name
    assert not close[0][targets == -100].any()
    unmasked = options.get("bias", torch.zeros(V)) > -torch.inf
    assert close[1][unmasked].any(1).all(), "a word without gradient"
    assert not close[1][~unmasked].any()


@on_both_cores
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_targets(smoothing: float) -> None:
    hidden, weight, targets = peaked()
    soft = 0.9 * F.one_hot(targets, V) + 0.1 * torch.randn(N, V).mul(4).softmax(1)
    losses = [
        linear_cross_entropy(hidden, weight, soft, label_smoothing=smoothing, grad_filter=f)
        for f in (None, 0.02)
    ]
    assert_close(losses[1], losses[0], rtol=1e-6)
    right, ours = (gradients(loss, hidden, weight) for loss in losses)
    assert all(relative(a, b) < 0.04 for a, b in zip(ours, right, strict=True))


@on_both_cores
def test_every_row_and_every_token_keeps_its_mass() -> None:
    """A constant input sums the gradient over rows, a constant weight sums it over tokens."""
    hidden, weight, targets = peaked()
    ones = torch.ones(N, 1), torch.ones(V, 1)
    hidden = torch.cat([hidden.detach(), ones[0]], 1).requires_grad_()
    weight = torch.cat([weight.detach(), ones[1]], 1).requires_grad_()
    bias = torch.zeros(V, requires_grad=True)
    losses = [
        linear_cross_entropy(hidden, weight, targets, bias=bias, reduction="sum", grad_filter=f)
        for f in (None, 0.05)
    ]
    right, ours = (gradients(loss, hidden, weight, bias) for loss in losses)
    assert relative(ours[0], right[0]) > 1e-3, "nothing was set aside"
    by_token = ours[0][:, -1] - right[0][:, -1]
    assert float(by_token.abs().max()) < 1e-5
    by_word = ours[1][:, -1] - right[1][:, -1]
    count = F.one_hot(targets, V).sum(0)
    mass = right[1][:, -1] + count  # of the softmax alone
    assert bool((by_word.abs() <= 1e-5 * mass + 1e-6 * count).all())
    assert_close(ours[2], right[2], atol=1e-5)


@on_both_cores
def test_a_flat_distribution_is_done_exactly() -> None:
    hidden, weight, targets = peaked()
    flat = (hidden.detach() * 1e-3).requires_grad_()
    right, ours = (
        gradients(linear_cross_entropy(flat, weight, targets, grad_filter=f), flat, weight)
        for f in (None, 0.02)
    )
    for a, b in zip(ours, right, strict=True):
        assert relative(a, b) < 1e-5


@on_both_cores
def test_after_a_flat_chunk_the_rest_is_done_exactly() -> None:
    peaks, weight, targets = peaked()
    flat = peaks.detach() * 1e-3
    for parts, exact in (((flat, peaks), True), ((peaks, flat), False)):
        hidden = torch.cat([part.detach() for part in parts]).requires_grad_()
        both = torch.cat([targets, targets])
        watched = GradFilter(0.02, report_every=1)
        right, ours = (
            gradients(linear_cross_entropy(hidden, weight, both, grad_filter=f), hidden, weight)
            for f in (None, watched)
        )
        assert sum(report.tokens for report in watched.reports) == len(hidden)
        assert (watched.reports[0].kept == 1.0) == exact
        assert watched.reports[-1].kept == 1.0
        assert (max(relative(a, b) for a, b in zip(ours, right, strict=True)) < 1e-5) == exact


def test_a_vocabulary_too_large_for_chunks_of_some_size_is_done_exactly() -> None:
    hidden, weight, targets = peaked()
    watched = GradFilter(0.02, report_every=1)
    tight = 20 * V * 4
    loss = linear_cross_entropy(hidden, weight, targets, grad_filter=watched, max_bytes=tight)
    gradients(loss, hidden, weight)
    assert {report.kept for report in watched.reports} == {1.0}


def test_a_smaller_tail_is_closer() -> None:
    hidden, weight, targets = peaked()
    right = gradients(linear_cross_entropy(hidden, weight, targets), hidden, weight)
    errors = []
    for tail in (0.1, 0.03, 0.01, 0.0):
        loss = linear_cross_entropy(hidden, weight, targets, grad_filter=tail)
        ours = gradients(loss, hidden, weight)
        errors.append([relative(a, b) for a, b in zip(ours, right, strict=True)])
    for worse, better in pairwise(errors):
        assert all(w > b for w, b in zip(worse, better, strict=True))
    assert errors[-1] == [0.0, 0.0]


@on_both_cores
def test_the_report_has_the_true_error() -> None:
    hidden, weight, targets = peaked()
    hidden = hidden.detach()[:100].requires_grad_()  # two chunks
    watched = GradFilter(0.05, report_every=1)
    loss = linear_cross_entropy(hidden, weight, targets[:100], grad_filter=watched)
    ours = gradients(loss, hidden, weight)
    right = gradients(linear_cross_entropy(hidden, weight, targets[:100]), hidden, weight)
    assert len(watched.reports) == 2
    assert all(0 < r.kept < 0.6 for r in watched.reports)
    for k, error in enumerate(("hidden_error", "weight_error")):
        reported = [getattr(report, error) for report in watched.reports]
        assert min(reported) * 0.5 < relative(ours[k], right[k]) < max(reported) * 1.5
    assert "of the tokens kept" in str(watched)


def test_a_head_carries_it_to_its_losses_and_log_probs() -> None:
    hidden, weight, targets = peaked()
    heads = [LMHead(D, V, grad_filter=f) for f in (None, 0.02)]
    for head in heads:
        head.load_state_dict({"weight": weight.detach()})
    advantage = torch.where(torch.arange(N) % 2 == 0, 1.0, -1.3)  # gradients of both signs
    for question in (
        lambda logits: F.cross_entropy(logits, targets),
        lambda logits: logits.log_softmax(-1).gather(-1, targets[:, None]).mean(),
        lambda logits: logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0] @ advantage,
    ):
        right, ours = (gradients(question(head(hidden)), hidden)[0] for head in heads)
        assert 0 < relative(ours, right) < 0.03
    assert "grad_filter=0.02" in repr(heads[1])


def test_low_rank_deltas_are_filtered_too() -> None:
    hidden, weight, targets = peaked()
    found = []
    for tail in (None, 0.02):
        torch.manual_seed(0)
        head = LMHead(D, V, grad_filter=tail).add_low_rank(4)
        assert head.low_rank_a is not None
        assert head.low_rank_b is not None
        with torch.no_grad():
            head.weight.copy_(weight)
            head.low_rank_b.normal_(std=0.05)
        loss = F.cross_entropy(head(hidden), targets)
        found.append(gradients(loss, hidden, head.weight, head.low_rank_a, head.low_rank_b))
    assert all(0 < relative(a, b) < 0.05 for b, a in zip(*found, strict=True))


def test_frozen_sides_and_half_precision() -> None:
    hidden, weight, targets = peaked()
    frozen = weight.detach()
    (only,) = gradients(linear_cross_entropy(hidden, frozen, targets, grad_filter=0.02), hidden)
    both = gradients(linear_cross_entropy(hidden, weight, targets, grad_filter=0.02), hidden)
    assert_close(only, both[0], atol=1e-7)
    low = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    right, ours = (
        gradients(linear_cross_entropy(low[0], low[1], targets, grad_filter=f), *low)
        for f in (None, 0.02)
    )
    for a, b in zip(ours, right, strict=True):
        assert a.dtype == torch.bfloat16
        assert relative(a.float(), b.float()) < 0.03


def test_one_token_is_exact() -> None:
    hidden, weight, targets = peaked()
    one = hidden.detach()[:1].requires_grad_()
    right, ours = (
        gradients(linear_cross_entropy(one, weight, targets[:1], grad_filter=f), one, weight)
        for f in (None, 0.3)
    )
    # Without a filter few rows take another path, with other roundings.
    for a, b in zip(ours, right, strict=True):
        assert relative(a, b) < 1e-6


@pytest.mark.parametrize("bad", [-0.1, 1.0, 1.5, float("nan")])
def test_a_tail_mass_outside_its_range_is_refused(bad: float) -> None:
    hidden, weight, targets = peaked()
    with pytest.raises(ValueError, match="grad_filter must be"):
        linear_cross_entropy(hidden, weight, targets, grad_filter=bad)
    with pytest.raises(ValueError, match="grad_filter must be"):
        LMHead(4, 5, grad_filter=bad)


def test_a_tail_mass_must_be_a_number() -> None:
    hidden, weight, targets = peaked()
    with pytest.raises(TypeError, match="grad_filter must be a number; got str"):
        lmhead.linear_cross_entropy(hidden, weight, targets, grad_filter="a lot")  # type: ignore[arg-type]
