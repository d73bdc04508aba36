"""What all commands share: exit codes, errors in one line, pipes, Ctrl-C, printable tokens."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
import unicodedata
from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from tiny_models import write_model

from lmhead.cli import main
from lmhead.cli._command_group import importing
from lmhead.cli._json import to_text
from lmhead.cli._sampler_arguments import LEFT_OUT, parse_options
from lmhead.cli._terminal import clip, columns, escape_controls, visible_bytes
from lmhead.sampler_options import Options

LMHEAD = [sys.executable, "-m", "lmhead"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin)


def commands() -> list[str]:
    with click.Context(main) as context:
        return main.list_commands(context)


def test_a_mistake_in_the_command_is_code_2(model: str) -> None:
    for arguments in (
        ["next"],
        ["next", model, "a", "b"],
        ["next", model, "a", "--top", "0"],
        ["next", model, "a", "--nonsense"],
        ["next", model, "a", "--logit-bias", "x"],
        ["next", model, "a", "--temperature", "-1"],
        ["nonsense"],
    ):
        result = run(*arguments)
        assert result.exit_code == 2, arguments
        assert "Error: " in result.stderr
        assert "Traceback" not in result.stderr
        assert result.stdout == ""


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("nxt", " Did you mean 'next'?"),
        ("Score", " Did you mean 'score'?"),
        ("modles", " Did you mean 'models'?"),
        ("nonsense", ""),
    ],
)
def test_a_mistyped_command_has_a_suggestion(typed: str, hint: str) -> None:
    result = run(typed)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"Error: No such command {typed!r}.{hint}"


def test_an_option_out_of_range_names_it(model: str) -> None:
    assert (
        "temperature must be a number from 0; got -1"
        in run("next", model, "a", "--temperature", "-1").stderr
    )


def test_a_model_that_cannot_be_read_is_code_3(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.bin"
    damaged.write_bytes(b"nonsense" * 20)
    for where in (str(tmp_path / "missing.bin"), str(damaged)):
        result = run("next", where, "a")
        assert result.exit_code == 3
        assert where in result.stderr
        assert "Traceback" not in result.stderr


def test_a_file_name_at_the_start_of_an_error_keeps_its_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("damaged.bin", "damaged"):
        Path(name).write_bytes(b"nonsense" * 20)
        assert run("next", name, "a").stderr.startswith(f"Error: {name} ")


def test_an_answer_that_cannot_be_given_is_code_1(model: str) -> None:
    result = run("next", model, "a" * 500)
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: Prompt must have at most 64 tokens, the model's context length; got 502\n"
    )


def test_tracebacks_for_those_who_ask(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMHEAD_TRACEBACK", "1")
    result = run("next", model, "a" * 500)
    assert result.exit_code == 1
    assert "Traceback" in result.stderr


def test_ctrl_c_is_code_130(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lmhead.analysis.next_tokens", interrupted)
    result = run("next", model, "a")
    assert result.exit_code == 130
    assert result.stdout == ""
    assert result.stderr.strip() == "Interrupted."


@pytest.mark.parametrize("after", [0.0, 0.4, 0.9])
def test_ctrl_c_while_torch_is_loaded(model: str, after: float) -> None:
    with subprocess.Popen(
        [*LMHEAD, "next", model, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        # More than a pipe holds: once it is written, the command is running and reads it.
        process.stdin.write(b"hello " * 50_000)
        process.stdin.close()
        time.sleep(after)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stderr is not None
        out, errors = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130, errors
    assert out == b""
    assert errors.strip() == b"Interrupted."


def test_a_closed_pipe_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*LMHEAD, "demo", "--toy"], stdout=write, stderr=subprocess.PIPE, timeout=120
    )
    os.close(write)
    assert done.returncode == 1
    assert done.stderr == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*LMHEAD, "demo", "--toy"], stdout=full, stderr=subprocess.PIPE, timeout=120
        )
    assert done.returncode == 1
    assert done.stderr == b"Error: No space left on device\n"


def test_a_single_argument_that_is_a_model() -> None:
    from lmhead.cli._model_arguments import NAMED
    from lmhead.models.bundled import BUNDLED

    assert tuple(BUNDLED) == NAMED
    for name in (*NAMED, "folder/model.gguf"):
        assert "Missing argument 'PROMPT'" in run("next", name).stderr


def test_without_a_model_it_is_the_default_one(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmhead.models.bundled.default_model", lambda: model)
    assert run("next", "hello").stdout == run("next", model, "hello").stdout


def test_text_that_is_no_utf_8(model: str) -> None:
    result = run("next", model, "-", stdin=b"abc\xff")
    assert result.exit_code == 3
    assert "standard input must be text in UTF-8; byte 3 is not" in result.stderr
    result = run("next", model, "abc\udcff")
    assert result.exit_code == 2
    assert "PROMPT must be UTF-8" in result.stderr


def test_standard_input_is_a_prompt_without_its_last_newline(model: str) -> None:
    piped = run("next", model, "-", "--json", stdin=b"hello\n")
    assert piped.exit_code == 0
    assert json.loads(piped.stdout) == json.loads(run("next", model, "hello", "--json").stdout)


@pytest.mark.parametrize("name", commands())
def test_every_help_page_has_examples_and_fits(name: str) -> None:
    text = run(name, "--help").output
    assert "Examples:" in text
    assert f"lmhead {name}" in text
    assert max(columns(line) for line in text.splitlines()) <= 100
    assert "\b" not in text


@pytest.mark.parametrize("name", [n for n in commands() if n not in ("demo", "bench")])
def test_help_loads_no_torch(name: str) -> None:
    code = (
        "import sys\nfrom lmhead.cli import main\n"
        f"try: main([{name!r}, '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_every_sampler_option_is_an_option_of_the_command() -> None:
    page = run("next", "--help").output
    for option in fields(Options):
        assert (f"--{option.name.replace('_', '-')}" in page) == (option.name not in LEFT_OUT)
        assert option.metadata["help"].endswith(".")


def test_a_sampler_in_words() -> None:
    found = parse_options("--top-k=5 min_p=0.1,do_sample=false seed=3")
    assert found == {"top_k": 5, "min_p": 0.1, "do_sample": False, "seed": 3}
    assert isinstance(found["top_k"], int)
    for wrong in ("top_k", "nonsense=1", "top_k=x", "do_sample=maybe"):
        with pytest.raises(click.UsageError):
            parse_options(wrong)


# Tokens in a terminal.


@pytest.mark.parametrize(
    ("says", "seen"),
    [
        (b" the", "␣the"),
        (b"\n\n\t", "\\n\\n\\t"),
        (b"\\n", "\\\\n"),
        (b"\xe4\xbd", "<0xE4><0xBD>"),
        ("你好".encode(), "你好"),
        (b"\x1b[31m", "\\x1b[31m"),
        (b"\x00\x7f", "\\x00\\x7f"),
        ("\x9b2J".encode(), "\\x9b2J"),
        ("\u202eabc".encode(), "\\u202eabc"),
        ("\u200b".encode(), "\\u200b"),
        ("\u0301".encode(), "◌\u0301"),
        ("\u3000".encode(), "\\u3000"),
        (b"", ""),
    ],
)
def test_legible(says: bytes, seen: str) -> None:
    assert visible_bytes(says) == seen


def test_no_byte_reaches_the_terminal_as_a_command() -> None:
    for byte in range(256):
        for shown in (visible_bytes(bytes([byte])), escape_controls(chr(byte)), to_text(chr(byte))):
            left = shown.replace("\n", "").replace("\t", "")
            assert not any(unicodedata.category(c) == "Cc" for c in left), (byte, shown)


def test_different_tokens_look_different() -> None:
    seen = [visible_bytes(bytes([a, b])) for a in range(256) for b in range(0, 256, 5)]
    assert len(set(seen)) == len(seen)


def test_text_keeps_what_is_harmless() -> None:
    text = "a\tb\nc é 你 👩‍👩‍👧"
    assert escape_controls(text) == text
    assert escape_controls("\x1b]0;title\x07\r") == "\\x1b]0;title\\x07\\r"


def test_columns_of_combining_and_wide_characters() -> None:
    assert columns("e\u0301") == 1
    assert columns("你a") == 3
    assert clip("你好吗", 4) == "你…"


def test_no_garbage_collection_while_modules_are_imported() -> None:
    assert gc.isenabled()
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with pytest.raises(ImportError), importing():
            raise ImportError
        assert not gc.isenabled()  # as the caller had it
    finally:
        gc.enable()
