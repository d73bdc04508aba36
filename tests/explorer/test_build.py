"""The build of the page; the built page sends no requests elsewhere."""

import json
import re
from pathlib import Path

from lmhead.explorer import page_folder

SOURCES = Path(__file__).resolve().parents[2] / "explorer"
LOCK = json.loads((SOURCES / "package-lock.json").read_text())["packages"]


def test_the_lock_names_no_place_to_download_from() -> None:
    assert not [name for name, package in LOCK.items() if "resolved" in package]
    assert "registry=" not in (SOURCES / ".npmrc").read_text().replace(" ", "")
    assert all("integrity" in package for name, package in LOCK.items() if name)


def test_the_lock_is_whole_on_every_platform() -> None:
    """A lock that lacks what another machine needs fails there, in `npm ci`, and only there."""
    for name, package in LOCK.items():
        for needed in package.get("optionalDependencies", {}):
            assert f"node_modules/{needed}" in LOCK, f"{name} needs {needed}"


def test_versions_are_exact() -> None:
    package = json.loads((SOURCES / "package.json").read_text())
    wanted = package["dependencies"] | package["devDependencies"] | package["overrides"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in wanted.values())


def test_the_built_page_names_no_other_place() -> None:
    for file in page_folder().rglob("*"):
        if file.suffix in (".html", ".js", ".css"):
            text = file.read_text(encoding="utf-8")
            found = set(re.findall(r"https?://[\w.-]+", text))
            assert found <= {"http://www.w3.org"}, file  # the names of SVG and MathML
            assert "@import" not in text
            # One with # is a part of the same picture; the font is a file of the page.
            assert not re.search(r"url\((?!#|/assets/)", text)
