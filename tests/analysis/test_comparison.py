"""`compare_models` and `compare_samplers`: divergences are those of dense distributions."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny, write_model

from lmhead.analysis import VocabularyMismatch, compare_models, compare_samplers
from lmhead.analysis.comparison import stream_compare_models
from lmhead.models import LanguageModel, open_model
from lmhead.sampling import Sampler

TEXT = "hello ab cab 你 hello lo el " * 5


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LanguageModel, LanguageModel]:
    folder = tmp_path_factory.mktemp("models")
    return tiny(folder / "a"), tiny(folder / "b", seed=1)


def log_probs(model: LanguageModel, text: str, window: int = 64) -> torch.Tensor:
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(text)[:-1]
    parts = [ids[i : i + window] for i in range(0, len(ids), window)]
    hidden = torch.cat([model.hidden(torch.tensor([part]))[0][0] for part in parts])
    return (hidden.double() @ model.head.weight.double().T).log_softmax(-1)


def test_two_models(pair: tuple[LanguageModel, LanguageModel]) -> None:
    a, b = pair
    found = compare_models(a, b, TEXT, worst=4)
    p, q = log_probs(a, TEXT), log_probs(b, TEXT)
    kl = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    assert found.positions == len(kl)
    assert found.kl == pytest.approx(float(kl.mean()), rel=1e-5)
    assert found.max_kl == pytest.approx(float(kl.max()), rel=1e-5)
    assert found.agreement == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert found.total_variation is None
    assert a.tokenizer is not None
    targets = torch.tensor(a.tokenizer.encode(TEXT)[1:])
    for perplexity, side in zip(found.perplexity or (), (p, q), strict=True):
        picked = side.gather(-1, targets[:, None])
        assert perplexity == pytest.approx(float((-picked.mean()).exp()), rel=1e-5)
    order = kl.argsort(descending=True)[:4]
    assert [d.position - 1 for d in found.differences] == order.tolist()
    for difference, at in zip(found.differences, order.tolist(), strict=True):
        assert difference.token.id == int(targets[at])
        expected = [float(side[at, targets[at]]) for side in (p, q)]
        assert difference.log_prob == pytest.approx(expected, rel=1e-5)
        assert difference.total_variation is None
        assert difference.kl == pytest.approx(float(kl[at]), rel=1e-5)
        for (piece, share), side in zip(difference.best, (p, q), strict=True):
            assert piece.id == int(side[at].argmax())
            assert share == pytest.approx(float(side[at].max().exp()), rel=1e-5)


def test_a_model_and_itself(pair: tuple[LanguageModel, LanguageModel]) -> None:
    found = compare_models(pair[0], pair[0], TEXT, window=16)
    assert found.kl == pytest.approx(0.0, abs=1e-12)
    assert found.agreement == 1.0


def test_it_is_the_first_that_is_averaged_over(pair: tuple[LanguageModel, LanguageModel]) -> None:
    there, back = compare_models(*pair, TEXT), compare_models(*pair[::-1], TEXT)
    assert there.kl != pytest.approx(back.kl, rel=1e-3)
    assert there.perplexity == pytest.approx(tuple(reversed(back.perplexity or ())), rel=1e-6)


def test_two_samplers(pair: tuple[LanguageModel, LanguageModel]) -> None:
    a, b = Sampler(temperature=0.7), Sampler(top_p=0.6)
    found = compare_samplers(pair[0], b, a, "hello ab cab")
    z = log_probs(pair[0], "hello ab cab")
    p, q = b.process(z).softmax(-1), a.process(z).softmax(-1)
    kl = torch.where(p > 0, p * (p.log() - q.log()), 0.0).sum(-1)
    assert found.kl == pytest.approx(float(kl.mean()), rel=1e-4)
    variation = (p - q).abs().sum(-1).mean() / 2
    assert found.total_variation == pytest.approx(float(variation), rel=1e-4)
    assert found.perplexity is None
    assert pair[0].tokenizer is not None
    targets = pair[0].tokenizer.encode("hello ab cab")[1:]
    for place in found.differences:
        at = place.position - 1
        picked = [float(side[at, targets[at]].log()) for side in (p, q)]
        assert place.log_prob == pytest.approx(picked, rel=1e-4)
        varied = float((p[at] - q[at]).abs().sum()) / 2
        assert place.total_variation == pytest.approx(varied, rel=1e-4)


def test_a_token_that_one_side_rules_out(pair: tuple[LanguageModel, LanguageModel]) -> None:
    cut, plain = Sampler(top_k=2), Sampler()
    assert math.isfinite(compare_samplers(pair[0], cut, plain, "hello").kl)
    found = compare_samplers(pair[0], plain, cut, "hello")
    assert found.kl == math.inf
    assert found.to_json()["kl"] is None
    assert 0 < (found.total_variation or 0) < 1
    ruled_out = [place for place in found.differences if place.log_prob[1] == -math.inf]
    assert ruled_out
    assert all(place.to_json()["log_prob_b"] is None for place in ruled_out)
    assert all(math.isfinite(place.log_prob[0]) for place in found.differences)


def test_greedy_is_one_token(pair: tuple[LanguageModel, LanguageModel]) -> None:
    found = compare_samplers(pair[0], Sampler(temperature=0), Sampler(do_sample=False), "hello")
    assert (found.kl, found.total_variation, found.agreement) == (0.0, 0.0, 1.0)


def test_penalties_see_what_came_before(pair: tuple[LanguageModel, LanguageModel]) -> None:
    found = compare_samplers(
        pair[0], Sampler(), Sampler(repetition_penalty=1.5), "hello hello", worst=20
    )
    assert found.kl > 0


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    one = open_model(write_model(tmp_path / "one"))
    two = open_model(write_model(tmp_path / "two", tokens=["x", "y"]))
    with pytest.raises(
        VocabularyMismatch, match="different vocabularies: token id 259 is b' ' and"
    ) as e:
        compare_models(one, two, TEXT)
    assert (e.value.reason, e.value.place, e.value.found) == ("token", 259, (b" ", b"x"))


def test_all_differences_are_listed(pair: tuple[LanguageModel, LanguageModel]) -> None:
    found = compare_models(*pair, TEXT, window=16, worst=1000)
    assert sorted(d.position for d in found.differences) == list(range(1, found.positions + 1))
    assert math.fsum(d.kl for d in found.differences) == pytest.approx(found.kl * found.positions)


def test_a_comparison_grows_window_by_window(pair: tuple[LanguageModel, LanguageModel]) -> None:
    parts = [step.result() for step in stream_compare_models(*pair, TEXT, window=4, worst=1000)]
    want = compare_models(*pair, TEXT, window=4, worst=1000)
    assert [part.positions for part in parts][:2] == [4, 8]
    assert parts[-1] == want
    first = [d for d in want.differences if d.position <= 4]
    assert sorted(parts[0].differences, key=lambda d: d.position) == sorted(
        first, key=lambda d: d.position
    )


def test_too_short_a_text(pair: tuple[LanguageModel, LanguageModel]) -> None:
    with pytest.raises(ValueError, match="text must have at least two tokens"):
        compare_models(*pair, "")
