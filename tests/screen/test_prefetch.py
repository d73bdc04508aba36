"""The distance of the software prefetch: measured once, kept, and set by the environment."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmhead.screen import prefetch
from lmhead.sweep import kernels

pytestmark = pytest.mark.skipif(kernels.core is None, reason="the compiled core is not installed")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    assert kernels.core is not None
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LMHEAD_PREFETCH", raising=False)
    before = kernels.core.prefetch()
    prefetch.choose.cache_clear()
    yield tmp_path / "cache"
    prefetch.choose.cache_clear()
    kernels.core.set_prefetch(*before)


def test_a_measurement_is_kept(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure() -> tuple[int, int]:
        measured.append(True)
        return (1024, 2048)

    monkeypatch.setattr(prefetch, "measure", measure)
    for _ in range(2):
        assert prefetch.choose() == (1024, 2048)
        assert kernels.core is not None
        assert kernels.core.prefetch() == (1024, 2048)
        prefetch.choose.cache_clear()
    assert len(measured) == 1
    (kept,) = json.loads((own_cache / "prefetch.json").read_text()).values()
    assert kept == [1024, 2048]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 3}', "[[[]]]"])
def test_a_damaged_file_is_measured_again(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(prefetch, "measure", lambda: (0, 1024))
    own_cache.mkdir()
    (own_cache / "prefetch.json").write_text(text)
    assert prefetch.choose() == (0, 1024)
    assert [0, 1024] in json.loads((own_cache / "prefetch.json").read_text()).values()


def test_a_folder_that_cannot_be_written_is_no_error(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache.write_text("a file where the folder should be")
    monkeypatch.setattr(prefetch, "measure", lambda: (0, 1024))
    assert prefetch.choose() == (0, 1024)


@pytest.mark.parametrize(
    ("text", "found"), [("0", (0, 0)), ("512", (512, 512)), ("0,2048", (0, 2048))]
)
def test_the_environment_decides(
    monkeypatch: pytest.MonkeyPatch, text: str, found: tuple[int, int]
) -> None:
    monkeypatch.setenv("LMHEAD_PREFETCH", text)
    monkeypatch.setattr(prefetch, "measure", lambda: pytest.fail("measured"))
    assert prefetch.choose() == found


@pytest.mark.parametrize("text", ["yes", "-1", "1,2,3", "65537", "1,"])
def test_a_wrong_environment_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LMHEAD_PREFETCH", text)
    with pytest.raises(ValueError, match="LMHEAD_PREFETCH must be"):
        prefetch.choose()


def test_a_measurement_is_one_of_the_distances_and_leaves_the_setting() -> None:
    assert kernels.core is not None
    kernels.core.set_prefetch(64, 128)
    assert set(prefetch.measure(1 << 20)) <= set(prefetch.DISTANCES)
    assert kernels.core.prefetch() == (64, 128)
