"""One version everywhere, a change log that mentions it, and extras that exist."""

import re
import sys
from pathlib import Path
from typing import Any

import lmhead

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHANGES = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

VERSION = re.compile(
    r"^## (\d+)\.(\d+)\.(\d+) \((\d{4}-\d\d-\d\d|not yet released)\)$", re.MULTILINE
)


def test_version_is_that_of_pyproject() -> None:
    assert lmhead.__version__ == PROJECT["version"]


def test_newest_entry_of_the_change_log_is_this_version() -> None:
    headings = VERSION.findall(CHANGES)
    assert len(headings) == len(re.findall(r"^## ", CHANGES, re.MULTILINE)), "an unusual heading"
    assert ".".join(headings[0][:3]) == PROJECT["version"]
    versions = [tuple(map(int, heading[:3])) for heading in headings]
    assert versions == sorted(set(versions), reverse=True)
    assert all(heading[3] != "not yet released" for heading in headings[1:])


def test_entries_are_grouped() -> None:
    for entry in re.split(VERSION, CHANGES)[5::5]:
        groups = re.findall(r"^### (.+)$", entry, re.MULTILINE)
        known = ["Added", "Changed", "Deprecated", "Removed", "Fixed"]
        assert groups == [group for group in known if group in groups]
        assert all(re.search(rf"^### {group}\n(.+\n)?- ", entry, re.MULTILINE) for group in groups)


def test_base_install_is_small() -> None:
    names = {re.split(r"[><=; ]", need)[0] for need in PROJECT["dependencies"]}
    assert names == {"torch", "numpy", "safetensors", "tokenizers", "click", "tomli", "jinja2"}


def test_extras_named_in_messages_and_pages_exist() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {"explore", "models", "train", "eval", "serve", "bench", "dev"} <= extras.keys()
    places = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/lmhead/**/*.py")]
    for place in places:
        for named in re.findall(r"(?:lmhead|\.)\[([a-z,]+)\]['\"]", place.read_text("utf-8")):
            unknown = set(named.split(",")) - extras.keys()
            assert not unknown, f"{place} names {unknown}"
