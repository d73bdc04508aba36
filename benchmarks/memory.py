"""Temporary memory of lmhead at every shape, against the limit `max_bytes`.

The inputs exist before the call, and results such as gradients do not count: temporary is the rest
of the peak growth of a fresh process.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from benchmarks import loss, query, report
from benchmarks.fresh_process import growth_of
from benchmarks.inputs import generate
from benchmarks.plots import OURS, Figure, bars, label, new_figure
from benchmarks.report import MIB, Columns, Document
from benchmarks.runner import DTYPE, SHAPE_HELP, TOKENS, Run, ShapeType, benchmark
from benchmarks.shapes import MANY_LOGITS, SHAPES, Shape
from benchmarks.task import Task, UnavailableError
from lmhead.sweep import DEFAULT_MAX_BYTES

ALL_SHAPES = (*SHAPES.values(), MANY_LOGITS)
# Memory of a call besides its tiles: Python objects, a few pages per thread, vectors of length N.
SLACK = 4 * MIB


def _growth(task: Task, name: str, inputs: Path, threads: int, limit: int) -> dict[str, Any]:
    try:
        growth = growth_of(task.module, name, inputs, threads, limit)
    except UnavailableError as error:
        return {"skipped": str(error)}
    if growth is None or growth.temporary is None:
        return {"skipped": "this system does not report the peak memory of a call"}
    within = growth.temporary <= limit + SLACK
    return {**asdict(growth), "temporary": growth.temporary, "within": within}


def _name(row: dict[str, Any]) -> str:
    return f"{row['shape']['name']}, N {row['shape']['tokens']}: {row['label']}"


def lines(document: Document, width: int) -> list[str]:
    """Return the table."""
    rows = [r for r in document["results"] if "skipped" not in r]
    limit = f"{document['max_bytes'] / MIB:.0f} MiB"
    columns: Columns = [("", [_name(r) for r in rows])]
    columns.append(("temporary", [f"{r['temporary'] / MIB:.1f}" for r in rows]))
    columns.append(("within", ["yes" if r["within"] else "NO" for r in rows]))
    columns.append(("results", [f"{r['results'] / MIB:.1f}" for r in rows]))
    columns.append(("peak", [f"{r['later'] / MIB:.1f}" for r in rows]))
    columns.append(("first call", [f"{r['first'] / MIB:.1f}" for r in rows]))
    columns.append(("logits", [f"{r['logits'] / MIB:,.0f}" for r in rows]))
    skipped = [r for r in document["results"] if "skipped" in r]
    return [
        f"{document['dtype']}, max_bytes = {limit}",
        "",
        *report.table(columns, width),
        "",
        "In MiB. temporary: peak without the results (gradients, answers); within: at most",
        f"max_bytes plus {SLACK / MIB:.0f} MiB. peak: growth in a call; first call: with libraries",
        "that load. logits: size of the logits alone in float32.",
        *[f"Skipped: {r['shape']['name']}, {r['label']}: {r['skipped']}" for r in skipped],
    ]


def draw(document: Document) -> Figure:
    """Draw temporary memory and the limit."""
    rows = [r for r in document["results"] if "skipped" not in r]
    figure, (ax,) = new_figure(document, 1, 1.8 + 0.26 * len(rows), width=7.5)
    limit, sizes = document["max_bytes"] / MIB, [r["temporary"] / MIB for r in rows]
    notes = [
        f"{t:.0f} (logits: {r['logits'] / MIB:,.0f})" for t, r in zip(sizes, rows, strict=True)
    ]
    names = map(_name, rows)
    bars(ax, [(*row, OURS) for row in zip(names, sizes, notes, strict=True)])
    ax.set_xlim(0, 1.5 * max([limit, *sizes]))
    ax.axvline(limit, color="#b91c1c", linewidth=1)
    label(ax, title=f"temporary memory in MiB; max_bytes = {limit:.0f} MiB")
    return figure


@benchmark("memory", "peak growth of a fresh process in one call", lines, draw=draw, quick=True)
@click.option("--shape", "shapes", multiple=True, type=ShapeType(), help=SHAPE_HELP)
@TOKENS
@DTYPE
@click.option("--max-bytes", type=click.IntRange(1), help="The limit.  [default: 128 MiB]")
def command(
    run: Run,
    shapes: tuple[Shape, ...],
    tokens: int | None,
    dtype: str,
    max_bytes: int | None,
) -> None:
    """Measure temporary memory against max_bytes, at every shape.

    \b
    Examples:
      lmhead bench memory
      lmhead bench memory --shape 131072x64 --tokens 8192
      lmhead bench memory --max-bytes 16777216
    """
    shapes = shapes or (ALL_SHAPES[:1] if run.quick else ALL_SHAPES)
    tokens = tokens or (256 if run.quick else None)
    limit, threads = max_bytes or DEFAULT_MAX_BYTES, run.document["threads"]
    rows: list[dict[str, Any]] = []
    run.name = f"memory-{dtype}"
    run.document |= {"dtype": dtype, "max_bytes": limit, "results": rows}
    with tempfile.TemporaryDirectory(prefix="lmhead-bench-") as folder:
        path = Path(folder) / "inputs.pt"
        for shape in (replace(shape, tokens=tokens or shape.tokens) for shape in shapes):
            run.progress(f"{shape.name}: inputs")
            generate(shape.vocab, shape.hidden_size, shape.tokens).to(dtype).save(path)
            for task, i in ((t, i) for t in (loss.TASK, query.TASK) for i in t.ours()):
                run.progress(f"{shape.name}: {i.label}")
                row = {
                    "shape": asdict(shape),
                    "name": f"{task.name}/{i.name}",
                    "label": i.label,
                    "logits": 4 * shape.tokens * shape.vocab,
                }
                rows.append(row | _growth(task, i.name, path, threads, limit))
    run.wrong = any(not row.get("within", False) for row in rows)
