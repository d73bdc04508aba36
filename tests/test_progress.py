"""Progress: one line that is rewritten on a terminal, plain lines or nothing elsewhere."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys

import pytest
from preloaded_python import preloaded_python

from lmhead.models import open_model
from lmhead.progress import Progress, report_read, show_reads


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


def test_files_of_a_model_are_shown_while_they_are_read() -> None:
    stream = Terminal()
    with show_reads(Progress(stream)):
        open_model("tiny")
    statuses = stream.getvalue().split("\r\x1b[2K")
    found = [re.fullmatch(r"Reading model\.safetensors: (\d+)% of 4 MB", x) for x in statuses]
    percents = [int(match[1]) for match in found if match]
    assert percents == sorted(percents)
    assert percents[0] < 50
    assert percents[-1] == 100
    assert percents.count(100) == 1


def test_nothing_is_shown_elsewhere() -> None:
    stream = Terminal()
    with show_reads(Progress(stream)):
        pass
    report_read("model.safetensors", 1, 2)
    open_model("tiny")
    assert stream.getvalue() == ""


def test_explore_shows_on_a_terminal_what_it_reads() -> None:
    ours, terminal = os.openpty()
    command = [preloaded_python(), "-m", "lmhead", "explore", "tiny", "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, text=True)
    try:
        assert process.stdout is not None
        assert "http://127.0.0.1:" in process.stdout.readline()
        shown = os.read(ours, 1 << 16).decode()
        assert "Reading model.safetensors: 100% of 4 MB" in shown
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        os.close(ours)
        os.close(terminal)
