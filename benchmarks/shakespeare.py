"""Does the head change what a small model learns? Characters of Shakespeare, three losses.

Ten minutes or more for each loss. The preset shakespeare-char: 4 layers, 4 heads, width 128,
windows of 64 characters, batches of 12, 2000 steps. Same seed, same batches:

    exact      no logits tensor, exact gradients
    filter     grad_filter=0.02
    dense      torch's cross-entropy on all logits

Goals: validation loss at most 1.88; exact and dense the same curve to 1e-3; the filter's last loss
within 0.5 % of the exact one. With the same --work, an interrupted run is resumed.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks import report
from benchmarks.machine import DATA
from benchmarks.report import Document
from benchmarks.runner import FOLDER, Run, benchmark
from lmhead.train import TrainConfig, make_config, resume, train
from lmhead.train.training_log import read_log

VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "filter": {"grad_filter": 0.02},
    "dense": {"loss": "dense"},
}
BEST, SAME, FILTERED = 1.88, 1e-3, 5e-3


def curve(config: TrainConfig, run: Path) -> dict[str, Any]:
    """Train or resume; return the losses of the log by steps."""
    result = resume(run) if (run / "config.toml").exists() else train(config, run)
    if result.signal is not None:
        raise SystemExit(128 + result.signal)
    lines = read_log(run / "log.jsonl")
    return {
        "train": [[line["step"], line["loss"]] for line in lines if "loss" in line],
        "valid": [[line["step"], line["valid"]["loss"]] for line in lines if "valid" in line],
        "seconds": result.seconds,
    }


def difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Return the largest relative difference between two curves."""
    pairs = [
        (a, b)
        for name in ("train", "valid")
        for (_, a), (_, b) in zip(first[name], second[name], strict=True)
    ]
    return float(max(abs(a / b - 1) for a, b in pairs))


def check_goals(curves: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the goals whose curves exist, and whether they are met."""
    last = {name: curve["valid"][-1][1] for name, curve in curves.items()}
    goals = []
    if "exact" in curves:
        goals.append({"goal": "validation loss", "value": last["exact"], "limit": BEST})
    if {"exact", "dense"} <= curves.keys():
        value = difference(curves["exact"], curves["dense"])
        goals.append({"goal": "exact from dense, all steps", "value": value, "limit": SAME})
    if {"exact", "filter"} <= curves.keys():
        value = abs(last["filter"] / last["exact"] - 1)
        goals.append({"goal": "filter from exact, at the end", "value": value, "limit": FILTERED})
    return [{**goal, "met": goal["value"] <= goal["limit"]} for goal in goals]


def lines(document: Document, width: int) -> list[str]:
    """Return the last losses, and the goals."""
    curves, goals = document["curves"], document["goals"]
    losses = [f"{curve['valid'][-1][1]:.4f}" for curve in curves.values()]
    columns = [
        ("", [goal["goal"] for goal in goals]),
        ("measured", [f"{goal['value']:.3g}" for goal in goals]),
        ("at most", [f"{goal['limit']:g}" for goal in goals]),
        ("met", ["yes" if goal["met"] else "NO" for goal in goals]),
    ]
    last = report.table([("", list(curves)), ("validation loss", losses)], width)
    return [*last, "", *report.table(columns, width)]


@benchmark("shakespeare", "validation loss, characters of Shakespeare", lines)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=DATA / "tinyshakespeare" / "input.txt",
    help="Text file.  [default: tinyshakespeare/input.txt in LMHEAD_DATA]",
)
@click.option("--work", type=FOLDER, help="Folder of the runs.  [default: temporary]")
@click.option("--variant", multiple=True, type=click.Choice(list(VARIANTS)), help="All by default.")
@click.option("--steps", type=click.IntRange(1), help="Training steps.  [default: the preset's]")
def command(
    run: Run, data: Path, work: Path | None, variant: tuple[str, ...], steps: int | None
) -> None:
    """Train on characters of Shakespeare with three losses: exact, filter, dense."""
    if not data.is_file():
        raise ValueError(f"--data must be a text file; got {data}")
    settings = {"corpus": [str(data)], "sample_tokens": 0, "threads": run.document["threads"]}
    config = make_config(settings | ({"steps": steps} if steps else {}), preset="shakespeare-char")
    curves: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in variant or VARIANTS:
            run.progress(name)
            curves[name] = curve(config.replace(**VARIANTS[name]), (work or Path(folder)) / name)
    run.document["settings"] = asdict(config) | {"corpus": [data.name]}
    run.document |= {"curves": curves, "goals": check_goals(curves)}
