"""Decisions between logits that float32 can hardly hold: still those of float64."""

import pytest
import torch

import lmhead

pytestmark = pytest.mark.both_cores


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e-25])
def test_argmax_and_rank_of_tiny_logits(size: float) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(257, 3, generator=random) * size
    hidden = torch.randn(9, 3, generator=random) * 1e-3
    z = (hidden.double()[:, None] * weight.double()).sum(-1)
    best = z.argmax(-1)
    answers = lmhead.query(hidden, weight, argmax=True, rank=best)
    assert answers.argmax is not None
    assert answers.rank is not None
    assert torch.equal(answers.argmax, best)
    assert torch.equal(answers.rank, torch.zeros_like(best))
