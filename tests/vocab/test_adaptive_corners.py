"""An `AdaptiveHead` at its corners: nothing to learn, masked tokens, no clusters, checkpoints."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from torch import Tensor, nn

from lmhead.vocab import AdaptiveEmbedding, AdaptiveHead
from vocab.adaptive_heads import DIM, VOCAB, make, shuffled


def test_everything_ignored(hidden: Tensor) -> None:
    head = make()
    ignored = torch.full((13,), -100)
    assert F.cross_entropy(head(hidden), ignored).isnan()
    assert F.cross_entropy(head(hidden), ignored, reduction="sum") == 0
    assert not F.cross_entropy(head(hidden), ignored, reduction="none").any()


def test_a_masked_token_has_probability_0(hidden: Tensor) -> None:
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


def test_a_checkpoint_brings_the_order_of_tokens(hidden: Tensor) -> None:
    trained, fresh = make(frequencies=shuffled()), make()
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(fresh(hidden).argmax(-1), trained(hidden).argmax(-1))
    assert_close(fresh(hidden)[..., 17], trained(hidden)[..., 17], atol=1e-12)
    again = copy.deepcopy(trained)
    assert_close(again(hidden)[..., 17], trained(hidden)[..., 17], atol=1e-12)
    broken = trained.state_dict() | {"word_at": torch.zeros(VOCAB, dtype=torch.int64)}
    with pytest.raises(ValueError, match="word_at must hold each of 47 tokens once"):
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cutoffs": [20, 6]}, "ascending order"),
        ({"cutoffs": [6, 6]}, "ascending order"),
        ({"cutoffs": [6, 47]}, r"in \[1, 46\]; got 47"),
        ({"cutoffs": [0]}, r"in \[1, 46\]; got 0"),
        ({"cutoffs": [6.5]}, "integer"),
        ({"cutoffs": 6}, "list of integers"),
        ({"frequencies": torch.zeros(VOCAB)}, "must not all be 0"),
        ({"frequencies": torch.ones(VOCAB - 1)}, r"one entry per token, \(47,\)"),
        ({"frequencies": -torch.ones(VOCAB)}, "at least 0; got -1.0 for token 0"),
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


def test_tokens_that_never_occur_come_last() -> None:
    frequencies = torch.ones(VOCAB)
    frequencies[:10] = 0
    head = make(frequencies=frequencies)
    assert head.word_at.tolist() == [*range(10, VOCAB), *range(10)]
