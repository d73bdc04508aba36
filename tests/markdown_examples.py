"""Run the fenced examples of a Markdown page.

    ```python    lines with `>>>`: a doctest. Without: a program, which must run; its output is
                 not compared. All blocks of a page share one namespace, in a temporary folder.
    ```console   `$ lmhead ...` must parse: known command, known options, values of the right kind;
                 `$ make X` must be a target. Lines without `$` are output.

A comment on the line above a fence changes that:

    <!-- not run: reason -->   the Python block is not run
    <!-- run -->               the console block is run, and its output compared as in a doctest

`>>>` outside a Python fence, and `lmhead` with an unknown command or option in `inline code`, are
errors too.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import pytest
from click.testing import CliRunner

from lmhead.cli import main

ROOT = Path(__file__).resolve().parents[1]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w+-]*) *$")
_MARK = re.compile(r"^ *<!-- (?P<mark>run|not run: .+) -->$")
_INLINE = re.compile(r"`(lmhead [^`]+)`")


class PageError(Exception):
    """The page breaks a rule above."""


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is the number of its first line, counted from 1."""

    language: str
    mark: str
    line: int
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(line + "\n" for line in self.lines)


def split(text: str) -> tuple[list[Block], list[tuple[int, str]]]:
    """Return the fenced blocks of a page, and the numbered lines outside of them."""
    blocks, outside = [], []
    fence: re.Match[str] | None = None
    mark = ""
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        found = _FENCE.match(line)
        if fence is None:
            if found:
                fence, inside = found, []
                continue
            marked = _MARK.match(line)
            mark = marked["mark"] if marked else ""
            outside.append((number, line))
        elif found and not found["language"]:
            start = number - len(inside)
            blocks.append(Block(fence["language"], mark, start, tuple(inside)))
            fence, mark = None, ""
        else:
            inside.append(line.removeprefix(fence["indent"]))
    if fence is not None:
        raise PageError(f"a fence is not closed: ```{fence['language']}")
    for number, line in outside:
        if line.lstrip("> ").startswith(">>") or line.lstrip().startswith(">>>"):
            raise PageError(f"line {number}: `>>>` outside a fenced python block")
    for block in blocks:
        if block.language != "python" and any(line.startswith(">>>") for line in block.lines):
            raise PageError(f"line {block.line}: `>>>` in a fence that is not python")
        if block.language == "console" and not any(line[:2] == "$ " for line in block.lines):
            raise PageError(f"line {block.line}: a console block without a `$ ` line")
    return blocks, outside


def python_test(name: str, text: str) -> doctest.DocTest:
    """Return the Python blocks of a page as one doctest."""
    blocks = [b for b in split(text)[0] if b.language == "python" and not b.mark]
    examples = []
    for block in blocks:
        if any(line.startswith(">>>") for line in block.lines):
            for example in doctest.DocTestParser().get_examples(block.text, name):
                example.lineno += block.line - 1
                examples.append(example)
        else:
            call = f"__program__({block.text!r}, {block.line})\n"
            examples.append(doctest.Example(call, "", lineno=block.line - 1))
    test = doctest.DocTest(examples, {"__name__": "__main__"}, name, name, 0, text)

    def program(source: str, line: int) -> None:
        code = compile("\n" * (line - 1) + source, name, "exec")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, test.globs)

    test.globs["__program__"] = program
    return test


def console_commands(block: Block) -> Iterator[tuple[int, str, str]]:
    """Yield (line number, command, output printed below it) of a console block."""
    line, command, output = 0, "", ""
    lines = iter(enumerate(block.lines, block.line))
    for number, text in lines:
        if text.startswith("$ "):
            if command:
                yield line, command, output
            line, command, output = number, text[2:], ""
            while command.endswith("\\"):
                command = command[:-1] + next(lines)[1]
        else:
            output += text + "\n"
    if command:
        yield line, command, output


