"""Sizes of caches: read from the system, with a fallback where it does not tell."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmhead.sweep import cache_size
from lmhead.sweep.cache_size import cache_bytes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(cache_size, "_CPU", tmp_path)
    cache_bytes.cache_clear()
    yield tmp_path
    cache_bytes.cache_clear()


def write(folder: Path, number: int, level: str, kind: str, size: str) -> None:
    index = folder / f"index{number}"
    index.mkdir()
    for name, text in (("level", level), ("type", kind), ("size", size)):
        (index / name).write_text(f"{text}\n")


def test_sizes_of_the_levels(folder: Path) -> None:
    write(folder, 0, "1", "Data", "48K")
    write(folder, 1, "2", "Instruction", "64K")
    write(folder, 2, "2", "Unified", "1280K")
    write(folder, 3, "3", "Unified", "54M")
    assert cache_bytes(2) == 1280 * 2**10
    assert cache_bytes(3) == 54 * 2**20


@pytest.mark.parametrize("size", ["", "K", "0K", "many"])
def test_usual_sizes_where_the_system_does_not_tell(folder: Path, size: str) -> None:
    write(folder, 0, "2", "Unified", size)
    assert cache_bytes(2) == 2**20
    assert cache_bytes(3) == 2**25
