"""`ScreenedSampler`: the tokens of plain generation, and what it cost."""

import pytest
from tiny_models import tiny

from lmhead.analysis import ScreenedSampler
from lmhead.models import LanguageModel
from lmhead.sampling import Sampler, generate
from lmhead.screen import ScreenedHead


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "sampler", [None, Sampler(seed=1), Sampler(top_p=0.8, seed=[4, 5], repetition_penalty=1.2)]
)
def test_the_same_tokens(model: LanguageModel, sampler: Sampler | None) -> None:
    prompts = ["hello", "ab 你"]
    screened = ScreenedSampler(ScreenedHead(model.head), sampler)
    made = generate(model, prompts, screened, max_new_tokens=10, eos_token_ids=())
    plain = generate(model, prompts, sampler, max_new_tokens=10, eos_token_ids=())
    assert [one.tokens for one in made] == [one.tokens for one in plain]
    for one, other in zip(made, plain, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=screened.widest + 1e-5)


def test_the_report(model: LanguageModel) -> None:
    screened = ScreenedSampler(ScreenedHead(model.head))
    generate(model, "hello", screened, max_new_tokens=8, eos_token_ids=())
    report = screened.report
    assert report.choices == 8
    assert report.bytes_full == 8 * model.head.weight.nbytes
    assert report.bytes_read > 0
    assert report.share_read == report.bytes_read / report.bytes_full
    assert 1 <= report.rows_rescored <= 300
    assert report.to_json()["choices"] == 8


def test_mirostat_is_refused(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="mirostat does not go with certified decode"):
        ScreenedSampler(ScreenedHead(model.head), Sampler(mirostat=2))
