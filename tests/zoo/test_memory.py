"""Peak memory of a few snippets in fresh processes; all ten by hand: see measure_memory.py."""

import sys

import pytest

import zoo.snippets  # noqa: F401
from zoo.catalogue import SNIPPETS
from zoo.measure_memory import MIB, TEN, in_fresh_process


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "name",
    ["trl-grpo_temperature_in_place", "trl-gkd_jsd_per_token", "verl-temperature_per_row_in_place"],
)
def test_peak_memory(name: str) -> None:
    """Logits of 128 MiB, `max_bytes` of 16 MiB."""
    row = in_fresh_process(name, 4, 256, 32768, 16, 16 * MIB)
    assert row["peak"] <= row["bound"], {k: v / MIB for k, v in row.items() if k != "name"}
    assert row["bound"] < 100 * MIB, "the bound must mean something"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["distillation-divergence_of_chunks", "metrics-splits"])
def test_answers_about_many_parts(name: str) -> None:
    """A gradient of the weight takes 16 MiB: one for every part would be far above the bound."""
    row = in_fresh_process(name, 4, 16, 65536, 64, 8 * MIB)
    assert row["peak"] <= row["bound"], {k: v / MIB for k, v in row.items() if k != "name"}
    assert row["bound"] < 80 * MIB, "the bound must mean something"


def test_the_ten_exist() -> None:
    assert len(set(TEN)) == 10
    assert all(SNIPPETS[name].builds is None for name in TEN)
