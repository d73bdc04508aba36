"""CONTRIBUTING.md: the files it names exist, and its map has every package."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "src" / "lmhead"


def test_every_file_exists() -> None:
    named = re.findall(r"`([\w./]+/[\w.]+\.(?:py|md|ts|json|hpp|cpp))`", TEXT)
    assert len(named) > 30
    missing = [name for name in named if not any((p / name).is_file() for p in (ROOT, PACKAGE))]
    assert missing == []


def test_the_map_has_every_package() -> None:
    table = TEXT.split("## Map")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name.rstrip("/") for row in rows for name in re.findall(r"`([\w/]+)`", row)}
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    small = {"__init__", "__main__", "__pycache__", "_native", "lazy_exports", "user_cache"}
    assert there - small - named == set()
    assert named - there - {"native", "benchmarks"} == set()
