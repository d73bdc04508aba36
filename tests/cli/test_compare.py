"""`lmhead compare`: two models or two samplers on one text, and the threshold between them."""

from pathlib import Path

import pytest
from tiny_models import write_model

from cli.run_command import TEXT, document, run


def test_compare_models(model: str, other: str, file: str) -> None:
    found = document("compare", model, other, file)
    assert found["kl"] > 0
    assert found["perplexity"][0] == pytest.approx(
        document("score", model, file, "--stride", "64")["perplexity"], rel=1e-4
    )
    text = run("compare", model, other, file).stdout
    assert f"{found['kl']:.6f}" in text
    assert "most different" in text


def test_compare_with_itself_shows_no_difference(model: str) -> None:
    text = run("compare", model, model, "--text", TEXT, "--fail-above", "0").stdout
    assert "100.00%" in text
    assert "most different" not in text


@pytest.mark.parametrize(("limit", "code"), [("0.0001", 4), ("1000", 0)])
@pytest.mark.parametrize("metric", ["kl", "max-kl", "disagreement"])
def test_a_threshold(model: str, other: str, limit: str, code: int, metric: str) -> None:
    arguments = ["compare", model, other, "--text", TEXT, "--metric", metric]
    result = run(*arguments, "--fail-above", limit, code=code)
    assert ("Failed: " + metric in result.stderr) == (code == 4)


def test_compare_samplers(model: str) -> None:
    arguments = ["compare", model, "--text", TEXT, "--sampler-a", "", "--sampler-b", "top_k=3"]
    found = document(*arguments)
    assert found["kl"] is None  # what one side rules out is infinitely far
    assert 0 < found["total_variation"] < 1
    run(*arguments, "--fail-above", "100", code=4)
    run(*arguments, "--fail-above", "1", "--metric", "tv")
    assert "inf" in run(*arguments).stdout


def test_other_tokens_are_refused(model: str, tmp_path: Path) -> None:
    stranger = str(write_model(tmp_path, tokens=["x", "y"]))
    result = run("compare", model, stranger, "--text", "hello", code=2)
    assert "different vocabularies" in result.stderr
    assert "must have the same tokens" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["{model}", "--text", "a"],
        ["{model}", "{model}", "{model}", "{file}"],
        ["{model}", "{model}", "--text", "a", "--metric", "tv"],
        ["{model}", "{model}", "{file}", "--sampler-a", "top_k=1"],
        ["{model}", "--text", "a", "--sampler-a", "nonsense=1"],
        ["{model}", "--text", "a", "--sampler-a", "top_p=7"],
    ],
)
def test_compare_and_mistakes(model: str, file: str, arguments: list[str]) -> None:
    given = [a.format(model=model, file=file) for a in arguments]
    assert "Error: " in run("compare", *given, code=2).stderr
