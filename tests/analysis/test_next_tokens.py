"""`next_tokens`: probabilities are softmax's; the effect of a sampler is reported."""

import math
from pathlib import Path

import pytest
import torch
from tiny_models import tiny

from lmhead.analysis import next_tokens
from lmhead.models import LanguageModel
from lmhead.sampling import Sampler


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return tiny(tmp_path_factory.mktemp("model"))


def logits(model: LanguageModel, text: str) -> torch.Tensor:
    assert model.tokenizer is not None
    hidden, _ = model.hidden(torch.tensor([model.tokenizer.encode(text)]))
    return hidden[0, -1].double() @ model.head.weight.double().T


def test_the_best_tokens_with_their_figures(model: LanguageModel) -> None:
    z = logits(model, "hello")
    log_p = z.log_softmax(-1)
    found = next_tokens(model, "hello", top=7)
    assert [t.piece.id for t in found.tokens] == z.argsort(descending=True)[:7].tolist()
    assert [t.rank for t in found.tokens] == list(range(7))
    for token in found.tokens:
        assert token.logit == pytest.approx(float(z[token.piece.id]), abs=1e-5)
        assert token.log_prob == pytest.approx(float(log_p[token.piece.id]), abs=1e-5)
        assert token.processed_p == pytest.approx(token.p)
        assert token.cut_by is None
    assert found.mass == pytest.approx(float(log_p.exp().topk(7).values.sum()), abs=1e-6)
    assert found.entropy == pytest.approx(float(-(log_p * log_p.exp()).sum()), abs=1e-5)
    assert found.processed is None
    assert found.vocab_size == 300


def test_the_prompt_comes_back_as_tokens(model: LanguageModel) -> None:
    found = next_tokens(model, "hello 你")
    assert found.prompt[0].special == "<bos>"
    assert b"".join(p.bytes for p in found.prompt).decode() == "hello 你"


def test_ids_in_place_of_text(model: LanguageModel) -> None:
    assert model.tokenizer is not None
    by_ids = next_tokens(model, model.tokenizer.encode("hello"))
    assert by_ids == next_tokens(model, "hello")


def test_more_tokens_than_there_are(model: LanguageModel) -> None:
    found = next_tokens(model, "a", top=10_000)
    assert len(found.tokens) == 300
    assert found.mass == pytest.approx(1.0)


def test_what_cut_each_token(model: LanguageModel) -> None:
    sampler = Sampler(temperature=0.5, top_k=20, top_p=0.8, seed=0)
    found = next_tokens(model, "hello", top=40, sampler=sampler)
    z = logits(model, "hello")
    p = (z / 0.5).softmax(-1)
    order = z.argsort(descending=True).tolist()
    among = p[order[:20]] / p[order[:20]].sum()
    kept = int((among.cumsum(0) < 0.8).sum()) + 1
    assert 1 < kept < 20
    for place, token in enumerate(found.tokens):
        want = None if place < kept else "top_p" if place < 20 else "top_k"
        assert token.cut_by == want, place
        share = float(among[place] / among[:kept].sum()) if place < kept else 0.0
        assert token.processed_p == pytest.approx(share, abs=1e-6)
    assert found.processed is not None
    assert found.processed.kept == kept
    assert found.processed.mass == pytest.approx(float(z.softmax(-1)[order[:kept]].sum()), abs=1e-6)
    assert [s.stage for s in found.processed.steps] == ["logits", "temperature", "top_k", "top_p"]


def test_a_token_that_only_the_sampler_likes_is_in_the_table(model: LanguageModel) -> None:
    z = logits(model, "hello")
    last = int(z.argmin())
    found = next_tokens(model, "hello", top=3, sampler=Sampler(logit_bias={last: 99.0}, seed=0))
    token = found.tokens[-1]
    assert (token.piece.id, token.rank) == (last, 299)
    assert token.processed_p == pytest.approx(1.0)
    assert token.logit == pytest.approx(float(z[last]), abs=1e-4)
    assert [t.rank for t in found.tokens] == sorted(t.rank for t in found.tokens)


@pytest.mark.parametrize(
    ("options", "stage"),
    [({"temperature": 0.0}, "temperature"), ({"do_sample": False}, "do_sample")],
)
def test_greedy_leaves_one_token(
    model: LanguageModel, options: dict[str, float], stage: str
) -> None:
    found = next_tokens(model, "hello", sampler=Sampler(**options))  # type: ignore[arg-type]
    assert [t.processed_p for t in found.tokens] == [1.0] + [0.0] * 9
    assert {t.cut_by for t in found.tokens[1:]} == {stage}
    assert found.processed is not None
    assert found.processed.kept == 1
    assert found.processed.token.id == found.tokens[0].piece.id


def test_the_token_is_the_samplers(model: LanguageModel) -> None:
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("hello")
    for seed in range(5):
        sampler = Sampler(temperature=3.0, seed=seed)
        found = next_tokens(model, "hello", sampler=sampler)
        assert found.processed is not None
        token = sampler(logits(model, "hello")[None], [ids]).token
        assert found.processed.token.id == int(token)


def test_json_has_what_the_contract_says(model: LanguageModel) -> None:
    found = next_tokens(model, "a", top=2, sampler=Sampler(top_k=1)).to_json()
    names = {"id", "text", "bytes", "logit", "p", "processed_p", "log_prob", "rank", "cut_by"}
    assert [set(token) for token in found["tokens"]] == [names, names]
    assert found["tokens"][1]["processed_p"] == 0.0
    assert found["tokens"][1]["cut_by"] == "top_k"


def test_mistakes(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="prompt must have at most 64 tokens"):
        next_tokens(model, "a" * 500)
    with pytest.raises(ValueError, match="prompt must have at least one token"):
        next_tokens(model, [])
    with pytest.raises(ValueError, match="top must be at least 1"):
        next_tokens(model, "a", top=0)
    with pytest.raises(ValueError, match="prompt must be in"):
        next_tokens(model, [300])


def test_a_masked_token_is_no_number_in_json(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    model.head.bias = torch.nn.Parameter(torch.zeros(300), requires_grad=False)
    model.head.bias[5] = -math.inf
    token = next_tokens(model, "a", top=300).tokens[-1]
    assert token.piece.id == 5
    assert token.to_json()["logit"] is None
    assert token.to_json()["log_prob"] is None
    assert token.p == 0.0
