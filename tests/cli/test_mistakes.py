"""Mistakes in a command that only the model can tell: code 2, in a sentence."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lmhead.cli import main

TEXT = "hello ab cab hello"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("score {model} --text TEXT --window 9999", "--window must be at most"),
        ("score {model} --text TEXT --stride 9999", "--stride must be at most the window"),
        (
            "score {model} --text TEXT --window 4 --stride 5",
            "--stride must be at most the window, 4",
        ),
        ("next {model} ab --logit-bias 300=1", "--logit-bias must be token ids in [0, 300)"),
        ("next {model} ab --prompt-length 99", "--prompt-length must be at most"),
        ("next {model} ab --suppress-tokens 1,-1", "--suppress-tokens must be token ids"),
        ("generate {model} ab --allowed-token-ids 999", "--allowed-token-ids must be token ids"),
        ("generate {model} ab --logprobs 301", "--logprobs must be at most 300"),
        ("compare {model} {model} --text TEXT --window 9999", "--window must be at most"),
        ("compare {model} {model} --text TEXT --fail-above nan", "--fail-above must be a number"),
    ],
)
def test_they_are_reported(model: str, line: str, message: str) -> None:
    arguments = [TEXT if part == "TEXT" else part.format(model=model) for part in line.split()]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, message in result.stderr) == (2, True), result.output


@pytest.mark.parametrize("name", ["next", "lens"])
def test_more_tokens_than_there_are(model: str, name: str) -> None:
    result = CliRunner().invoke(main, [name, model, "ab", "--top", "100000", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    best = found["tokens"] if name == "next" else found["layers"][-1]["cells"][-1]["best"]
    assert len(best) == 300


def test_inspect_says_whether_a_model_answers(model: str, tmp_path: Path) -> None:
    hf_folders = pytest.importorskip("models.hf_folders")
    hf_folders.write(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for where, answers in ((model, False), (str(tmp_path), True)):
        found = CliRunner().invoke(main, ["inspect", where, "--json"])
        assert json.loads(found.stdout)["chat"] is answers
        shown = CliRunner().invoke(main, ["inspect", where]).stdout
        assert ("lmhead generate --chat" in shown) is answers
