"""Figures of benchmarks, PNG and SVG. Needs matplotlib: `pip install 'lmhead[bench]'`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import Document, conditions

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:  # matplotlib is optional, and imported when a figure is made
    Axes = Figure = Any

OURS, PEERS, PRODUCT = "#0f766e", "#94a3b8", "#cbd5e1"
LINES = (OURS, "#d97706", "#4f46e5", "#be123c", "#65a30d", "#64748b")


def can_plot() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(
    document: Document, panels: int, height: float, width: float = 5.2, title: str = ""
) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels side by side; the conditions are printed below."""
    from matplotlib import figure as matplotlib_figure

    figure = matplotlib_figure.Figure(figsize=(width * panels, height), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
    figure.suptitle(title or f"{document['benchmark']}: {document['title']}", fontsize=10)
    figure.supxlabel("\n".join(conditions(document)), fontsize=7, color="#475569")
    return figure, axes


def label(ax: Axes, *, title: str = "", x: str = "", y: str = "", legend: bool = False) -> None:
    """Set the texts of a panel."""
    ax.set_title(title, fontsize=9, loc="left")
    ax.set_xlabel(x, fontsize=8)
    ax.set_ylabel(y, fontsize=8)
    if legend:
        ax.legend(fontsize=7, frameon=False)


def bars(ax: Axes, rows: Sequence[tuple[str, float, str, str]]) -> None:
    """Draw horizontal bars, the first on top: label, value, note at its end, colour."""
    if not rows:
        return
    places = range(len(rows))[::-1]
    ax.barh(places, [row[1] for row in rows], color=[row[3] for row in rows], height=0.72)
    ax.set_yticks(places, [row[0] for row in rows], fontsize=8)
    ax.set_xlim(0, max(row[1] for row in rows) * 1.3)
    for y, (_, value, note, _) in zip(places, rows, strict=True):
        ax.annotate(
            note,
            (value, y),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            size=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem`.png and `stem`.svg."""
    import matplotlib

    # The same document gives the same file, and text remains text.
    matplotlib.rcParams.update({"svg.hashsalt": "lmhead", "svg.fonttype": "none"})
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("png", "svg")]
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=160, metadata=metadata)
    return paths
