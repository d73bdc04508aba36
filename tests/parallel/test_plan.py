"""`lmhead.parallel.plan`, and the table of docs/distributed.md that it computed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmhead.parallel import plan

DOCS = Path(__file__).parents[2] / "docs"
HEADS = {
    "Llama-3-8B": (128256, 4096),
    "Qwen3-8B": (151936, 4096),
    "Gemma-3-12B": (262208, 3840),
}


@pytest.mark.parametrize("page", ["distributed.md", "distributed.zh.md"])
def test_the_table_of_the_page(page: str) -> None:
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "| " in line]
    found = [row for row in rows if row[0] in HEADS]
    assert len(found) == 3 * 3 * 4
    for name, ranks, shard, *figures in found:
        kind: Any = shard
        made = plan(*HEADS[name], 8192, ranks=int(ranks), shard=kind)
        kept, peak = made.kept / 2**30, made.memory / 2**30
        assert figures == [f"{kept:.2f}", f"{peak:.2f}", f"{made.sent_per_token / 1024:,.1f}"]


@pytest.mark.parametrize("page", ["distributed.md", "distributed.zh.md"])
def test_the_measured_figures_of_the_page(page: str) -> None:
    """They are those of the result file: less memory than both others, and not slower."""
    file = DOCS.parent / "benchmarks" / "results" / "amd-avx512" / "vocab-parallel.json"
    points = json.loads(file.read_text(encoding="utf-8"))["points"]
    text = (DOCS / page).read_text(encoding="utf-8")
    for name, point in points.items():
        figures = [point["seconds"]["median"], point["cpu_seconds"]["median"]]
        cells = [name, *(f"{x:.2f}" for x in figures), f"{point['memory'] / 2**20:,.0f}"]
        assert f"| {' | '.join(cells)} |" in text
        assert point["memory"] >= points["lmhead"]["memory"]
        assert point["seconds"]["median"] >= points["lmhead"]["seconds"]["median"]


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="shard must be one of data, full, vocab, gather; got 'x'"):
        plan(10, 10, 10, ranks=2, shard="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ranks must be at least 1; got 0"):
        plan(10, 10, 10, ranks=0, shard="vocab")


def test_one_rank_sends_nothing() -> None:
    kinds: Any = ("data", "full", "vocab", "gather")
    assert [plan(100, 8, 4, ranks=1, shard=kind).sent for kind in kinds] == [0, 0, 0, 0]


def test_the_benchmark_runs(tmp_path: Path) -> None:
    """Two ranks, few tokens; the results of all implementations agree, or it ends with code 1."""
    command = [sys.executable, "-m", "lmhead", "bench", "vocab-parallel", "--quick", "--json"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        cwd=tmp_path,  # not in the clone: `benchmarks` is not on the path of new processes
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "vocab-parallel-quick.json").exists()
