"""Peak memory of a few snippets in fresh processes; all ten by hand: see measure_memory.py."""

import sys

import pytest

import zoo.snippets  # noqa: F401
from zoo.catalogue import SNIPPETS
from zoo.measure_memory import MIB, TEN, in_forks_of_a_fresh_process


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory() -> None:
    """Logits of 128 MiB, `max_bytes` of 16 MiB."""
    names = [
        "trl-grpo_temperature_in_place",
        "trl-gkd_jsd_per_token",
        "verl-temperature_per_row_in_place",
    ]
    assert_bounded(names, 4, 256, 32768, 16, 16 * MIB, most=100 * MIB)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_answers_about_many_parts() -> None:
    """A gradient of the weight takes 16 MiB: one for every part would be far above the bound."""
    names = ["distillation-divergence_of_chunks", "metrics-splits"]
    assert_bounded(names, 4, 16, 65536, 64, 8 * MIB, most=80 * MIB)


def assert_bounded(names: list[str], *sizes: int, most: int) -> None:
    rows = in_forks_of_a_fresh_process(names, *sizes)
    assert [row["name"] for row in rows] == names
    for row in rows:
        shown = {k: v if k == "name" else v / MIB for k, v in row.items()}
        assert row["peak"] <= row["bound"], shown
        assert row["bound"] < most, "the bound must mean something"


def test_the_ten_exist() -> None:
    assert len(set(TEN)) == 10
    assert all(SNIPPETS[name].builds is None for name in TEN)
