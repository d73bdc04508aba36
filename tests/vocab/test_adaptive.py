"""`AdaptiveHead` against the textbook and against torch's, with gradients."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import assert_as_good_as, assert_close, float64
from torch import Tensor, nn

from lmhead import reference
from lmhead.vocab import AdaptiveHead
from vocab.adaptive_heads import DIM, VOCAB, make, reference_log_p, shuffled, textbook


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
    soft.requires_grad_()
    ours, theirs = F.cross_entropy(head(hidden), soft), F.cross_entropy(dense, soft)
    grads = (torch.autograd.grad(loss, soft, retain_graph=True)[0] for loss in (ours, theirs))
    assert_close(*grads, atol=1e-12)


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


def test_sums_to_one_at_a_hundred_thousand_tokens() -> None:
    torch.manual_seed(0)
    head = AdaptiveHead(32, 100_000, frequencies=torch.rand(100_000))
    assert head.cutoffs
    hidden = 3 * torch.randn(3, 32)
    log_p = head.factors().log_probs(hidden)
    assert_close(log_p.double().exp().sum(1), torch.ones(3), atol=1e-5)
    ids = torch.randint(100_000, (3, 50))
    assert_close(head.log_prob(hidden, ids), log_p.gather(1, ids), atol=2e-5)
