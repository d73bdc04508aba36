"""Decoding with an `AdaptiveHead`: the best tokens, in order, and draws."""

import pytest
import torch
from compare import assert_close
from torch import Tensor

from lmhead.sweep import Source
from lmhead.vocab import AdaptiveHead
from lmhead.vocab.clusters import Clusters, Part, exact_source
from vocab.adaptive_heads import DIM, VOCAB, make, shuffled


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

    def watched(clusters: Clusters, part: Part, hidden: Tensor) -> Source:
        read.append((part.number, len(hidden)))
        return exact_source(clusters, part, hidden)

    monkeypatch.setattr(cluster_top, "exact_source", watched)
    assert head(torch.ones(1, DIM)).argmax(-1).tolist() == [0]
    assert head(torch.ones(3, DIM)).argmax(-1).tolist() == [0] * 3
    assert read == [(0, 1), (0, 3)]


def test_draws_pass_chi_square() -> None:
    head = make(frequencies=shuffled(), dtype=torch.float32)
    hidden = torch.randn(DIM, generator=torch.Generator().manual_seed(5))
    n = 3000
    drawn = head.sample(hidden.expand(n, DIM), seed=11, position=torch.arange(n))
    p = head.factors().log_probs(hidden[None])[0].double().exp().detach()
    counts = torch.bincount(drawn, minlength=VOCAB)
    # 46 degrees of freedom: 1 in 10⁵ exceeds 94.
    assert float(((counts - n * p) ** 2 / (n * p)).sum()) < 94
