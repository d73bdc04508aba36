"""Generation with a screened head: the tokens of plain generation, and what it cost."""

import copy

import pytest
from tiny_models import tiny

from lmhead.models import LanguageModel
from lmhead.sampling import Sampler, generate


@pytest.fixture
def model(tmp_path: str) -> LanguageModel:
    return tiny(tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(do_sample=False),
        Sampler(seed=1),
        Sampler(top_p=0.8, seed=[4, 5], repetition_penalty=1.2),
    ],
)
def test_the_same_tokens(model: LanguageModel, sampler: Sampler) -> None:
    prompts = ["hello", "ab 你"]
    plain = generate(model, prompts, copy.copy(sampler), max_new_tokens=10, eos_token_ids=())
    model.head.screen()
    made = generate(model, prompts, sampler, max_new_tokens=10, eos_token_ids=())
    assert [one.tokens for one in made] == [one.tokens for one in plain]
    for one, other in zip(made, plain, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=one.log_prob_error + 1e-5)
        assert other.log_prob_error == 0.0


def test_the_report(model: LanguageModel) -> None:
    report = model.head.screen().report
    sampler = Sampler(do_sample=False)
    generate(model, "hello", sampler, max_new_tokens=8, eos_token_ids=())
    assert report.choices == 8
    assert report.bytes_full == 8 * model.head.weight.nbytes
    assert report.bytes_read > 0
    assert report.share_read == report.bytes_read / report.bytes_full
    assert 1 <= report.rows_rescored <= 300
    assert report.to_json()["choices"] == 8
