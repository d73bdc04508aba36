"""Run the core tests with given versions of torch and transformers, in an environment of its own.

    make wheel
    python scripts/check_compatibility.py --torch 2.13.0 --transformers 5.0.0
    python scripts/check_compatibility.py --python python3.12 --torch 2.15.0

Installs the wheel of dist/ with these versions, runs TESTS against it, and prints a row of the
table in docs/compatibility.md. A CI matrix can call it once per combination. On machines without a
GPU give pip an index of CPU builds (PIP_INDEX_URL), or it downloads those for CUDA. With
--environment a folder is used again, and only what differs is installed; with --no-deps only torch
is exchanged there, and uses the CUDA libraries that are installed. constraints.txt has versions for
Python 3.11 and newer: an older one gets the versions given here, and the newest of everything else.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = [
    "tests/test_minimal.py",
    "tests/lazy/test_lazy_logits.py",
    "tests/test_huggingface.py",
    "tests/models",
]
TOOLS = ["pytest", "pytest-timeout", "hypothesis", "accelerate", "httpx"]


def _is_older(python: str) -> bool:
    """Return whether an interpreter is older than those that constraints.txt has versions for."""
    code = "import sys; sys.exit(sys.version_info < (3, 11))"
    return subprocess.run([python, "-c", code], check=False).returncode == 1


def main() -> int:
    """Install, run and print the row; return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter [default: this one]")
    parser.add_argument("--torch", help="version [default: that of constraints.txt]")
    parser.add_argument("--transformers", help="version [default: that of constraints.txt]")
    parser.add_argument("--environment", type=Path, help="folder to use again [default: temporary]")
    parser.add_argument(
        "--no-deps", action="store_true", help="install torch alone, into --environment"
    )
    options = parser.parse_args()
    if options.no_deps and not (options.torch and options.environment):
        parser.error("--no-deps needs --torch and an --environment that has the rest")
    requested = {"torch": options.torch, "transformers": options.transformers}
    wheel = max((ROOT / "dist").glob("*.whl"), key=os.path.getmtime)
    with tempfile.TemporaryDirectory(prefix="lmhead-versions-") as made:
        folder = made if options.environment is None else str(options.environment.resolve())
        if not Path(folder, "bin", "python").exists():
            subprocess.run([options.python, "-m", "venv", folder], check=True)
        python = f"{folder}/bin/python"
        constraints = Path(made) / "constraints.txt"
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        free = {name for name, version in requested.items() if version}
        if free:  # other packages follow what these need
            free |= {"tokenizers", "numpy", "accelerate", "safetensors", "triton"}
        kept = [line for line in lines if line.split("==")[0] not in free]
        if _is_older(options.python):
            kept = []
        kept += [f"{name}=={version}" for name, version in requested.items() if version]
        constraints.write_text("\n".join(kept) + "\n")
        install = [python, "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
        if options.no_deps:
            subprocess.run([*install, "--no-deps", f"torch=={options.torch}"], check=True)
        else:
            subprocess.run([*install, f"{wheel}[models]", *TOOLS], check=True)
        tests = subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *TESTS],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        print(tests.stdout)
        listed = subprocess.run(
            [python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True
        )
        versions = dict(line.split("==", 1) for line in listed.stdout.splitlines() if "==" in line)
        version = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout
        summary = re.findall(r"\d+ \w+", tests.stdout.splitlines()[-1])
    cells = [version.split()[1], versions["torch"], versions["transformers"], ", ".join(summary)]
    print(f"| {' | '.join(cells)} |")
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
