"""`generate(return_kept=True)`: what a trainer needs to score sampled tokens as they were drawn."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare import assert_close

import lmhead
from lmhead.nn import LlamaBody, LlamaConfig


def model() -> Any:
    torch.manual_seed(0)
    body = LlamaBody(LlamaConfig(50, 16, 24, 2, 4, 2))
    head = lmhead.LMHead.tied(body.embedding)
    return SimpleNamespace(body=body, head=head, eos_token_ids=(), tokenizer=None)


def test_the_log_probs_of_the_sampler_come_back_with_gradients() -> None:
    """Sampler and trainer agree token by token: the ratio of the first step is 1."""
    made = model()
    sampler = lmhead.Sampler(temperature=0.8, top_p=0.7, top_k=20, seed=3)
    prompts = [[3, 1, 4], [1, 5, 9]]
    for one in lmhead.generate(made, prompts, sampler, max_new_tokens=6, return_kept=True):
        ids = torch.tensor([[*one.prompt_ids, *one.tokens]])
        hidden, _ = made.body(ids, None, torch.ones_like(ids, dtype=torch.bool))
        states = hidden[0, len(one.prompt_ids) - 1 : -1]
        tokens, kept = torch.tensor(one.tokens), one.kept
        answers = lmhead.query(
            states, made.head.weight, temperature=0.8, log_prob=tokens, kept=kept
        )
        drawn = torch.tensor([event.sampler_log_prob for event in one.events])
        assert_close(answers.log_prob, drawn, atol=1e-5)
        assert answers.log_prob.requires_grad
        assert all(1 <= len(event.kept or ()) <= 20 for event in one.events)
        assert len(kept[1]) == 7


def test_kept_sets_must_be_asked_for() -> None:
    made = lmhead.generate(model(), [3, 1], max_new_tokens=2)
    with pytest.raises(ValueError, match="return_kept=True"):
        _ = made.kept
