"""The check of expressions finds what it should, and lets pass what is allowed."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "check_english.py"


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("check_english", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_english"] = module
    spec.loader.exec_module(module)
    return module


script = _script()


def found(text: str, path: str = "src/lmhead/head.py") -> list[tuple[int, str]]:
    return [(finding.line, finding.rule.name) for finding in script.check(path, text)]


EXAMPLES = [
    ("every word of the vocabulary", "word"),
    ("Words cut.", "word"),
    ("the marks at the end", "marks"),
    ("a whole number", "whole number"),
    ("share of activations put out", "put out"),
    ("the longest gradient", "longest gradient"),
    ("what is sought", "sought"),
    ("what came behind the prompt", "behind the prompt"),
    ("Take it along", "take along"),
    ("narrow screens are served", "is served"),
    ("the user is told", "is told"),
    ("where nn.Linear stands", "stands"),
    ("so many at a time", "so many"),
    ("somebody differentiates again", "nobody"),
    ("Everybody", "nobody"),
    ("checked at the door", "the door"),
    ("the manners of a tensor", "manners"),
    ("SIGTERM as a wish", "a wish"),
    ("the lists at hand", "at hand"),
    ("goes on with the next", "goes on with"),
    ("what became of the run", "came of"),
    ("what a sampler makes of it", "makes of"),
    ("where it cannot be had", "be had"),
    ("while the patch is in force", "in force"),
    ("gives back a tensor", "gives back"),
    ("in the manner of BPE", "in the manner of"),
    ("puts an end to it", "put an end to"),
    ("said = process.stderr", "said"),
    ("n_words = 3", "word"),
    ("seekWord(id)", "word"),
]


@pytest.mark.parametrize(("line", "rule"), EXAMPLES)
def test_expression_is_found(line: str, rule: str) -> None:
    assert found("# fine\n" + line) == [(2, rule)]


def test_every_rule_has_an_example_above() -> None:
    assert {rule for _, rule in EXAMPLES} == {rule.name for rule in script.RULES}


@pytest.mark.parametrize(
    "line",
    [
        "keyword",
        "bad_words_ids=[[1]]",
        "password",
        "benchmarks",
        "bookmarks",
        "understands",
        "bedroom",
    ],
)
def test_part_of_another_name_is_not(line: str) -> None:
    assert found(line) == []


def test_learners_read_of_words() -> None:
    assert found("the next word", "src/lmhead/reference/softmax.py") == []
    assert found("the next word", "docs/textbook.md") == []
    assert found("the next word", "docs/lazy.md") == [(1, "word")]


def test_a_json_file_is_allowed_by_section() -> None:
    text = "\n".join(['  "intro": {', "a word", '  "lens": {', "a word"])
    assert found(text, "explorer/src/i18n/en.json") == [(4, "word")]


def test_comment_allows_one_expression_on_one_line() -> None:
    assert found("a word  # english: word") == []
    assert found("a word that stands  # english: word") == [(1, "stands")]


def test_finding_names_file_line_and_term() -> None:
    (finding,) = script.check("docs/lazy.md", "a whole number")
    assert str(finding) == "docs/lazy.md:1: 'whole number'; say integer"


def test_all_that_people_read_passes() -> None:
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert (run.stdout, run.returncode) == ("", 0)
    assert all((SCRIPT.parents[1] / path).exists() for path in script.TREE)


def test_exit_code_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/picture.png").write_bytes(b"\xff\xfe")
    (tmp_path / "docs/page.md").write_text("an integer")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    assert script.main(["docs"]) == 0
    (tmp_path / "docs/page.md").write_text("a whole number")
    assert script.main(["docs"]) == 1
