"""How a copy is read: measured once, kept, and set by the environment."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmhead.screen import memory_reading
from lmhead.screen.memory_reading import Setting, Settings
from lmhead.sweep import kernels

pytestmark = pytest.mark.skipif(kernels.core is None, reason="the compiled core is not installed")

FOUND = (Setting(1, 1024), Setting(4, 0))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    core = kernels.compiled()
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LMHEAD_PREFETCH", raising=False)
    monkeypatch.delenv("LMHEAD_STREAMS", raising=False)
    streams, prefetch = core.streams(), core.prefetch()
    monkeypatch.setattr(memory_reading, "_is_busy", lambda: False)
    memory_reading.choose.cache_clear()
    yield tmp_path / "cache"
    memory_reading.choose.cache_clear()
    core.set_streams(*streams)
    core.set_prefetch(*prefetch)


def test_a_measurement_is_kept(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure() -> Settings:
        measured.append(True)
        return FOUND

    monkeypatch.setattr(memory_reading, "measure", measure)
    for _ in range(2):
        assert memory_reading.choose() == FOUND
        assert kernels.compiled().streams() == (1, 4)
        assert kernels.compiled().prefetch() == (1024, 0)
        memory_reading.choose.cache_clear()
    assert len(measured) == 1
    (kept,) = json.loads((own_cache / "calibration.json").read_text()).values()
    assert kept == [[1, 1024], [4, 0]]


def test_a_measurement_of_a_busy_machine_is_not_kept(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_reading, "measure", lambda: FOUND)
    monkeypatch.setattr(memory_reading, "_is_busy", lambda: True)
    assert memory_reading.choose() == FOUND
    assert not (own_cache / "calibration.json").exists()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 3}', "[[[]]]"])
def test_a_damaged_file_is_measured_again(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(memory_reading, "measure", lambda: FOUND)
    own_cache.mkdir()
    (own_cache / "calibration.json").write_text(text)
    assert memory_reading.choose() == FOUND
    kept = json.loads((own_cache / "calibration.json").read_text()).values()
    assert [[1, 1024], [4, 0]] in kept


@pytest.mark.parametrize("entry", [[[3, 0], [1, 0]], [[1, 0]], 7, [[1, 0, 0], [1, 0]]])
def test_an_entry_that_cannot_be_is_measured_again(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, entry: object
) -> None:
    monkeypatch.setattr(memory_reading, "measure", lambda: FOUND)
    memory_reading.choose()
    file = own_cache / "calibration.json"
    file.write_text(json.dumps(dict.fromkeys(json.loads(file.read_text()), entry)))
    memory_reading.choose.cache_clear()
    assert memory_reading.choose() == FOUND


def test_a_folder_that_cannot_be_written_is_no_error(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache.write_text("a file where the folder should be")
    monkeypatch.setattr(memory_reading, "measure", lambda: FOUND)
    assert memory_reading.choose() == FOUND


@pytest.mark.parametrize(
    ("streams", "prefetch", "found"),
    [
        ("1", "0", ((1, 0), (1, 0))),
        ("2,4", "512", ((2, 512), (4, 512))),
        ("4", "0,2048", ((4, 0), (4, 2048))),
    ],
)
def test_the_environment_decides(
    monkeypatch: pytest.MonkeyPatch, streams: str, prefetch: str, found: object
) -> None:
    monkeypatch.setenv("LMHEAD_STREAMS", streams)
    monkeypatch.setenv("LMHEAD_PREFETCH", prefetch)
    monkeypatch.setattr(memory_reading, "measure", lambda: pytest.fail("measured"))
    assert memory_reading.choose() == found


def test_what_the_environment_leaves_out_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_reading, "measure", lambda: FOUND)
    monkeypatch.setenv("LMHEAD_PREFETCH", "64,128")
    assert memory_reading.choose() == ((1, 64), (4, 128))


@pytest.mark.parametrize(
    ("name", "text"),
    [("LMHEAD_PREFETCH", t) for t in ("yes", "-1", "1,2,3", "65537", "1,")]
    + [("LMHEAD_STREAMS", t) for t in ("3", "0", "1,2,4", "two")],
)
def test_a_wrong_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name} must be"):
        memory_reading.choose()


def test_a_measurement_is_one_of_the_settings_and_leaves_the_present_one() -> None:
    core = kernels.compiled()
    core.set_streams(2, 1)
    core.set_prefetch(64, 128)
    assert set(memory_reading.measure(1 << 20)) <= set(memory_reading.CANDIDATES)
    assert core.streams() == (2, 1)
    assert core.prefetch() == (64, 128)


def test_the_core_refuses_other_streams() -> None:
    with pytest.raises(ValueError, match="streams must be 1, 2 or 4"):
        kernels.compiled().set_streams(1, 3)
