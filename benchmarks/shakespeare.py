"""Does the head change what a small model learns? Characters of Shakespeare, three losses.

    python benchmarks/shakespeare.py --data input.txt      (ten minutes or more for each loss)

The preset shakespeare-char: 4 layers, 4 heads, 128 wide, 64 characters, 12 rows, 2000 steps. Same
seed, same batches:

    exact      no logits tensor, exact gradients
    filter     grad_filter=0.02
    dense      torch's cross-entropy on all logits

Goals: validation loss at most 1.88; exact and dense the same curve to 1e-3; the filter's last loss
within 0.5 % of the exact one. An interrupted benchmark goes on where it was, with the same --work.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lmhead.bench.machine import describe
from lmhead.train import TrainConfig, make_config, resume, train
from lmhead.train.log import read_log

VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "filter": {"grad_filter": 0.02},
    "dense": {"loss": "dense"},
}
BEST, SAME, FILTERED = 1.88, 1e-3, 5e-3


def curve(config: TrainConfig, run: Path) -> dict[str, Any]:
    """Train, or go on; the losses of the log by steps."""
    result = resume(run) if (run / "config.toml").exists() else train(config, run)
    if result.signal is not None:
        raise SystemExit(128 + result.signal)
    lines = read_log(run / "log.jsonl")
    return {
        "train": [[line["step"], line["loss"]] for line in lines if "loss" in line],
        "valid": [[line["step"], line["valid"]["loss"]] for line in lines if "valid" in line],
        "seconds": result.seconds,
    }


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest relative difference between two curves."""
    pairs = [
        (a, b)
        for name in ("train", "valid")
        for (_, a), (_, b) in zip(one[name], other[name], strict=True)
    ]
    return float(max(abs(a / b - 1) for a, b in pairs))


def judge(curves: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals, as far as their curves are there."""
    last = {name: found["valid"][-1][1] for name, found in curves.items()}
    goals = []
    if "exact" in curves:
        goals.append({"goal": "validation loss", "value": last["exact"], "limit": BEST})
    if {"exact", "dense"} <= curves.keys():
        value = apart(curves["exact"], curves["dense"])
        goals.append({"goal": "exact from dense, all steps", "value": value, "limit": SAME})
    if {"exact", "filter"} <= curves.keys():
        value = abs(last["filter"] / last["exact"] - 1)
        goals.append({"goal": "filter from exact, at the end", "value": value, "limit": FILTERED})
    return [{**goal, "met": goal["value"] <= goal["limit"]} for goal in goals]


def main() -> None:
    here = Path(__file__).resolve().parent
    shared = here.parents[1] / "shared/data/tinyshakespeare/input.txt"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=shared)
    parser.add_argument("--out", type=Path, default=here / "results" / "shakespeare.json")
    parser.add_argument("--work", type=Path, help="folder of the runs; one that vanishes without")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="all by default")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    if not given.data.is_file():
        parser.error(f"--data must be a text file; got {given.data}")
    settings = {"corpus": [str(given.data)], "sample_tokens": 0, "threads": given.threads}
    if given.steps:
        settings["steps"] = given.steps
    config = make_config(settings, preset="shakespeare-char")
    curves: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in given.variant or VARIANTS:
            print(name, flush=True)
            work = given.work or Path(folder)
            curves[name] = curve(config.replace(**VARIANTS[name]), work / name)
    goals = judge(curves)
    document = {
        "benchmark": "shakespeare",
        "title": "validation loss, characters of Shakespeare",
        "settings": asdict(config) | {"corpus": [given.data.name]},
        **describe(torch.get_num_threads()),
        "curves": curves,
        "goals": goals,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    for name, found in curves.items():
        print(f"{name:8s} validation loss {found['valid'][-1][1]:.4f}")
    for goal in goals:
        met = "yes" if goal["met"] else "NO"
        print(f"{goal['goal']:30s} {goal['value']:.3g} at most {goal['limit']:g}   {met}")


if __name__ == "__main__":
    main()
