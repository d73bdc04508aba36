"""Walk through the first pages as a newcomer would, and print how long each step takes.

    python -m scripts.newcomer [--keep FOLDER]

Clones this repository, then types what docs/install.md ("From a clone") and docs/first_steps.md
print, in a plain shell without the variables of this one (those for pip and certificates excepted).
What the reader is asked to bring is made here: `./my-model` is SmolLM2-135M as a Hugging Face
folder, `book.txt` the README. Ends at the first command that fails. The table goes to
docs/install.md.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")
FENCE = re.compile(r"^```(console|python)\n(.*?)^```$", re.M | re.S)
MODEL = (
    "import shutil; from lmhead.models import bundled, gguf;"
    "shutil.copytree(gguf.unpack(bundled.add('smollm2')), 'my-model')"
)


def sections(page: str) -> list[tuple[str, str]]:
    """Return the sections of a page: heading and text."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", text, flags=re.M)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def commands(text: str) -> list[tuple[str, str]]:
    """Return what a reader types, with its language: console lines, and blocks of Python."""
    typed = []
    for language, body in FENCE.findall(text):
        if language == "console":
            typed += [(language, line[2:]) for line in body.splitlines() if line[:2] == "$ "]
        else:
            source = [line[4:] for line in body.splitlines() if line[:4] in (">>> ", "... ")]
            typed.append((language, "\n".join(source)))
    return typed


class Shell:
    """A shell in the clone, in which each step is run and timed."""

    def __init__(self, clone: Path) -> None:
        self.clone = clone
        self.environment = {k: v for k, v in os.environ.items() if k in KEPT or k[:4] == "PIP_"}
        self.rows: list[tuple[str, int, float, float]] = []
        self.typed_python = ""  # later blocks of a page use the names of earlier ones

    def run(self, command: str) -> None:
        """Run a command in the activated environment; raise SystemExit if it fails."""
        print(f"$ {command}", flush=True)
        activate = "if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi; "
        done = subprocess.run(
            ["bash", "-c", activate + command], cwd=self.clone, env=self.environment, check=False
        )
        if done.returncode:
            raise SystemExit(f"exit code {done.returncode}: {command}")

    def run_python(self, source: str) -> None:
        """Run a block of Python after the blocks before it."""
        self.typed_python += source + "\n"
        (self.clone / "typed.py").write_text(self.typed_python, encoding="utf-8")
        self.run("python typed.py")

    def step(self, name: str, typed: list[tuple[str, str]]) -> None:
        """Run the commands of a step and keep its time."""
        begin, used = time.monotonic(), _processor_seconds()
        for language, command in typed:
            if language == "python":
                self.run_python(command)
            elif command.startswith("lmhead explore"):  # serves until it is interrupted
                self.run(f"timeout -s INT 15 {command} --no-browser; [ $? = 124 ]")
            else:
                self.run(command)
        seconds = time.monotonic() - begin
        self.rows.append((name, len(typed), seconds, _processor_seconds() - used))


def _processor_seconds() -> float:
    """Return the processor time of all commands so far: other programs do not change it much."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Run all steps, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="folder for the clone [default: temporary]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="newcomer-") as made:
        clone = (options.keep or Path(made)).resolve() / "lmhead"
        shell = Shell(clone)
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        install = dict(sections("install.md"))["From a clone"]
        shell.step("Install", commands(install))
        shell.run(f'lmhead models add smollm2 && python -c "{MODEL}" && cp README.md book.txt')
        for heading, text in sections("first_steps.md"):
            if typed := commands(text):
                shell.step(re.sub(r"^\d+\. ", "", heading), typed)
    print("\n| step | commands | seconds | processor seconds |\n|---|---|---|---|")
    for name, count, seconds, processor in shell.rows:
        print(f"| {name} | {count} | {seconds:.0f} | {processor:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
