"""Closed, broken and full standard streams: one line at most, and the exit code of the command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded_python import preloaded_python

from cli.run_command import run

full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")


def shell(command: str, python: str | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash, where LMHEAD is the command."""
    line = command.replace("LMHEAD", f"{python or preloaded_python()} -m lmhead")
    return subprocess.run(["bash", "-c", line], capture_output=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "command",
    ["next {model} -", "score {model} -", "generate {model} -", "lens {model} -"],
)
def test_a_closed_standard_input_is_code_3(command: str, model: str) -> None:
    done = shell(f"LMHEAD {command.format(model=model)} <&-")
    assert done.returncode == 3
    assert done.stderr == b"Error: standard input is closed.\n"
    assert done.stdout == b""


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("next {model} a --json", 0),
        ("next {model} a --nonsense", 2),
        ("next missing a", 3),
        ("generate {model} a --screen -n 2 --json", 0),
    ],
)
def test_a_closed_standard_error_changes_nothing_else(command: str, code: int, model: str) -> None:
    line = command.format(model=model)
    closed, normal = shell(f"LMHEAD {line} 2>&-"), run(*line.split(), code=code)
    assert closed.returncode == code
    assert closed.stdout == normal.stdout_bytes
    assert (closed.stdout == b"") == (code != 0)


def test_all_streams_closed(model: str) -> None:
    for python in (sys.executable, preloaded_python()):
        assert shell("LMHEAD next missing a <&- >&- 2>&-", python).returncode == 3
        assert shell(f"LMHEAD next {model} a <&- >&- 2>&-", python).returncode == 0


def test_an_error_message_that_cannot_be_written(model: str) -> None:
    for command, code in ((f"next {model} a --nonsense", 2), ("next missing a", 3)):
        read, write = os.pipe()
        os.close(read)
        words = [preloaded_python(), "-m", "lmhead", *command.split()]
        done = subprocess.run(words, stderr=write, timeout=120)
        os.close(write)
        assert done.returncode == code


@full
@pytest.mark.parametrize("command", ["generate {model} a", "score {model} --text hello --json"])
def test_a_full_disk(command: str, model: str) -> None:
    done = shell(f"LMHEAD {command.format(model=model)} >/dev/full")
    assert done.returncode == 1
    assert done.stderr == b"Error: No space left on device\n"


def test_a_pipe_given_as_a_file_is_read_once(model: str) -> None:
    line = f"LMHEAD score {model} <(printf 'hello ab cab') --json"
    piped = shell(line, sys.executable)  # a fork has only the standard streams
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == run("score", model, "-", "--json", input="hello ab cab").stdout_bytes


def test_an_endless_prompt_ends(model: str) -> None:
    done = shell(f"yes | LMHEAD next {model} -")
    assert done.returncode == 3
    assert done.stderr == b"Error: standard input must have at most 16,777,216 characters.\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--threads 100000", "100000 is not in the range 1<=x<=1024"),
        ("--logit-bias 5=nan", "the bias must be finite or -inf; got '5=nan'"),
        ("--logit-bias 5=inf", "the bias must be finite or -inf; got '5=inf'"),
    ],
)
def test_values_that_cannot_work_are_usage_errors(options: str, message: str, model: str) -> None:
    assert message in run("next", model, "a", *options.split(), code=2).stderr
