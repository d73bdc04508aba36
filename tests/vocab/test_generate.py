"""Text from a factored head: generation and beam search see it as any head."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_close
from markov_models import Chain
from torch import Tensor

from lmhead import Sampler, beam_search, generate
from lmhead.vocab import AdaptiveHead, FactoredHead, HierarchicalHead

VOCAB, DIM = 12, 6
HEADS: dict[str, Callable[[], FactoredHead]] = {
    "adaptive": lambda: AdaptiveHead(DIM, VOCAB, cutoffs=[3, 7], div_value=2.0),
    "hierarchical": lambda: HierarchicalHead(DIM, VOCAB, tree="balanced"),
}


class FactoredChain(Chain):
    """The next token depends on the last one, through a table of hidden states and a head."""

    def __init__(self, head: FactoredHead) -> None:
        self.module, self.states = head, 3 * torch.randn(VOCAB, DIM)
        log_p = head.factors().log_probs(self.states).detach()
        super().__init__(log_p, eos=(0,))

    def head(self, hidden: Tensor) -> Any:
        return self.module(self.states[hidden[..., 0].long()])


@pytest.fixture(params=HEADS)
def models(request: pytest.FixtureRequest) -> tuple[Chain, Chain]:
    """A factored model, and the same from its table of log-probabilities."""
    torch.manual_seed(0)
    head = HEADS[request.param]()
    with torch.no_grad():
        for p in head.parameters():
            p.mul_(4.0)
    lazy = FactoredChain(head)
    return lazy, Chain(lazy.logits, eos=(0,))


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"seed": 1}, {"top_k": 4, "seed": 2}, {"top_p": 0.7, "seed": 3}],
    ids=str,
)
def test_generation(models: tuple[Chain, Chain], options: dict[str, Any]) -> None:
    texts = [
        generate(model, [[3], [5, 7]], Sampler(**options), max_new_tokens=8, logprobs=2)
        for model in models
    ]
    for ours, theirs in zip(*texts, strict=True):
        assert ours.tokens == theirs.tokens
        pairs = zip(ours.events, theirs.events, strict=True)
        assert all(abs(a.log_prob - b.log_prob) < 1e-4 for a, b in pairs)


def test_beam_search(models: tuple[Chain, Chain]) -> None:
    found = [beam_search(model, [[3]], num_beams=3, max_new_tokens=4) for model in models]
    assert found[0].sequences == found[1].sequences
    assert_close(torch.tensor(found[0].scores), torch.tensor(found[1].scores), atol=1e-4)
