"""`FactoredScores`: torch's functions on a factored head gives what the built tensor gives.

Run on an adaptive head and on trees, which override most hooks, and on `Dense`, which has the
defaults.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from torch import Tensor

import lmhead
from lmhead import LMHead, PerformanceWarning, Sampler
from lmhead.scores.row_loss import CrossEntropy
from lmhead.vocab import (
    AdaptiveHead,
    FactoredHead,
    Factors,
    HierarchicalHead,
)

VOCAB, DIM = 60, 12


@dataclass(frozen=True)
class DenseFactors(Factors):
    """The abstract hooks alone: everything else is answered from whole rows."""

    weight: Tensor
    name: str = "Dense"
    max_bytes: int | None = 3 * 32 * VOCAB  # three rows at a time

    @property
    def vocab(self) -> int:  # type: ignore[override]
        return len(self.weight)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def map(self, change: Callable[[Tensor], Tensor]) -> "DenseFactors":
        return replace(self, weight=change(self.weight))

    def log_prob(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self.log_probs(hidden).gather(1, ids)

    def log_probs(self, hidden: Tensor, *, exact: bool = False) -> Tensor:
        dtype = torch.float64 if exact or hidden.dtype == torch.float64 else torch.float32
        return (hidden.to(dtype) @ self.weight.to(dtype).T).log_softmax(1)

    def cross_entropy(self, hidden: Tensor, loss: CrossEntropy) -> Tensor:
        return loss.of_dense(self.log_probs(hidden))


class Dense(FactoredHead):
    def __init__(self) -> None:
        super().__init__(DIM, VOCAB)
        self.weight = torch.nn.Parameter(torch.randn(VOCAB, DIM))

    def factors(self) -> DenseFactors:
        return DenseFactors(self.weight)


def adaptive() -> FactoredHead:
    frequencies = torch.rand(VOCAB, generator=torch.Generator().manual_seed(5))
    return AdaptiveHead(
        DIM, VOCAB, cutoffs=[10, 25], frequencies=frequencies, div_value=2.0, bias=True
    )


def tree() -> FactoredHead:
    frequencies = torch.rand(VOCAB, generator=torch.Generator().manual_seed(6))
    head = HierarchicalHead(DIM, VOCAB, frequencies=frequencies)
    torch.nn.init.normal_(head.weight, std=0.3)
    return head


def wide_tree() -> FactoredHead:
    head = HierarchicalHead(DIM, VOCAB, tree="balanced", arity=4)
    torch.nn.init.normal_(head.weight, std=0.3)
    return head


HEADS = {"adaptive": adaptive, "dense": Dense, "tree": tree, "wide tree": wide_tree}


@pytest.fixture(params=HEADS)
def head(request: pytest.FixtureRequest) -> FactoredHead:
    torch.manual_seed(0)
    made: FactoredHead = HEADS[request.param]().double()
    return made


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(2, 5, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def built(logits: Any) -> Tensor:
    with pytest.warns(PerformanceWarning):
        dense: Tensor = logits.materialize()
    return dense


def test_nothing_is_computed_by_looking_at_it(head: FactoredHead, hidden: Tensor) -> None:
    logits = head(hidden)
    assert isinstance(logits, lmhead.LazyLogits)
    assert (logits.shape, logits.dtype, logits.device) == (
        (2, 5, VOCAB),
        hidden.dtype,
        hidden.device,
    )
    assert repr(logits) == "LazyLogits(shape=(2, 5, 60), dtype=torch.float64, not computed)"
    assert logits.requires_grad
    assert not logits.detach().requires_grad
    assert head(hidden).float().dtype == torch.float32
    assert "building it             4,800 bytes" in logits.explain()


def test_the_tensor_is_normalised(head: FactoredHead, hidden: Tensor) -> None:
    logits = head(hidden)
    dense = built(logits)
    assert_close(dense.exp().sum(-1), torch.ones(2, 5), atol=1e-12)
    assert_close(logits.logsumexp(-1), torch.zeros(2, 5))
    for name in ("log_softmax", "softmax"):
        assert_close(built(getattr(logits, name)(-1)), getattr(dense, name)(-1), atol=1e-12)


def test_reshaping_and_slicing(head: FactoredHead, hidden: Tensor) -> None:
    logits = head(hidden)
    dense = built(logits)
    changes: tuple[Callable[[Any], Any], ...] = (
        lambda z: z.view(-1, VOCAB),
        lambda z: z.flatten(0, 1),
        lambda z: z[:, -1],
        lambda z: z[..., :-1, :],
        lambda z: z.transpose(0, 1),
        lambda z: z[torch.tensor([True, False])],
        lambda z: z.unsqueeze(1).expand(2, 3, 5, VOCAB),
    )
    for change in changes:
        some = change(logits)
        assert isinstance(some, lmhead.LazyLogits)
        assert_close(built(some), change(dense), atol=1e-12)
    picks: tuple[Callable[[Any], Any], ...] = (
        lambda z: z[..., 7],
        lambda z: z[..., torch.tensor([3, 59, -1])],
        lambda z: z[..., :50],
        lambda z: z[0, 1, 5:9],
        lambda z: z[torch.tensor([0, 1]), torch.tensor([4, 2]), torch.tensor([8, 40])],
    )
    for pick in picks:
        assert_close(pick(logits), pick(dense), atol=1e-12)


def test_answers(head: FactoredHead, hidden: Tensor) -> None:
    logits = head(hidden)
    dense = built(logits)
    ids = torch.randint(VOCAB, (2, 5, 4))
    p = dense.exp()
    assert_close(logits.log_softmax(-1).gather(-1, ids), dense.gather(-1, ids), atol=1e-12)
    assert_close(logits.softmax(-1).gather(-1, ids), p.gather(-1, ids), atol=1e-12)
    assert_close(head.log_prob(hidden, ids[..., 0]), dense.gather(-1, ids)[..., 0], atol=1e-12)
    assert torch.equal(logits.argmax(-1), dense.argmax(-1))
    assert torch.equal(logits.max(-1).indices, dense.max(-1).indices)
    top = logits.topk(7)
    assert torch.equal(top.indices, dense.topk(7).indices)
    assert_close(top.values, dense.topk(7).values, atol=1e-12)
    answers = logits.ask(entropy=True, rank=ids, logsumexp=True, argmax=True, top_k=2)
    assert_close(answers.entropy, -(p * dense).sum(-1), atol=1e-12)
    before = (dense[..., None, :] > dense.gather(-1, ids)[..., None]).sum(-1)
    assert torch.equal(answers.rank, before)
    assert_close(answers.logsumexp, torch.zeros(2, 5))
    distribution = torch.distributions.Categorical(logits=logits, validate_args=False)
    assert_close(distribution.entropy(), -(p * dense).sum(-1), atol=1e-12)  # type: ignore[no-untyped-call]


def test_kl_to_another_head(head: FactoredHead, hidden: Tensor) -> None:
    other = LMHead(DIM, VOCAB).double()(hidden)
    leaf = hidden.clone().requires_grad_()
    kl = head(leaf).ask(kl_to=other).kl
    log_p, log_q = built(head(leaf)), built(other.log_softmax(-1))
    truth = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert_close(kl, truth, atol=1e-12)
    ours, theirs = (torch.autograd.grad(x.sum(), leaf)[0] for x in (kl, truth))
    assert_close(ours, theirs, atol=1e-12)
    rows = head(leaf).view(-1, VOCAB)
    functional = F.kl_div(rows.log_softmax(-1), rows.softmax(-1), reduction="batchmean")
    assert_close(functional, 0.0, atol=1e-12)
    with pytest.raises(ValueError, match="kl_to must have logits of shape"):
        head(leaf).ask(kl_to=other[0])
    back = other.ask(kl_to=head(hidden)).kl
    assert_close(back, (log_q.exp() * (log_q - log_p)).sum(-1), atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_spelled_in_torch(head: FactoredHead, hidden: Tensor, reduction: str) -> None:
    targets = torch.randint(VOCAB, (2, 5))
    targets[0, 2] = -100
    weight = torch.rand(VOCAB, dtype=torch.float64)
    dense = built(head(hidden))
    for options in ({}, {"label_smoothing": 0.1}, {"weight": weight, "label_smoothing": 0.3}):
        given: Any = {"reduction": reduction, **options}
        truth = F.cross_entropy(dense.view(-1, VOCAB), targets.view(-1), **given)
        ours = F.cross_entropy(head(hidden).view(-1, VOCAB), targets.view(-1), **given)
        assert_close(ours, truth, atol=1e-12)
        second = F.cross_entropy(head(hidden).transpose(1, 2), targets, **given)
        assert_close(second.reshape(truth.shape), truth, atol=1e-12)
    log_p = head(hidden).view(-1, VOCAB).log_softmax(-1)
    ours = F.nll_loss(log_p, targets.view(-1), reduction=reduction)
    truth = F.nll_loss(dense.view(-1, VOCAB), targets.view(-1), reduction=reduction)
    assert_close(ours, truth, atol=1e-12)


def test_entropy_has_a_gradient(head: FactoredHead, hidden: Tensor) -> None:
    leaf = hidden.clone().requires_grad_()
    dense = built(head(leaf))
    truth = torch.autograd.grad(-(dense.exp() * dense).sum(), leaf)[0]
    entropy = head(leaf).ask(entropy=True).entropy
    assert_close(torch.autograd.grad(entropy.sum(), leaf)[0], truth, atol=1e-12)


def test_a_temperature_is_recorded(head: FactoredHead, hidden: Tensor) -> None:
    dense = built(head(hidden))
    cooler = head(hidden) / 0.5
    assert_close(cooler.logsumexp(-1), (dense / 0.5).logsumexp(-1), atol=1e-12)
    assert_close(built(cooler), dense / 0.5, atol=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shifted = head(hidden) - torch.full((2, 5, 1), 2.0) + 0.5
    assert_close(shifted.logsumexp(-1), torch.full((2, 5), -1.5), atol=1e-12)
    assert_close(built(shifted), dense - 1.5, atol=1e-12)


def test_a_sampler_gives_the_token_of_the_tensor(head: FactoredHead, hidden: Tensor) -> None:
    dense = built(head(hidden)).detach()
    for options in (
        {"temperature": 0.0},
        {"top_k": 4},
        {"temperature": 0.7, "top_p": 0.8},
        {"min_p": 0.1, "logit_bias": {3: 2.0}},
    ):
        sampler = Sampler(seed=7, **options)
        lazy, given = sampler(head(hidden)), sampler(dense)
        assert torch.equal(lazy.token, given.token)
        assert_close(lazy.log_prob, given.log_prob, atol=1e-6)
        assert_close(lazy.raw_log_prob, given.raw_log_prob, atol=1e-6)
    assert str(Sampler(top_p=0.5).explain(head(hidden)[0, 0]))


def test_draws_follow_the_distribution(head: FactoredHead, hidden: Tensor) -> None:
    one = hidden[0, 0]
    p = built(head(one)).exp().detach()
    for drawn in (
        head.sample(one.expand(1500, DIM), seed=list(range(1500))),
        head(one).softmax(-1).multinomial(1500, True, generator=torch.Generator().manual_seed(0)),
    ):
        counts = torch.bincount(drawn, minlength=VOCAB)
        chi = ((counts - 1500 * p) ** 2 / (1500 * p)).sum()
        # 59 degrees of freedom: 1 in 10⁵ exceeds 112.
        assert float(chi) < 112


def test_a_draw_depends_on_its_own_row_seed_and_position(
    head: FactoredHead, hidden: Tensor
) -> None:
    rows = hidden.view(-1, DIM)
    seeds = list(range(10))
    whole = head.sample(rows, seed=seeds, position=torch.arange(10))
    alone = [int(head.sample(rows[i], seed=seeds[i], position=i)) for i in range(10)]
    assert whole.tolist() == alone
    assert head.sample(rows, seed=3, position=1).tolist() != head.sample(rows, seed=3).tolist()
    assert head.sample(hidden).shape == (2, 5)
    with pytest.raises(TypeError, match="seed must be an integer, or one per row; got 'x'"):
        head.sample(rows, seed="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed must be a number or one per row, 10"):
        head.sample(rows, seed=[1, 2])


def test_no_rows(head: FactoredHead) -> None:
    logits = head(torch.zeros(0, DIM, dtype=torch.float64))
    assert logits.argmax(-1).shape == (0,)
    assert logits.topk(3).values.shape == (0, 3)
    assert logits.ask(entropy=True).entropy.shape == (0,)
    assert head.sample(torch.zeros(0, DIM, dtype=torch.float64)).shape == (0,)
    loss = F.cross_entropy(logits, torch.zeros(0, dtype=torch.int64))
    assert loss.isnan()


def test_a_nan_has_no_best_token(head: FactoredHead, hidden: Tensor) -> None:
    hidden[0, 1, 3] = math.nan
    logits = head(hidden)
    assert logits.argmax(-1)[0, 1] == -1
    assert (logits.argmax(-1) == -1).sum() == 1
    assert logits.logsumexp(-1)[0, 1].isnan()
    with pytest.raises(ValueError, match="hidden must be finite"):
        head.sample(hidden)
    with pytest.raises(ValueError, match="row 1"):
        Sampler(top_k=2, seed=0)(logits)


def test_bad_input(head: FactoredHead, hidden: Tensor) -> None:
    with pytest.raises(ValueError, match=r"hidden must have shape \(\.\.\., 12\)"):
        head(torch.zeros(3, 11, dtype=torch.float64))
    with pytest.raises(TypeError, match="same dtype"):
        head(hidden.float())
    with pytest.raises(TypeError, match=r"hidden must be a torch\.Tensor"):
        head([1.0])
    logits = head(hidden)
    with pytest.raises(ValueError, match=r"log_prob must be in \[0, 60\); got 60"):
        logits.ask(log_prob=torch.full((2, 5), 60))
    with pytest.raises(ValueError, match=r"targets must be in \[0, 60\) or ignore_index; got -1"):
        F.cross_entropy(logits.view(-1, VOCAB), torch.full((10,), -1))
    with pytest.raises(ValueError, match="top_k must be in"):
        logits.topk(61)
    with pytest.raises(TypeError):
        logits.ask(nonsense=True)


def test_parameters_are_those_of_the_call(head: FactoredHead, hidden: Tensor) -> None:
    """As in `torch.func.functional_call`, which puts the old ones back before the answer."""
    changed = {name: p.detach() * 2 for name, p in head.named_parameters()}
    swapped = torch.func.functional_call(head, changed, (hidden,))
    best = swapped.topk(3)
    with torch.no_grad():
        for name, p in head.named_parameters():
            p.copy_(changed[name])
    again = head(hidden).topk(3)
    assert torch.equal(best.indices, again.indices)
    assert_close(best.values, again.values, atol=1e-12)
