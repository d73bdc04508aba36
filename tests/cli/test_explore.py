"""`lmhead explore`: it says its address, serves the page there, and ends at Ctrl-C."""

import os
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from llama2c_files import tiny_model
from preloaded_python import preloaded_python

from lmhead.cli import main
from lmhead.models.bundled import default_model
from lmhead.server.launch import DEFAULT_PORT


def started(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """The command in a process of its own, and the address it says."""
    code = "from lmhead.cli import main; main()"
    process = subprocess.Popen(
        [preloaded_python(), "-c", code, "explore", "--no-browser", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


def test_it_serves_the_page_and_a_model_and_ends_when_interrupted(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    process, address = started(str(tmp_path / "tiny.bin"), "--lang", "zh", "--key", "k")
    try:
        assert address.startswith("http://127.0.0.1:")
        assert address.endswith("?key=k&lang=zh")
        with httpx.Client(follow_redirects=True) as client:
            page = client.get(address)
            assert (page.status_code, page.url.query) == (200, b"lang=zh")
            assert '<div id="app">' in page.text
            models = client.get(page.url.join("/api/models")).json()["models"]
            assert [model["name"] for model in models] == ["tiny"]
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert "Traceback" not in errors
    assert process.returncode == 130


def test_default_model_and_port_then_a_run_on_the_next_port(tmp_path: Path) -> None:
    processes = [started(), started("--no-model", "--run", str(tmp_path))]
    try:
        (_, plain), (_, run) = processes
        assert run.endswith("/train")
        first, second = (int(address.split(":")[2].split("/")[0]) for address in (plain, run))
        assert DEFAULT_PORT <= first < second < DEFAULT_PORT + 20
        for address, names in ((plain, [default_model()]), (run.removesuffix("train"), [])):
            models = httpx.get(f"{address}api/models", timeout=30).json()["models"]
            assert [model["name"] for model in models] == names
    finally:
        for process, _ in processes:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=20)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--no-model", "tiny"], 2, "cannot be combined"),
        (["--host", "0.0.0.0", "--no-model"], 1, "unless a key is given"),
        (["--lang", "fr"], 2, "is not one of"),
        (["--port", "70000"], 2, "65535"),
        (["/nowhere/model"], 3, "/nowhere/model"),
    ],
)
def test_mistakes_are_reported(arguments: list[str], code: int, message: str) -> None:
    result = CliRunner().invoke(main, ["explore", "--no-browser", *arguments])
    assert result.exit_code == code
    assert message in result.output
