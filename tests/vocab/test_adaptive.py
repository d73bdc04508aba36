"""`AdaptiveHead` against the textbook and against torch's, with gradients; its own manners."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import assert_as_good_as, assert_close, float64
from guard import no_tensor_of
from torch import Tensor, nn

from lmhead import Sampler, reference
from lmhead.vocab import AdaptiveEmbedding, AdaptiveHead

VOCAB, DIM = 47, 8


def make(**options: Any) -> AdaptiveHead:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "cutoffs": [6, 20],
        "div_value": 2.0,
        "bias": True,
        "dtype": torch.float64,
    } | options
    head = AdaptiveHead(DIM, VOCAB, **given)
    with torch.no_grad():
        for p in head.parameters():
            p.mul_(2.0)
    return head


def shuffled() -> Tensor:
    return torch.rand(VOCAB, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def hidden() -> Tensor:
    made = torch.randn(13, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return made * torch.linspace(0.1, 3.0, 13, dtype=torch.float64)[:, None]


def textbook(head: AdaptiveHead) -> tuple[Any, list[reference.Cluster], Any]:
    biases = list(head.biases) or [None] * len(head.weights)
    clusters = [
        reference.Cluster(float64(p), float64(w), None if b is None else float64(b))
        for p, w, b in zip(head.projections, head.weights, biases, strict=True)
    ]
    bias = None if head.head_bias is None else float64(head.head_bias)
    return float64(head.head_weight), clusters, bias


def reference_log_p(head: AdaptiveHead, hidden: Tensor) -> Any:
    """By word."""
    log_p = reference.adaptive_log_probs(float64(hidden), *textbook(head))
    return log_p[:, head.place_of.numpy()]


@pytest.mark.both_cores
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ordered", [True, False])
def test_loss_and_every_gradient(
    hidden: Tensor, reduction: str, smoothing: float, weighted: bool, ordered: bool
) -> None:
    head = make(frequencies=None if ordered else shuffled())
    targets = torch.arange(13) * 3
    targets[4] = -100
    weight = torch.linspace(0.2, 2.0, VOCAB, dtype=torch.float64) if weighted else None
    leaf = hidden.clone().requires_grad_()
    loss = F.cross_entropy(
        head(leaf),
        targets,
        weight=weight,
        reduction=reduction,
        label_smoothing=smoothing,
    )
    upstream = torch.linspace(0.5, 2.0, 13, dtype=torch.float64)
    (loss * upstream if reduction == "none" else loss).sum().backward()  # type: ignore[no-untyped-call]
    options: Any = {
        "class_weight": None if weight is None else float64(weight),
        "reduction": reduction,
        "label_smoothing": smoothing,
    }
    log_p = reference_log_p(head, hidden)
    truth = np.asarray(reference.cross_entropy(log_p, targets.numpy(), **options))
    assert_close(loss, truth, rtol=1e-10, atol=1e-12)
    grad_output = float64(upstream) if reduction == "none" else 1.0
    by_word = reference.cross_entropy_backward(
        log_p, targets.numpy(), grad_output=grad_output, **options
    )
    by_place = by_word[:, head.word_at.numpy()]
    grads = reference.adaptive_log_probs_backward(by_place, float64(hidden), *textbook(head))
    assert_close(leaf.grad, grads.hidden, rtol=1e-9, atol=1e-12, what="hidden")
    assert_close(head.head_weight.grad, grads.head_weight, rtol=1e-9, atol=1e-12, what="head")
    assert head.head_bias is not None
    assert_close(head.head_bias.grad, grads.head_bias, rtol=1e-9, atol=1e-12, what="head bias")
    for c, cluster in enumerate(grads.clusters):
        ours = (head.projections[c].grad, head.weights[c].grad, head.biases[c].grad)
        for name, mine, true in zip(cluster._fields, ours, cluster, strict=True):
            assert_close(mine, true, rtol=1e-9, atol=1e-12, what=f"{name} of {c}")  # type: ignore[arg-type]


def test_probabilities_as_targets(hidden: Tensor) -> None:
    head = make(frequencies=shuffled())
    soft = torch.randn(13, VOCAB, dtype=torch.float64).softmax(1)
    weight = torch.rand(VOCAB, dtype=torch.float64)
    dense = head.factors().log_probs(hidden)
    for options in ({}, {"weight": weight}, {"label_smoothing": 0.1, "weight": weight}):
        for reduction in ("mean", "sum", "none"):
            given: Any = {"reduction": reduction, **options}
            ours = F.cross_entropy(head(hidden), soft, **given)
            assert_close(ours, F.cross_entropy(dense, soft, **given), atol=1e-10)
    with pytest.raises(ValueError, match="must not require a gradient"):
        F.cross_entropy(head(hidden), soft.requires_grad_())


def test_gradcheck_of_log_prob_and_entropy() -> None:
    torch.manual_seed(0)
    head = AdaptiveHead(
        4, 9, cutoffs=[3, 5], frequencies=torch.rand(9), div_value=2.0, bias=True
    ).double()
    hidden = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 5, 8], [7, 7, 1]])
    parameters = list(head.parameters())

    def answers(h: Tensor, *values: Tensor) -> tuple[Any, Any]:
        named = dict(zip(dict(head.named_parameters()), values, strict=True))
        logits = torch.func.functional_call(head, named, (h,))
        asked = logits.ask(log_prob=ids, entropy=True)
        return asked.log_prob, asked.entropy

    assert torch.autograd.gradcheck(answers, (hidden, *parameters))


def test_it_is_torchs_and_shares_its_weights(hidden: Tensor) -> None:
    theirs = nn.AdaptiveLogSoftmaxWithLoss(DIM, VOCAB, [6, 20], div_value=2.0, head_bias=True)
    theirs = theirs.double()
    head = AdaptiveHead.from_torch(theirs)
    targets = torch.arange(13) * 3
    assert head.head_weight is theirs.head.weight
    assert head.weights[1] is theirs.tail[1][1].weight  # type: ignore[index]
    loss, same = F.cross_entropy(head(hidden), targets), theirs(hidden, targets).loss
    assert_close(loss, same, atol=1e-12)
    mine = torch.autograd.grad(loss, list(theirs.parameters()))
    for a, b in zip(mine, torch.autograd.grad(same, list(theirs.parameters())), strict=True):
        assert_close(a, b, atol=1e-12)
    assert torch.equal(head(hidden).argmax(-1), theirs.predict(hidden))
    plain = AdaptiveHead.from_torch(nn.AdaptiveLogSoftmaxWithLoss(DIM, VOCAB, [6]))
    assert plain.head_bias is None
    with pytest.raises(TypeError, match="AdaptiveLogSoftmaxWithLoss; got Linear"):
        AdaptiveHead.from_torch(nn.Linear(2, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_exact_as_torch_in_its_type(dtype: torch.dtype) -> None:
    head = make(frequencies=shuffled()).to(dtype)
    hidden = torch.randn(40, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)
    targets = torch.arange(40)
    exact = copy.deepcopy(head).double()
    truth = F.cross_entropy(exact(hidden.double()), targets)
    theirs = F.cross_entropy(head.factors().log_probs(hidden).to(dtype), targets)
    ours = F.cross_entropy(head(hidden).float(), targets)
    assert_as_good_as(ours, theirs, truth, 1e-6)
    leaf = hidden.clone().requires_grad_()
    F.cross_entropy(head(leaf), targets).backward()  # type: ignore[no-untyped-call]
    wide = hidden.double().requires_grad_()
    F.cross_entropy(exact(wide), targets).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert wide.grad is not None
    assert leaf.grad.dtype == dtype
    size = float(wide.grad.abs().max())
    assert_close(leaf.grad, wide.grad, atol=size * 4 * torch.finfo(dtype).eps)


def test_autocast_takes_its_type(hidden: Tensor) -> None:
    head = make(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(hidden.float())
        assert logits.dtype == torch.bfloat16
        assert F.cross_entropy(logits, torch.arange(13)).dtype == torch.float32


def test_sums_to_one_at_a_hundred_thousand_words() -> None:
    torch.manual_seed(0)
    head = AdaptiveHead(32, 100_000, frequencies=torch.rand(100_000))
    assert head.cutoffs
    hidden = 3 * torch.randn(3, 32)
    log_p = head.factors().log_probs(hidden)
    assert_close(log_p.double().exp().sum(1), torch.ones(3), atol=1e-5)
    ids = torch.randint(100_000, (3, 50))
    assert_close(head.log_prob(hidden, ids), log_p.gather(1, ids), atol=2e-5)


def test_top_k_is_brute_force_on_a_thousand_states() -> None:
    torch.manual_seed(0)
    head = AdaptiveHead(16, 500, cutoffs=[20, 80, 200], frequencies=torch.rand(500), div_value=2.0)
    with torch.no_grad():
        for p in head.parameters():
            p.mul_(3.0)
    hidden = torch.randn(1000, 16) * torch.linspace(0.1, 4.0, 1000)[:, None]
    truth = head.factors().log_probs(hidden, exact=True)
    values, ids = truth.sort(dim=1, descending=True, stable=True)
    for k in (1, 7, 30, 300, 500):
        top = head(hidden).topk(k)
        assert torch.equal(top.indices, ids[:, :k])
        assert_close(top.values, values[:, :k], atol=1e-4)
    assert torch.equal(head(hidden).argmax(-1), ids[:, 0])
    alone = torch.stack([head(h).topk(5).indices for h in hidden[:20]])
    assert torch.equal(alone, ids[:20, :5])


def test_ties_go_to_the_lowest_id() -> None:
    head = make(frequencies=shuffled(), dtype=torch.float32)
    with torch.no_grad():
        head.weights[1][5:] = head.weights[1][5]  # rows of a cluster that are all the same
        head.biases[1][5:] = 4.0
        head.head_bias[-1] = 9.0  # type: ignore[index]
    same = head.word_at[25:].sort().values
    top = head(torch.ones(2, DIM)).topk(12)
    assert top.indices.tolist() == [same[:12].tolist()] * 2
    nothing = make(bias=False)(torch.zeros(1, DIM, dtype=torch.float64))
    assert nothing.topk(6).indices.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_clusters_that_cannot_win_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmhead.vocab import cluster_top

    head = make(bias=True, dtype=torch.float32)
    with torch.no_grad():
        assert head.head_bias is not None
        head.head_bias[0] = 50.0
    read = []
    product = cluster_top._product

    def watched(source: Any, dtype: torch.dtype) -> Tensor:
        read.append(source.vocab)
        return product(source, dtype)

    monkeypatch.setattr(cluster_top, "_product", watched)
    assert head(torch.ones(1, DIM)).argmax(-1).tolist() == [0]
    assert read == [8]


def test_draws_pass_chi_square() -> None:
    head = make(frequencies=shuffled(), dtype=torch.float32)
    hidden = torch.randn(DIM, generator=torch.Generator().manual_seed(5))
    n = 3000
    drawn = head.sample(hidden.expand(n, DIM), seed=11, position=torch.arange(n))
    p = head.factors().log_probs(hidden[None])[0].double().exp().detach()
    counts = torch.bincount(drawn, minlength=VOCAB)
    # 46 degrees of freedom: 1 in 10⁵ exceeds 94.
    assert float(((counts - n * p) ** 2 / (n * p)).sum()) < 94


def test_unused_clusters_cost_no_memory(hidden: Tensor) -> None:
    """A target in the shortlist: the clusters' gradients are 0, not missing."""
    head = make()
    F.cross_entropy(head(hidden), torch.zeros(13, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    for p in (*head.weights, *head.projections):
        assert p.grad is not None
        assert not p.grad.any()


def test_everything_ignored(hidden: Tensor) -> None:
    head = make()
    ignored = torch.full((13,), -100)
    assert F.cross_entropy(head(hidden), ignored).isnan()
    assert F.cross_entropy(head(hidden), ignored, reduction="sum") == 0
    assert not F.cross_entropy(head(hidden), ignored, reduction="none").any()


def test_a_masked_word_has_probability_0(hidden: Tensor) -> None:
    head = make()
    with torch.no_grad():
        head.biases[0][3] = -math.inf
    leaf = hidden.clone().requires_grad_()
    logits = head(leaf)
    assert logits[:, 9].eq(-math.inf).all()
    smooth = F.cross_entropy(logits, torch.arange(13) + 20, label_smoothing=0.1)
    smooth.backward()  # type: ignore[no-untyped-call]
    assert smooth.isfinite()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()
    assert logits.ask(entropy=True).entropy.isfinite().all()
    assert 9 not in logits.topk(VOCAB - 1).indices


def test_no_clusters_is_a_plain_head(hidden: Tensor) -> None:
    head = AdaptiveHead(DIM, VOCAB, cutoffs=[], dtype=torch.float64)
    z = hidden @ head.head_weight.T
    assert_close(
        F.cross_entropy(head(hidden), torch.arange(13)),
        F.cross_entropy(z, torch.arange(13)),
        atol=1e-12,
    )
    assert torch.equal(head(hidden).argmax(-1), z.argmax(-1))
    assert_close(
        head(hidden).ask(entropy=True).entropy,
        -(z.softmax(1) * z.log_softmax(1)).sum(1),
        atol=1e-12,
    )
    assert AdaptiveHead(DIM, 1, cutoffs=[])(torch.ones(DIM)).argmax(-1) == 0


def test_a_checkpoint_brings_the_order_of_words(hidden: Tensor) -> None:
    trained, fresh = make(frequencies=shuffled()), make()
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(fresh(hidden).argmax(-1), trained(hidden).argmax(-1))
    assert_close(fresh(hidden)[..., 17], trained(hidden)[..., 17], atol=1e-12)
    again = copy.deepcopy(trained)
    assert_close(again(hidden)[..., 17], trained(hidden)[..., 17], atol=1e-12)
    broken = trained.state_dict() | {"word_at": torch.zeros(VOCAB, dtype=torch.int64)}
    with pytest.raises(ValueError, match="word_at must hold each of 47 words once"):
        make().load_state_dict(broken)


@pytest.mark.parametrize("tied", [True, False])
def test_the_embedding_shares_the_weights(tied: bool) -> None:
    head = make(frequencies=shuffled())
    embedding = AdaptiveEmbedding(head, tie_projections=tied)
    ids = torch.arange(VOCAB).reshape(1, -1)
    vectors = embedding(ids)[0]
    by_place = [head.head_weight[:6]]
    by_place += [w @ p for w, p in zip(head.weights, embedding.projections, strict=True)]
    assert_close(vectors, torch.cat(by_place)[head.place_of], atol=1e-12)
    assert embedding.weights[0] is head.weights[0]
    assert (embedding.projections[0] is head.projections[0]) == tied
    (vectors.sum() + F.cross_entropy(head(vectors), ids[0])).backward()
    assert all(p.grad is not None for p in embedding.parameters())
    both = nn.ModuleList([head, embedding]).float()
    assert both[1].head_weight is both[0].head_weight
    assert both[1](ids).dtype == torch.float32
    with pytest.raises(ValueError, match=r"ids must be in \[0, 47\); got 47"):
        embedding(torch.tensor([47]))
    with pytest.raises(TypeError, match="head must be an AdaptiveHead"):
        AdaptiveEmbedding(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_memory_is_bounded(hidden: Tensor) -> None:
    """A tiny bound takes many tiles, to the same result."""
    head, small = make(), make()
    small.max_bytes = 1
    targets = torch.arange(13) * 3
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "none"}):
        given: Any = options
        a, b = (F.cross_entropy(h(hidden), targets, **given) for h in (head, small))
        assert_close(a, b, atol=1e-10)
    assert torch.equal(head(hidden).topk(9).indices, small(hidden).topk(9).indices)
    entropies = [h(hidden).ask(entropy=True).entropy for h in (head, small)]
    assert_close(entropies[0], entropies[1], atol=1e-10)


def test_no_tensor_of_the_size_of_the_logits() -> None:
    torch.manual_seed(0)
    tokens, vocab = 96, 5003
    head = AdaptiveHead(16, vocab, cutoffs=[500, 1500], frequencies=torch.rand(vocab))
    head.max_bytes = 2**20
    hidden = torch.randn(tokens, 16, requires_grad=True)
    ids = torch.randint(vocab, (tokens,))
    asked: Any = {"log_prob": ids, "entropy": True, "rank": ids, "top_k": 5, "kl_to": head(hidden)}
    with no_tensor_of(tokens, vocab):
        for options in ({}, {"label_smoothing": 0.1}, {"reduction": "none"}):
            given: Any = options
            F.cross_entropy(head(hidden), ids, **given).sum().backward()  # type: ignore[no-untyped-call]
        answers = head(hidden).ask(**asked)
        (answers.log_prob.sum() + answers.entropy.sum() + answers.kl.sum()).backward()
        Sampler(top_p=0.9, seed=0)(head(hidden))
        head.sample(hidden[:9])


def test_a_question_may_have_its_own_bound(hidden: Tensor) -> None:
    logits = make()(hidden)
    small = logits.ask(entropy=True, top_k=3, max_bytes=1)
    large = logits.ask(entropy=True, top_k=3)
    assert_close(small.entropy, large.entropy, atol=1e-10)
    with pytest.raises(ValueError, match="max_bytes must be at least 1"):
        logits.ask(entropy=True, max_bytes=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cutoffs": [20, 6]}, "ascending order"),
        ({"cutoffs": [6, 6]}, "ascending order"),
        ({"cutoffs": [6, 47]}, r"in \[1, 46\]; got 47"),
        ({"cutoffs": [0]}, r"in \[1, 46\]; got 0"),
        ({"cutoffs": [6.5]}, "whole number"),
        ({"cutoffs": 6}, "list of whole numbers"),
        ({"frequencies": torch.zeros(VOCAB)}, "must not all be 0"),
        ({"frequencies": torch.ones(VOCAB - 1)}, r"one entry per word, \(47,\)"),
        ({"frequencies": -torch.ones(VOCAB)}, "at least 0; got -1.0 for word 0"),
        ({"frequencies": [math.nan] * VOCAB}, "finite"),
        ({"frequencies": 3}, "tensor or a list"),
        ({"div_value": 0.5}, "div_value must be at least 1"),
        ({"bias": "tail"}, "bias must be True, False or 'head'"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make(**options)


def test_biases_start_at_the_frequencies() -> None:
    counts = torch.rand(VOCAB) + 0.1
    counts[5] = 0
    head = AdaptiveHead(DIM, VOCAB, cutoffs=[6, 20], frequencies=counts, bias=True)
    p = head.factors().log_probs(torch.zeros(1, DIM))[0].exp().detach()
    counts[5] = counts[counts > 0].min() / 2
    assert_close(p, counts / counts.sum(), rtol=1e-5)


def test_words_that_never_occur_come_last() -> None:
    frequencies = torch.ones(VOCAB)
    frequencies[:10] = 0
    head = make(frequencies=frequencies)
    assert head.word_at.tolist() == [*range(10, VOCAB), *range(10)]
