"""A document of results as a table for the terminal, and as files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmhead.bench.machine import checkout

Document = dict[str, Any]
Columns = list[tuple[str, list[str]]]

_MIB = 2**20


def results_folder(out: Path | None) -> Path | None:
    """Where files go: where the user says, else into the checkout, else nowhere."""
    root = checkout()
    return out or (root / "benchmarks" / "results" if root else None)


def write_json(document: Document, path: Path) -> None:
    """The document as a file that reads well in a diff; there whole, or as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(to_json(document) + "\n", encoding="utf-8")
    part.replace(path)


def to_json(document: Document) -> str:
    """Numbers to 6 digits: times have no more."""
    return json.dumps(_rounded(document), indent=2, ensure_ascii=False)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def conditions(document: Document) -> list[str]:
    """Where and with what: two lines that stand beside every figure."""
    machine, versions = document["machine"], document["versions"]
    lines = []
    if "shape" in document:
        shape, data = document["shape"], document["data"]
        line = f"{shape['name']}: V {shape['vocab']:,}, D {shape['hidden_size']:,}, "
        line += f"N {shape['tokens']:,}, {document['dtype']}"
        if data:
            line += f"; {data['origin']}, entropy {data['entropy']:.3f}, loss {data['loss']:.4f}"
        lines.append(line)
    threads = document["threads"]
    parts = [machine["processor"], *([f"threads: {threads}"] if threads else [])]
    parts.append(f"torch {versions['torch']}")
    core = "native core" if document["native"] else "no native core"
    parts.append(f"lmhead {versions['lmhead']} ({core})")
    if document["commit"]:
        parts.append(f"commit {document['commit']}")
    return [*lines, ", ".join(parts)]


def comparison(document: Document, width: int) -> list[str]:
    """The table of a task: times, ratios, rate, memory, errors."""
    results = document["results"]
    lines = [f"{document['benchmark']}: {document['title']}", *conditions(document), ""]
    if results:
        lines += table(_columns(document), width)
        lines += ["", *_legend(document)]
    else:
        lines.append("Nothing was measured.")
    lines += [f"Skipped: {s['label']}: {s['reason']}" for s in document["skipped"]]
    lines += [f"WRONG: {r['label']}: {', '.join(r['wrong'])}" for r in results if r["wrong"]]
    if document["interrupted"]:
        rounds = max((len(r["seconds"]) for r in results), default=0)
        lines.append(f"Interrupted; rounds done: {rounds} of {document['rounds']}.")
    return lines


def _columns(document: Document) -> Columns:
    results = document["results"]
    slow = max(r["median"] for r in results) >= 1
    unit, factor = ("s", 1.0) if slow else ("ms", 1000.0)
    columns: Columns = [("", [r["label"] for r in results])]

    def add(heading: str, cells: Sequence[str]) -> None:
        columns.append((heading, list(cells)))

    add(f"time/{unit}", [f"{r['median'] * factor:.3f}" for r in results])
    add("best", [f"{r['best'] * factor:.3f}" for r in results])
    add("spread", [f"{r['spread'] / r['median']:.1%}" for r in results])
    for name in document["baselines"]:
        add(f"vs {name}", [_ratio(r, name) for r in results])
    add("GFLOP/s", [f"{r['gflops']:.1f}" for r in results])
    if document["product_gflops"]:
        add("of product", [f"{r['of_product']:.0%}" for r in results])
    if any(r["memory"] for r in results):
        add("MiB", [_mib((r["memory"] or {}).get("later")) for r in results])
    for name, heading in document["headings"].items():
        add(heading, [_error(r, name) for r in results])
    return columns


def _ratio(result: Document, name: str) -> str:
    if result["name"] == name:
        return "1"
    ratios = result["ratios"].get(name)
    return "" if ratios is None else f"{ratios['median']:.2f} ±{ratios['spread']:.2f}"


def _error(result: Document, name: str) -> str:
    error = result["errors"].get(name)
    if error is None:
        return ""
    return ("0" if error == 0 else f"{error:.1e}") + ("!" if name in result["wrong"] else "")


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / _MIB:,.0f}"


def _legend(document: Document) -> list[str]:
    ids = "; ids: share of tokens with a wrong one" if "rank" in document["headings"] else ""
    lines = [
        "time: median of the rounds; spread: half the distance between their quartiles.",
        "vs: median of the ratios of times within a round.",
        f"last columns: relative Frobenius error against float64{ids}.",
    ]
    if document["product_gflops"]:
        lines.insert(
            2, f"of product: of the {document['product_gflops']:.0f} GFLOP/s of a product."
        )
    sizes = [r["memory"]["results"] for r in document["results"] if r["memory"]]
    if sizes:
        lines.insert(
            -1,
            "MiB: peak growth of a fresh process in a call, "
            f"{max(sizes) / _MIB:,.0f} MiB of results included.",
        )
    return lines


def table(columns: Columns, width: int) -> list[str]:
    """Columns as lines; those that do not fit into `width` follow below, with the names again.

    >>> for line in table([("", ["a", "b"]), ("time", ["1.0", "20.0"])], 80): print(line)
       time
    a   1.0
    b  20.0
    """
    names, blocks = columns[0], [[columns[0]]]
    for column in columns[1:]:
        if sum(_width(c) + 2 for c in [*blocks[-1], column]) > width and len(blocks[-1]) > 1:
            blocks.append([names])
        blocks[-1].append(column)
    lines = []
    for n, block in enumerate(blocks):
        lines += [""] if n else []
        rows = zip(*([heading, *cells] for heading, cells in block), strict=True)
        widths = [_width(column) for column in block]
        for first, *cells in rows:
            padded = [c.rjust(w) for c, w in zip(cells, widths[1:], strict=True)]
            lines.append("  ".join([first.ljust(widths[0]), *padded]).rstrip())
    return lines


def _width(column: tuple[str, list[str]]) -> int:
    heading, cells = column
    return max(map(len, [heading, *cells]))
