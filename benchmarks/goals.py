"""What the results are held to: `python -m benchmarks.goals [FOLDER]` reads the files and compares.

The goals are ratios and errors, so that they mean the same on another machine; the conditions stand
in the files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmhead.bench.report import Document, table

LOSS = "loss-smollm2-2048-float32"
QUERY = "query-smollm2-2048-float32"
HALF = "loss-smollm2-256-bfloat16"
MEMORY = "memory-float32"
SCALING = "scaling"
TRAINED = "wikitext-filter"
VOCAB = "vocab-training"


@dataclass(frozen=True)
class Goal:
    """A number in a file, and the most that it should be."""

    what: str
    file: str
    measure: Callable[[Document], float | None]
    at_most: float


def _ratio(name: str, baseline: str) -> Callable[[Document], float | None]:
    def measure(document: Document) -> float | None:
        for r in document["results"]:
            if r["name"] == name and baseline in r["ratios"]:
                return float(r["ratios"][baseline]["median"])
        return None

    return measure


def _error(name: str, result: str) -> Callable[[Document], float | None]:
    def measure(document: Document) -> float | None:
        found = [r["errors"][result] for r in document["results"] if r["name"] == name]
        return found[0] if found else None

    return measure


def _growth(document: Document) -> float | None:
    """MiB that a process grows by where the logits would take 4 GiB, libraries included."""
    found = [
        r["first"] / 2**20
        for r in document["results"]
        if r["shape"]["name"] == "131072x64" and r["name"] == "loss/lmhead" and "first" in r
    ]
    return found[0] if found else None


def _temporary(document: Document) -> float | None:
    found = [r["temporary"] for r in document["results"] if "temporary" in r]
    return max(found) / document["max_bytes"] if found else None


def _power(document: Document) -> float | None:
    found = [s["exponent"] for s in document["series"] if s["exponent"] is not None]
    return max(found) if found else None


def _trained(document: Document) -> float | None:
    last = {name: curve[-1]["valid"] for name, curve in document["curves"].items() if curve}
    if not {"exact", "filter"} <= set(last):
        return None
    return float(abs(last["filter"] / last["exact"] - 1))


def _perplexity(kind: str) -> Callable[[Document], float | None]:
    """Over that of the full head."""

    def measure(document: Document) -> float | None:
        found = {r["kind"]: r["perplexity"] for r in document["results"]}
        return found[kind] / found["full"] if {kind, "full"} <= set(found) else None

    return measure


def _step(kind: str) -> Callable[[Document], float | None]:
    """Time of a head's loss and gradients over that of the full head."""

    def measure(document: Document) -> float | None:
        found = [r.get("timing") for r in document["results"] if r["kind"] == kind]
        faster = found[0]["training step"].get("faster") if found and found[0] else None
        return None if faster is None else 1 / faster

    return measure


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
    """A table of the goals and what the files say."""
    documents = {goal.file: _read(folder / f"{goal.file}.json") for goal in GOALS}
    return _lines([(goal, documents[goal.file]) for goal in GOALS])


def lines_of(document: Document, file: str) -> list[str]:
    """The goals of one file, and what this document says."""
    return _lines([(goal, document) for goal in GOALS if goal.file == file])


def _read(path: Path) -> Document | None:
    found: Document | None = None
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
    return found


def _lines(pairs: list[tuple[Goal, Document | None]]) -> list[str]:
    rows = []
    for goal, document in pairs:
        value = None if document is None else goal.measure(document)
        met = "no file" if document is None else "not measured" if value is None else None
        met = met or ("yes" if value is not None and value <= goal.at_most else "NO")
        shown = "" if value is None else f"{value:.3g}"
        rows.append((goal.what, f"{goal.at_most:g}", shown, met))
    what, at_most, measured, met_ = (list(column) for column in zip(*rows, strict=True))
    return table(
        [("", what), ("at most", at_most), ("measured", measured), ("met", met_)], width=200
    )


if __name__ == "__main__":
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results"
    print("\n".join(lines(given)))