def check_command(command: str) -> None:
    """Raise PageError if a shell command cannot be typed as printed."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"\w+=.*", words[0]):
        del words[0]
    for sign in ("|", ">", "<", "&&", ";", "&"):
        words = words[: words.index(sign)] if sign in words else words
    if not words:
        return
    program, *rest = words
    if program.endswith("lmhead"):
        _check_lmhead(rest)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for target in rest:
            if "=" not in target and target not in targets:
                raise PageError(f"make has no target {target!r}")
    elif program == "python":
        name = rest[0] if rest[0] != "-m" else rest[1].replace(".", "/")
        src = ROOT / "src"
        places = [ROOT / name, ROOT / f"{name}.py", src / f"{name}.py", src / name / "__main__.py"]
        if name not in ("venv", "build") and not any(place.exists() for place in places):
            raise PageError(f"python cannot find {name!r}")


def _command_of(words: list[str]) -> tuple[click.Context, list[str]]:
    """Descend the groups of `lmhead`: the context of the command, and its arguments."""
    context = click.Context(main, info_name="lmhead", **main.context_settings)
    while isinstance(context.command, click.Group) and words and words[0][0] != "-":
        found = context.command.get_command(context, words[0])
        if found is None:
            raise PageError(f"{context.command_path} has no command {words[0]!r}")
        context = click.Context(found, parent=context, info_name=words[0])
        words = words[1:]
    return context, words


def _check_lmhead(words: list[str]) -> None:
    context, words = _command_of(words)
    command = context.command
    if isinstance(command, click.Group) and not words:
        raise PageError(f"{context.command_path} needs a command")
    if "--help" in words or "--version" in words:
        return
    try:
        values, _, _ = command.make_parser(context).parse_args(args=list(words))
        for parameter in command.get_params(context):
            value = values.get(parameter.name)
            if parameter.value_is_missing(value):
                if parameter.required:
                    raise click.UsageError(f"{parameter.name} is missing")
            elif not isinstance(parameter.type, click.Path):  # a path of the reader's
                parameter.type_cast_value(context, value)
    except click.UsageError as error:
        raise PageError(
            f"{context.command_path} {shlex.join(words)}: {error.format_message()}"
        ) from None


def check_inline(code: str) -> None:
    """Raise PageError if `lmhead ...` in running text has an unknown command or option."""
    words = code.split()[1:]
    if not re.fullmatch(r"-?-?[a-z][a-z0-9_-]*", words[0]):
        return  # not a command: `lmhead COMMAND`
    context, words = _command_of(words)
    known = {
        option
        for p in context.command.get_params(context)
        for option in (*p.opts, *p.secondary_opts)
    }
    for word in words:
        if word.startswith("--") and word.split("=")[0].rstrip(",.") not in known:
            raise PageError(f"{context.command_path} has no option {word!r}")


def run_python(name: str, text: str) -> str:
    """Run the Python blocks of a page; return the report of what failed."""
    report: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(
        python_test(name, text), out=report.append
    )
    return "".join(report)


def run_console(name: str, text: str) -> str:
    """Check or run the console blocks of a page; return the report of what failed."""
    blocks, outside = split(text)
    report: list[str] = []

    def checked(line: int, check: Any, *args: Any) -> None:
        try:
            check(*args)
        except PageError as error:
            report.append(f"{name}:{line}: {error}")

    for number, line in outside:
        for code in _INLINE.findall(line):
            checked(number, check_inline, code)
    for block in blocks:
        if block.language == "console":
            for number, command, output in console_commands(block):
                checked(number, check_command, command)
                if block.mark == "run":
                    checked(number, _run_lmhead, command, output)
    return "\n".join(report)


def _run_lmhead(command: str, expected: str) -> None:
    words = shlex.split(command, comments=True)
    if words[0] != "lmhead":
        raise PageError(f"only lmhead can be run here, not {words[0]!r}")
    result = CliRunner(env={"NO_COLOR": "1"}).invoke(main, words[1:])
    checker, example = doctest.OutputChecker(), doctest.Example(command, expected)
    if result.exit_code or not checker.check_output(example.want, result.output, FLAGS):
        difference = checker.output_difference(example, result.output, FLAGS)
        raise PageError(f"{command} (exit code {result.exit_code})\n{difference}")


class MarkdownPage(pytest.File):
    """A page: up to two tests, `python` and `console`."""

    def collect(self) -> Iterator[pytest.Item]:
        blocks, outside = split(self.path.read_text(encoding="utf-8"))
        languages = {block.language for block in blocks if not block.mark.startswith("not run")}
        if any(_INLINE.search(line) for _, line in outside):
            languages.add("console")
        for language in sorted(languages & {"python", "console"}):
            item: Examples = Examples.from_parent(self, name=language)
            yield item


class Examples(pytest.Item):
    """All examples of one language on one page."""

    def runtest(self) -> None:
        run = {"python": run_python, "console": run_console}[self.name]
        text = self.path.read_text(encoding="utf-8")
        with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            report = run(str(self.path.relative_to(self.config.rootpath)), text)
        if report:
            raise PageError(report)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, PageError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, f"{self.path.name} {self.name}"
