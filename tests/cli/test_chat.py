"""`lmhead generate --chat`: a message in, the answer out, and what cannot be answered."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from models import hf_folders
from tiny_models import write_model

from lmhead.cli import main
from lmhead.models import open_model
from lmhead.sampling import generate

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and m.content == 'no' %}"
    "{{ raise_exception('not so') }}{% endif %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)
ASKED = [{"role": "user", "content": "what a thing"}]
TOLD = [{"role": "system", "content": "be kind"}, *ASKED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("chat")
    hf_folders.write(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def run(*arguments: str, code: int = 0, input: str | None = None) -> Result:
    result = CliRunner().invoke(main, ["generate", *arguments], input=input)
    assert result.exit_code == code, result.output
    return result


def test_only_the_answer_is_shown(folder: str) -> None:
    model = open_model(folder)
    assert model.chat is not None
    want = generate(model, model.chat.encode(TOLD), max_new_tokens=9)
    shown = run(folder, "--chat", "what a thing", "--system", "be kind", "-n", "9").stdout
    assert shown == want.text + "\n"
    assert (
        run(folder, "--chat", "-", "--system", "be kind", "-n", "9", input="what a thing\n").stdout
        == shown
    )


@pytest.mark.parametrize("options", [[], ["--beams", "2"]], ids=["greedy", "beams"])
def test_json(folder: str, options: list[str]) -> None:
    result = run(folder, "--chat", "what a thing", "-n", "4", "--json", *options)
    (row,) = json.loads(result.stdout)["generations"]
    assert row["prompt"] == "<s>user: what a thing</s><s>"
    assert row["messages"] == ASKED
    plain = run(folder, "what a thing", "-n", "4", "--json", *options)
    assert "messages" not in json.loads(plain.stdout)["generations"][0]


@pytest.mark.parametrize("options", [["--logprobs", "2"], ["--beams", "2"], ["--screen"]])
def test_the_message_is_not_repeated(folder: str, options: list[str]) -> None:
    assert "what a thing" not in run(folder, "--chat", "what a thing", "-n", "4", *options).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}", "x", "--chat", "y"], "--chat replaces PROMPT"),
        (["{folder}", "--chat", "y", "-p", "z"], "--chat replaces PROMPT"),
        (["{folder}", "x", "--system", "y"], "--system needs --chat"),
        (["{folder}", "--chat", "x", "--system", "no"], "not accept this conversation: not so"),
        (["{none}", "--chat", "x"], "has no chat template"),
    ],
)
def test_mistakes(folder: str, tmp_path: Path, arguments: list[str], message: str) -> None:
    none = str(write_model(tmp_path))
    given = [argument.format(folder=folder, none=none) for argument in arguments]
    assert message in " ".join(run(*given, code=2).stderr.split())


def test_a_damaged_template(tmp_path: Path) -> None:
    hf_folders.write(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    found = run(str(tmp_path), "--chat", "x", code=3).stderr
    assert "chat_template.jinja cannot be used" in found
    run(str(tmp_path), "x", "-n", "1")  # which a plain prompt does not need
