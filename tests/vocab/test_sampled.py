"""`SampledLoss` against the textbook, with gradients; its proposals; what it teaches a head."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close, float64
from torch import Tensor

from lmhead import LMHead, reference
from lmhead.sweep import Source, SweptScores
from lmhead.vocab import AdaptiveHead, SampledLoss
from lmhead.vocab.proposals import draw_negatives, log_proposal

VOCAB, DIM, N = 30, 6, 9


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(N, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def source_of(loss: SampledLoss, hidden: torch.Tensor) -> Source:
    scores = loss.head.scores(hidden)
    assert isinstance(scores, SweptScores)
    return scores.source


def make(**options: Any) -> SampledLoss:
    torch.manual_seed(0)
    head = LMHead(DIM, VOCAB, dtype=torch.float64, **options.pop("head", {}))
    return SampledLoss(head, **({"num_samples": 12, "seed": 5} | options))


@pytest.mark.parametrize("remove_hits", [True, False])
@pytest.mark.parametrize("method", ["sampled_softmax", "nce"])
@pytest.mark.parametrize("max_bytes", [None, 1])
def test_loss_and_gradients(
    hidden: Tensor, method: Any, remove_hits: bool, max_bytes: int | None
) -> None:
    loss = make(method=method, remove_hits=remove_hits)
    loss.head.max_bytes = max_bytes
    targets = torch.arange(N) % 4
    targets[2] = -100
    leaf = hidden.clone().requires_grad_()
    rows = loss(leaf, targets, reduction="none")
    upstream = torch.linspace(0.5, 2.0, N, dtype=torch.float64)
    (rows * upstream).sum().backward()
    forward, backward = {
        "sampled_softmax": (reference.sampled_softmax, reference.sampled_softmax_backward),
        "nce": (reference.noise_contrastive, reference.noise_contrastive_backward),
    }[method]
    q = reference.log_uniform(VOCAB)
    negatives = draw_negatives(loss._cumulated, 12, 5, 0)
    keep = targets != -100
    given = (float64(hidden[keep]), float64(loss.head.weight), targets[keep].numpy())
    rest = (negatives.numpy(), q)
    assert_close(rows[keep], forward(*given, *rest, remove_hits=remove_hits), rtol=1e-12)
    assert rows[2] == 0
    grads = backward(float64(upstream[keep]), *given, *rest, remove_hits=remove_hits)
    assert leaf.grad is not None
    assert_close(leaf.grad[keep], grads.hidden, rtol=1e-9, atol=1e-13)
    assert not leaf.grad[2].any()
    assert_close(loss.head.weight.grad, grads.weight, rtol=1e-9, atol=1e-13)


def test_reductions(hidden: Tensor) -> None:
    loss = make()
    targets = torch.arange(N)
    targets[0] = 7_000
    values = []
    for reduction in ("none", "sum", "mean"):
        loss.step.zero_()
        given: Any = {"reduction": reduction, "ignore_index": 7_000}
        values.append(loss(hidden.view(3, 3, DIM), targets.view(3, 3), **given))
    rows, total, mean = values
    assert rows.shape == (3, 3)
    assert_close(total, rows.sum(), rtol=1e-12)
    assert_close(mean, rows.sum() / 8, rtol=1e-12)


def test_every_part_of_the_head_counts(hidden: Tensor) -> None:
    """Bias, scale, soft-capping and the low-rank delta: with all tokens drawn, the full loss."""
    loss = make(head={"bias": True, "softcap": 3.0, "scale": 2.0}, proposal="uniform")
    loss.head.add_low_rank(2)
    with torch.no_grad():
        assert loss.head.low_rank_b is not None
        loss.head.low_rank_b.normal_()
    targets = torch.arange(N)
    rows = loss.rows(source_of(loss, hidden), targets, torch.arange(VOCAB))
    assert_close(rows, F.cross_entropy(loss.head(hidden), targets, reduction="none"), rtol=1e-10)


def test_evaluation_is_the_full_softmax(hidden: Tensor) -> None:
    loss = make().eval()
    targets = torch.arange(N)
    full = F.cross_entropy(loss.head(hidden), targets)
    assert torch.equal(loss(hidden, targets), full)
    assert int(loss.step) == 0


def test_negatives_are_a_function_of_seed_and_step(hidden: Tensor) -> None:
    targets = torch.arange(N)
    first, second = make(), make()
    a = [float(first(hidden, targets).detach()) for _ in range(3)]
    assert a == [float(second(hidden, targets).detach()) for _ in range(3)]
    assert len(set(a)) == 3
    third = make()
    third.load_state_dict(first.state_dict())
    assert torch.equal(third(hidden, targets), first(hidden, targets))
    assert not torch.equal(make(seed=6)(hidden, targets), make()(hidden, targets))


@pytest.mark.parametrize("proposal", ["log_uniform", "unigram", "uniform"])
def test_draws_follow_the_proposal(proposal: str) -> None:
    counts = torch.arange(VOCAB, 0, -1)[torch.randperm(VOCAB)]
    log_q = log_proposal(proposal, VOCAB, counts)
    q = log_q.exp()
    assert_close(q.sum(), 1.0, atol=1e-12)
    n = 20_000
    drawn = torch.bincount(draw_negatives(q.cumsum(0), n, 3, 0), minlength=VOCAB)
    # 29 degrees of freedom: 1 in 10⁵ exceeds 70.
    assert float(((drawn - n * q) ** 2 / (n * q)).sum()) < 70
    if proposal != "uniform":
        assert torch.equal(q.argsort(descending=True), counts.argsort(descending=True))


def test_a_token_that_never_occurs_may_be_a_target(hidden: Tensor) -> None:
    frequencies = torch.ones(VOCAB)
    frequencies[3] = 0
    loss = make(proposal="unigram", frequencies=frequencies)
    assert loss(hidden, torch.full((N,), 3)).isfinite()
    assert float(loss.log_q[3]) == pytest.approx(float(loss.log_q[4]) - math.log(2))


def test_only_hits(hidden: Tensor) -> None:
    """Where every negative is the target there is nothing to learn: 0, and no NaN."""
    loss = make(num_samples=1)
    leaf = hidden.clone().requires_grad_()
    rows = loss.rows(source_of(loss, leaf), torch.full((N,), 4), torch.tensor([4]))
    rows.sum().backward()  # type: ignore[no-untyped-call]
    assert not rows.any()
    assert leaf.grad is not None
    assert not leaf.grad.any()


def test_a_sparse_gradient(hidden: Tensor) -> None:
    dense, sparse = make(), make(sparse=True)
    for loss in (dense, sparse):
        loss(hidden, torch.arange(N)).backward()
    assert sparse.head.weight.grad is not None
    assert sparse.head.weight.grad.is_sparse
    assert_close(sparse.head.weight.grad.to_dense(), dense.head.weight.grad, rtol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["sampled_softmax", "nce"])
def test_training_with_it_learns_the_distribution(method: Any) -> None:
    """Targets drawn from p: without the correction the head would learn p / q."""
    torch.manual_seed(0)
    vocab, n = 12, 512
    p = torch.linspace(-1.5, 1.5, vocab).softmax(0)
    head = LMHead(1, vocab)
    loss = SampledLoss(head, num_samples=24, method=method, seed=0)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.1)
    for step in range(300):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1 - step / 300)
        optimizer.zero_grad()
        loss(torch.ones(n, 1), p.multinomial(n, True)).backward()
        optimizer.step()
    learned = head.weight[:, 0].softmax(0)
    assert_close(learned, p, atol=0.05)  # p / q is off by 0.2
    if method == "nce":  # normalised by itself
        assert float(head.weight[:, 0].logsumexp(0).detach()) == pytest.approx(0.0, abs=0.15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head = LMHead(DIM, VOCAB, dtype=dtype)
    loss = SampledLoss(head, num_samples=12, seed=0)
    value = loss(torch.randn(N, DIM).to(dtype), torch.arange(N))
    value.backward()
    assert value.dtype == torch.float32
    assert head.weight.grad is not None
    assert head.weight.grad.dtype == dtype


def test_bad_input(hidden: Tensor) -> None:
    with pytest.raises(TypeError, match="head must be an LMHead; got AdaptiveHead"):
        SampledLoss(AdaptiveHead(4, 10, cutoffs=[]), num_samples=2)  # type: ignore[arg-type]
    for options, message in (
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"proposal": "zipf"}, "proposal must be one of log_uniform, unigram, uniform"),
        ({"method": "softmax"}, "method must be one of sampled_softmax, nce"),
        ({"proposal": "unigram"}, "frequencies must be given"),
        ({"frequencies": torch.ones(3)}, "one entry per token"),
        ({"seed": 1.5}, "seed must be an integer"),
    ):
        given: Any = options
        with pytest.raises((ValueError, TypeError), match=message):
            make(**given)
    loss = make()
    with pytest.raises(ValueError, match=r"targets must be in \[0, 30\) or ignore_index; got 30"):
        loss(hidden, torch.full((N,), 30))
    with pytest.raises(TypeError, match="targets must be ids"):
        loss(hidden, torch.rand(N, VOCAB))
