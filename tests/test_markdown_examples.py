"""The checks of fenced examples can fail: each rule, with a page that breaks it."""

from pathlib import Path

import pytest
from markdown_examples import ROOT, PageError, run_console, run_python, split

PAGE = """# A page
```python
>>> x = 2
>>> x + x
{result}
```
Text between.
```python
assert x == 2
print("output of a program is not compared")
```
"""


def test_right_result_passes() -> None:
    assert run_python("page.md", PAGE.format(result=4)) == ""


def test_wrong_result_fails_with_its_line() -> None:
    report = run_python("page.md", PAGE.format(result=5))
    assert 'File "page.md", line 4' in report
    assert "Expected:\n    5\nGot:\n    4" in report


def test_closing_fence_is_not_expected_output() -> None:
    assert run_python("page.md", "```python\n>>> x = 2\n```\n") == ""


def test_program_that_raises_fails() -> None:
    report = run_python("page.md", "```python\nx = 1\ny = undefined\n```\n")
    assert "NameError" in report
    assert 'File "page.md", line 3' in report


def test_block_is_skipped_only_by_its_mark() -> None:
    block = "```python\nundefined\n```\n"
    assert run_python("page.md", "<!-- not run: needs a file -->\n" + block) == ""
    assert run_python("page.md", "<!-- not run: needs a file -->\n\n" + block) != ""
    assert run_python("page.md", "<!-- not run -->\n" + block) != ""


@pytest.mark.parametrize(
    "page",
    [
        ">>> 1 + 1\n2\n",
        "```text\n>>> 1 + 1\n2\n```\n",
        "```python\n>>> 1 + 1\n2\n",
        "```console\nlmhead demo\n```\n",
    ],
    ids=["no fence", "wrong fence", "open fence", "no prompt"],
)
def test_unread_example_is_an_error(page: str) -> None:
    with pytest.raises(PageError):
        split(page)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("lmhead nxt tiny hello", "no command 'nxt'"),
        ("lmhead next tiny hello --top-q 0.9", "No such option '--top-q'"),
        ("lmhead next tiny hello --top-k many", "not a valid int"),
        ("lmhead demo --lang fr", "'fr' is not one of"),
        ("lmhead models", "needs a command"),
        ("make coffee", "no target 'coffee'"),
        ("python -m benchmarks.nothing", "cannot find 'benchmarks/nothing'"),
    ],
)
def test_command_that_cannot_be_typed_fails(command: str, error: str) -> None:
    report = run_console("page.md", f"```console\n$ {command}\n```\n")
    assert report.startswith("page.md:2: ")
    assert error in report


@pytest.mark.parametrize(
    "command",
    [
        'lmhead next tiny "I love" --temperature 0.7 --top-p 0.9   # a comment',
        "lmhead score tiny book.txt | head",
        "LMHEAD_NATIVE=off lmhead doctor",
        ".venv/bin/lmhead demo --toy",
        "make bench BENCH=--quick",
    ],
)
def test_command_that_can_be_typed_passes(command: str) -> None:
    assert run_console("page.md", f"```console\n$ {command}\n```\n") == ""


def test_unknown_option_in_running_text_fails() -> None:
    assert run_console("page.md", "Try `lmhead next --top-k` or `lmhead COMMAND`.") == ""
    assert "no option '--top-q'" in run_console("page.md", "Try `lmhead next --top-q`.")


def test_marked_console_block_is_run() -> None:
    page = "<!-- run -->\n```console\n$ lmhead --version\nlmhead, version {}\n```\n"
    assert run_console("page.md", page.format("...")) == ""
    assert "Got:" in run_console("page.md", page.format("none"))


def test_pages_are_collected(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((ROOT / "conftest.py").read_text(encoding="utf-8"))
    pytester.path.joinpath("page.md").write_text(PAGE.format(result=5), encoding="utf-8")
    tests = Path(__file__).parent
    outcome = pytester.runpytest("-p", "no:cacheprovider", "-o", f"pythonpath={tests}", "page.md")
    outcome.assert_outcomes(failed=1)
    outcome.stdout.fnmatch_lines(['File "page.md", line 4*'])
