"""Progress: one line that is rewritten on a terminal, plain lines or nothing elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from lmhead.progress import Progress


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Latin(io.StringIO):
    encoding = "latin-1"


def report(progress: Progress) -> None:
    with progress:
        progress("step 1")
        progress.print("validation")
        progress("step 2")


def test_lines_without_a_terminal() -> None:
    for plain, expected in ((True, "step 1\nvalidation\nstep 2\n"), (False, "validation\n")):
        stream = io.StringIO()
        report(Progress(stream, plain=plain))
        assert stream.getvalue() == expected


def test_a_terminal_line_is_rewritten() -> None:
    stream = Terminal()
    report(Progress(stream))
    clear = "\r\x1b[2K"
    assert stream.getvalue() == f"{clear}step 1{clear}validation\n{clear}step 2{clear}"


def test_a_status_is_cut_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    stream = Terminal()
    Progress(stream)("音乐会 in the park")
    assert stream.getvalue() == "\r\x1b[2K音乐会 in"


def test_characters_that_a_stream_cannot_encode() -> None:
    stream = Latin()
    Progress(stream).print("猫 é")
    assert stream.getvalue() == "? é\n"


def test_a_closed_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    report(Progress(plain=True))
