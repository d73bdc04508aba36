"""HTML tables for notebooks, returned by `_repr_html_` of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

SHOWN = 8  # maximum number of rows of a result and of values in a cell


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table with a caption; every cell is escaped.

    >>> html_table("Score", ["what", "value"], [("a < b", 0.25)]).count("&lt;")
    1
    """
    cells = "".join(
        "<tr>" + "".join(f"<td>{escape(cell_text(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    heads = "".join(f"<th>{escape(column)}</th>" for column in columns)
    return (
        f"<table><caption>{escape(title)}</caption>"
        f"<thead><tr>{heads}</tr></thead><tbody>{cells}</tbody></table>"
    )


def cell_text(value: Any) -> str:
    """Return a value as short text: six digits, and the first values of a list.

    >>> cell_text(0.123456789), cell_text([1, 2]), cell_text(12345)
    ('0.123457', '1, 2', '12,345')
    """
    if isinstance(value, list | tuple):
        more = ", …" if len(value) > SHOWN else ""
        return ", ".join(map(cell_text, value[:SHOWN])) + more
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
