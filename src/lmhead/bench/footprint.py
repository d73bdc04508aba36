"""Temporary memory at every shape, against the bound that the user sets.

Everybody's inputs are there before, and the gradients are what the user asked for: what counts is
the rest of the peak growth of a fresh process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmhead.bench import losses, machine, queries
from lmhead.bench.report import Columns, Document, conditions, table
from lmhead.bench.runner import Progress, WorkerError, growth_of
from lmhead.bench.shapes import MANY_LOGITS, SHAPES, Shape
from lmhead.bench.task import Task

ALL_SHAPES = (*SHAPES.values(), MANY_LOGITS)
# What a call takes beside its tiles: Python's objects, a few pages per thread, rows of N numbers.
SLACK = 4 * 2**20
_MIB = 2**20


def footprint(
    shapes: Sequence[Shape],
    progress: Progress,
    *,
    dtype: str = "float32",
    max_bytes: int | None = None,
    threads: int | None = None,
) -> Document:
    """Peak growth of a fresh process for our losses and queries, at each shape.

    Ctrl-C ends the run early; what was measured until then is returned.
    """
    import torch

    from lmhead.bench.generator import generate
    from lmhead.sweep import DEFAULT_MAX_BYTES, native

    rows: list[dict[str, Any]] = []
    document: Document = {
        "benchmark": "memory",
        "title": "peak growth of a fresh process in one call",
        "dtype": dtype,
        "max_bytes": max_bytes or DEFAULT_MAX_BYTES,
        "interrupted": False,
        "native": native.core is not None,
        **machine.describe(threads or torch.get_num_threads()),
        "results": rows,
    }
    with tempfile.TemporaryDirectory(prefix="lmhead-bench-") as folder:
        path = Path(folder) / "inputs.pt"
        try:
            for shape in shapes:
                progress(f"{shape.name}: inputs")
                generate(shape.vocab, shape.hidden_size, shape.tokens).to(dtype).save(path)
                for task in (losses.TASK, queries.TASK):
                    for name in (i.name for i in task.implementations.values() if i.ours):
                        progress(f"{shape.name}: {task.implementations[name].label}")
                        rows.append(_row(task, name, shape, path, document))
        except KeyboardInterrupt:
            document["interrupted"] = True
    return document


def _row(task: Task, name: str, shape: Shape, path: Path, document: Document) -> dict[str, Any]:
    limit = document["max_bytes"]
    row: dict[str, Any] = {
        "shape": asdict(shape),
        "name": f"{task.name}/{name}",
        "label": task.implementations[name].label,
        "logits": 4 * shape.tokens * shape.vocab,
    }
    try:
        growth = growth_of(task, name, path, document["threads"], max_bytes=limit)
    except WorkerError as error:
        return {**row, "skipped": str(error)}
    if growth is None or growth.temporary is None:
        return {**row, "skipped": "this system does not tell the peak memory of a call"}
    temporary = growth.temporary
    return {
        **row,
        **asdict(growth),
        "temporary": temporary,
        "within": temporary <= limit + SLACK,
    }


def lines(document: Document, width: int) -> list[str]:
    """The table for the terminal."""
    rows = [r for r in document["results"] if "skipped" not in r]
    limit = f"{document['max_bytes'] / _MIB:.0f} MiB"
    head = [f"memory: {document['title']}, {document['dtype']}, max_bytes = {limit}"]
    head += [*conditions(document), ""]
    columns: Columns = [
        ("", [f"{r['shape']['name']}, N {r['shape']['tokens']}: {r['label']}" for r in rows]),
        ("temporary", [f"{r['temporary'] / _MIB:.1f}" for r in rows]),
        ("within", ["yes" if r["within"] else "NO" for r in rows]),
        ("results", [f"{r['results'] / _MIB:.1f}" for r in rows]),
        ("peak", [f"{r['later'] / _MIB:.1f}" for r in rows]),
        ("first call", [f"{r['first'] / _MIB:.1f}" for r in rows]),
        ("logits", [f"{r['logits'] / _MIB:,.0f}" for r in rows]),
    ]
    foot = [
        "",
        "In MiB. temporary: peak without the results (gradients, answers); within: of max_bytes,",
        f"give or take {SLACK / _MIB:.0f} MiB. peak: growth in a call; first call: libraries that",
        "load themselves included. logits: what they alone would take in float32.",
    ]
    skipped = [r for r in document["results"] if "skipped" in r]
    foot += [f"Skipped: {r['shape']['name']}, {r['label']}: {r['skipped']}" for r in skipped]
    foot += ["Interrupted."] if document["interrupted"] else []
    return [*head, *(table(columns, width) if rows else ["Nothing was measured."]), *foot]
