"""The goals of the results: ratios and errors, so that they mean the same on every machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks import report
from benchmarks.machine import RESULTS
from benchmarks.report import MIB, Document
from benchmarks.runner import FOLDER

LOSS = "loss-smollm2-2048-float32"
QUERY = "query-smollm2-2048-float32"
HALF = "loss-smollm2-256-bfloat16"
MEMORY = "memory-float32"
SCALING = "scaling"
TRAINED = "wikitext-filter"
VOCAB = "vocab-training"


Measure = Callable[[Document], float | None]


@dataclass(frozen=True)
class Goal:
    """A number in a result file, and the largest value it should have."""

    what: str
    file: str
    measure: Measure
    at_most: float


def _first(values: Iterable[Any]) -> Any:
    return next(iter(values), None)


def _ratio(name: str, baseline: str) -> Measure:
    return lambda document: _first(
        r["ratios"][baseline]["median"]
        for r in document["results"]
        if r["name"] == name and baseline in r["ratios"]
    )


def _error(name: str, result: str) -> Measure:
    return lambda document: _first(
        r["errors"][result] for r in document["results"] if r["name"] == name
    )


def _growth(document: Document) -> float | None:
    """Return the MiB that a process grows by where the logits would take 4 GiB."""
    rows = (r for r in document["results"] if r["shape"]["name"] == "131072x64" and "first" in r)
    value: float | None = _first(r["first"] / MIB for r in rows if r["name"] == "loss/lmhead")
    return value


def _temporary(document: Document) -> float | None:
    values = [
        r["temporary"] / document["max_bytes"] for r in document["results"] if "temporary" in r
    ]
    return max(values, default=None)


def _power(document: Document) -> float | None:
    exponents = [s["exponent"] for s in document["series"] if s["exponent"] is not None]
    return max(exponents, default=None)


def _trained(document: Document) -> float | None:
    last = {name: curve[-1]["valid"] for name, curve in document["curves"].items() if curve}
    if not {"exact", "filter"} <= set(last):
        return None
    return float(abs(last["filter"] / last["exact"] - 1))


def _perplexity(kind: str) -> Measure:
    """Return the perplexity of a head over that of the full head."""

    def measure(document: Document) -> float | None:
        perplexities = {r["kind"]: r["perplexity"] for r in document["results"]}
        return (
            perplexities[kind] / perplexities["full"]
            if {kind, "full"} <= set(perplexities)
            else None
        )

    return measure


def _step(kind: str) -> Measure:
    """Return the time of a head's loss and gradients over that of the full head."""
    return lambda document: _first(
        1 / r["timing"]["training step"]["faster"]
        for r in document["results"]
        if r["kind"] == kind and "faster" in r.get("timing", {}).get("training step", {})
    )


GOALS = (
    Goal("loss, exact / torch.compile", LOSS, _ratio("lmhead", "compile"), 0.85),
    Goal("loss, exact / eager torch", LOSS, _ratio("lmhead", "eager"), 0.70),
    Goal("loss, grad_filter=0.02 / torch.compile", LOSS, _ratio("lmhead-filter", "compile"), 0.50),
    Goal("loss, grad_filter=0.02 / eager torch", LOSS, _ratio("lmhead-filter", "eager"), 0.42),
    Goal("filter, error of d hidden", LOSS, _error("lmhead-filter", "hidden_grad"), 0.007),
    Goal("filter, error of d weight", LOSS, _error("lmhead-filter", "weight_grad"), 0.0015),
    Goal("bfloat16 loss / eager torch", HALF, _ratio("lmhead", "eager"), 0.20),
    Goal("query / one product", QUERY, _ratio("lmhead", "product"), 1.20),
    Goal("query / eager torch", QUERY, _ratio("lmhead", "eager"), 0.55),
    Goal("MiB of growth, N 8192, V 131072, D 64", MEMORY, _growth, 256.0),
    Goal("temporary memory / max_bytes, worst shape", MEMORY, _temporary, 1.0),
    Goal("time grows with V and N to the power", SCALING, _power, 1.05),
    Goal("trained with the filter, loss off by", TRAINED, _trained, 0.002),
    Goal("adaptive head, perplexity / full", VOCAB, _perplexity("adaptive"), 1.05),
    Goal("adaptive head, time / full", VOCAB, _step("adaptive"), 1 / 2.5),
    Goal("hierarchical head, time / full", VOCAB, _step("hierarchical"), 1 / 5),
)


def lines(folder: Path) -> list[str]:
    """Return a table of the goals and the figures in the files of a folder."""
    return _lines([(goal, _read(folder / f"{goal.file}.json")) for goal in GOALS])


def lines_of(document: Document, file: str) -> list[str]:
    """Return a table of the goals of one file, with the figures of this document."""
    return _lines([(goal, document) for goal in GOALS if goal.file == file])


def _read(path: Path) -> Document | None:
    document: Document | None = None
    if path.is_file():
        document = json.loads(path.read_text(encoding="utf-8"))
    return document


def _lines(pairs: list[tuple[Goal, Document | None]]) -> list[str]:
    rows = []
    for goal, document in pairs:
        value = None if document is None else goal.measure(document)
        if value is None:
            rows.append(("", "no file" if document is None else "not measured"))
        else:
            rows.append((f"{value:.3g}", "yes" if value <= goal.at_most else "NO"))
    columns = [
        ("", [goal.what for goal, _ in pairs]),
        ("at most", [f"{goal.at_most:g}" for goal, _ in pairs]),
        ("measured", [value for value, _ in rows]),
        ("met", [met for _, met in rows]),
    ]
    return report.table(columns, width=200)


@click.command("goals")
@click.argument("folder", required=False, type=FOLDER)
def command(folder: Path | None) -> None:
    """Compare the result files with their goals.

    FOLDER has the files; by default each CPU family's folder of benchmarks/results.
    """
    folders = [folder] if folder else sorted(path for path in RESULTS.iterdir() if path.is_dir())
    for path in folders:
        click.echo("\n".join([f"{path.name}:", *lines(path), ""]))
