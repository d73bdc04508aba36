"""What an `AdaptiveHead` keeps in memory: never all logits, and no more than it was given."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from torch import Tensor
from torch_watch import no_tensor_of

from lmhead import Sampler
from lmhead.vocab import AdaptiveHead
from vocab.adaptive_heads import make


def test_unused_clusters_cost_no_memory(hidden: Tensor) -> None:
    """A target in the shortlist: the clusters' gradients are 0, not missing."""
    head = make()
    F.cross_entropy(head(hidden), torch.zeros(13, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    for p in (*head.weights, *head.projections):
        assert p.grad is not None
        assert not p.grad.any()


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
