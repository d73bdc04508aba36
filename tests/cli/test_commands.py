"""What holds for all commands: they fit the terminal, use colours with care, and are documented."""

import math
import re
from pathlib import Path

import pytest
from click import unstyle

from cli.run_command import document, run
from lmhead.cli import _commands_page
from lmhead.cli._terminal import columns

ROOT = Path(__file__).resolve().parents[2]


def commands(model: str, other: str, file: str) -> dict[str, list[str]]:
    return {
        "next": [model, "hello 你 ab", "--top-p", "0.9"],
        "score": [model, file],
        "generate": [model, "hello", "-n", "5", "--logprobs", "2"],
        "lens": [model, "hello 你 ab cab"],
        "compare": [model, other, file],
        "inspect": [model],
        "check": [model, "--tokens", "4"],
        "doctor": [],
    }


@pytest.mark.parametrize("name", ["next", "score", "generate", "lens", "compare"])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_output_fits_the_terminal(name: str, width: int, model: str, other: str, file: str) -> None:
    arguments = commands(model, other, file)[name]
    text = run(name, *arguments, env={"COLUMNS": str(width)}).stdout
    assert "\x1b" not in text
    assert max(columns(line) for line in text.splitlines()) <= max(width, 80)
    assert not [line for line in text.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize("name", ["next", "score", "lens", "compare"])
def test_colours_only_where_they_are_wanted(name: str, model: str, other: str, file: str) -> None:
    arguments = commands(model, other, file)[name]
    coloured = run(name, *arguments, color=True).stdout
    assert "\x1b[" in coloured
    plain = run(name, *arguments, color=True, env={"NO_COLOR": "1"}).stdout
    assert plain == unstyle(coloured)


@pytest.mark.parametrize(
    "name", ["next", "score", "generate", "lens", "compare", "inspect", "check", "doctor"]
)
def test_every_field_is_documented(name: str, model: str, other: str, file: str) -> None:
    page = (ROOT / "docs/json.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
    common = page.split("\n## A token")[0]
    found = document(name, *commands(model, other, file)[name])
    for field in found:
        assert f"| `{field}` |" in section + common or field in "ab", field
    for field in re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE):
        assert field in found or (name == "doctor" and found["core"] != "native"), field
    if "model" in found:
        sizes = {"vocab_size", "hidden_size", "max_length"}
        assert set(found["model"]) == {"name", "engine", *sizes}
    assert all(math.isfinite(x) for x in found.values() if isinstance(x, float))


def test_a_token_is_what_the_page_says(model: str) -> None:
    page = (ROOT / "docs/json.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", page.split("## A token")[1].split("\n## ")[0], re.M)
    assert list(document("next", model, "a")["tokens"][0]) == listed
    assert set(document("score", model, "--text", "ab")["tokens"][0]) > set(listed)


def test_the_command_reference_is_up_to_date() -> None:
    assert _commands_page.PAGE.read_text(encoding="utf-8") == _commands_page.page(), (
        "the help pages have changed: python -m lmhead.cli._commands_page"
    )
