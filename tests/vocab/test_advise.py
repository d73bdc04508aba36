"""Advice: sizes are those of the heads, times are ordered as they must be, and it prints."""

import json
from typing import Any

import pytest

from lmhead import LMHead
from lmhead.vocab import AdaptiveHead, HierarchicalHead, advise
from lmhead.vocab.frequencies import zipf

KINDS = ["full", "tied", "adaptive", "hierarchical", "sampled"]


def parameters(module: Any) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("measure", [False, True])
def test_a_row_per_head(measure: bool) -> None:
    vocab, width = 5000, 64
    advice = advise(vocab, width, 64, measure=measure, num_samples=50)
    assert [h.kind for h in advice.heads] == KINDS
    sizes = {h.kind: h.parameters for h in advice.heads}
    assert sizes == {
        "full": parameters(LMHead(width, vocab)),
        "tied": 0,
        "adaptive": parameters(AdaptiveHead(width, vocab, cutoffs=advice.cutoffs)),
        "hierarchical": parameters(HierarchicalHead(width, vocab, frequencies=zipf(vocab))),
        "sampled": parameters(LMHead(width, vocab)),
    }
    for head in advice.heads:
        assert min(head.step_seconds, head.log_prob_seconds, head.argmax_seconds) > 0
        assert head.training_bytes == 16 * head.parameters
    assert advice.measured == measure
    assert advice.recommendation in KINDS


def test_the_model_orders_the_heads() -> None:
    by_kind = {h.kind: h for h in advise(300_000, 512, 2048).heads}
    steps = [by_kind[k].step_seconds for k in ("full", "adaptive", "hierarchical")]
    assert steps == sorted(steps, reverse=True)
    assert by_kind["sampled"].step_seconds < by_kind["full"].step_seconds
    assert by_kind["sampled"].argmax_seconds == by_kind["full"].argmax_seconds


def test_recommendations() -> None:
    assert advise(300_000, 256, layers=2).recommendation == "adaptive"
    assert advise(500_000, 256).recommendation == "adaptive"
    assert advise(49_152, 576, 8192, layers=30).recommendation == "tied"
    small = advise(2000, 1024, layers=24)
    assert small.recommendation == "full"
    assert "affordable" in small.reasons[-1]
    assert advise(8000, 512, layers=8).recommendation == "tied"
    even = advise(20_000, 64, frequencies=[1] * 20_000)
    assert even.recommendation == "full"
    assert "too little" in even.reasons[-1]


def test_it_prints_and_serialises() -> None:
    advice = advise(33_278, 256, layers=2)
    lines = str(advice).splitlines()
    start = "Heads for V 33,278, D 256, 1,024 tokens a step; estimated on this machine"
    assert lines[0].startswith(start)
    assert [line.split()[0] for line in lines[2:7]] == KINDS
    assert lines[7] == f"Recommended: {advice.recommendation}"
    assert json.loads(advice.to_json())["heads"][2]["kind"] == "adaptive"


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="vocab_size must be at least 1"):
        advise(0, 8)
    with pytest.raises(ValueError, match="one entry per token"):
        advise(10, 8, frequencies=[1, 2])
    with pytest.raises(ValueError, match="layers must be at least 0"):
        advise(10, 8, layers=-1)


def test_tiny_vocabularies() -> None:
    for vocab in (1, 2, 10):
        assert advise(vocab, 4, 1).recommendation == "full"
