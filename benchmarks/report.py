"""Documents of results: text with tables, and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Document = dict[str, Any]
Columns = list[tuple[str, list[str]]]

MIB = 2**20


def full_text(
    document: Document, lines: Callable[[Document, int], list[str]], width: int
) -> list[str]:
    """Return title, conditions and tables of a document."""
    head = [f"{document['benchmark']}: {document['title']}", *conditions(document)]
    foot = ["Interrupted."] if document["interrupted"] else []
    return [*head, "", *lines(document, width), *foot]


def write_json(document: Document, path: Path) -> None:
    """Replace the file at once; a crash leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(to_json(document) + "\n", encoding="utf-8")
    part.replace(path)


def is_result(path: Path) -> bool:
    """Return whether a file is a document that `write_json` wrote."""
    try:
        return "benchmark" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def to_json(document: Document) -> str:
    """Return JSON with numbers rounded to 6 digits: times are no more precise."""
    return json.dumps(_rounded(document), indent=2, ensure_ascii=False)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def conditions(document: Document) -> list[str]:
    """Return the lines that are shown with every figure: inputs, machine, versions, commit."""
    lines = []
    if "shape" in document:
        shape, data = document["shape"], document.get("data")
        line = f"{shape['name']}: V {shape['vocab']:,}, D {shape['hidden_size']:,}, "
        line += f"N {shape['tokens']:,}, {document['dtype']}"
        if data:
            line += f"; {data['origin']}, entropy {data['entropy']:.3f}, loss {data['loss']:.4f}"
        lines.append(line)
    versions = document["versions"]
    core = "native core" if document["native"] else "no native core"
    parts = [document["machine"]["processor"], f"threads: {document['threads']}"]
    parts += [f"torch {versions['torch']}", f"lmhead {versions['lmhead']} ({core})"]
    if document["commit"]:
        parts.append(f"commit {document['commit']}")
    return [*lines, ", ".join(parts)]


def table(columns: Columns, width: int) -> list[str]:
    """Return columns as lines; those that do not fit into `width` follow below, with the names.

    >>> for line in table([("", ["a", "b"]), ("time", ["1.0", "20.0"])], 80): print(line)
       time
    a   1.0
    b  20.0
    """
    names, blocks = columns[0], [[columns[0]]]
    if not names[1]:
        return ["Nothing was measured."]
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


def mib(size: int | None) -> str:
    """Return a size in MiB; empty for None."""
    return "" if size is None else f"{size / MIB:,.0f}"
