"""The results as tables for the terminal, and as plots, PNG and SVG."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.vocab_heads.heads import HEADS, QUESTIONS
from lmhead.bench.report import Columns, Document, conditions, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = dict(
    zip(HEADS, ("#0f766e", "#d97706", "#64748b", "#4f46e5", "#be123c", "#65a30d"), strict=True)
)
_PEER = "#cbd5e1"
_WIDTH = 120


def training_table(document: Document) -> list[str]:
    """Perplexity, time and memory of each head; torch's own below."""
    results, peers = document["results"], document["peers"]
    full = next((r["perplexity"] for r in results if r["kind"] == "full"), None)
    everyone = [*results, *peers]
    columns: Columns = [("", [r.get("kind") or r["name"] for r in everyone])]

    def add(heading: str, cells: list[str]) -> None:
        columns.append((heading, cells + [""] * (len(everyone) - len(cells))))

    add("parameters", [f"{r['parameters']:,}" for r in results])
    add("perplexity", [f"{r['perplexity']:.1f}" for r in results])
    if full is not None:
        add("of full", [f"{r['perplexity'] / full - 1:+.1%}" for r in results])
    for question in QUESTIONS:
        add(question, [milliseconds(r["timing"][question]["median"]) for r in everyone])
        if full is not None:
            add("", [f"{r['timing'][question]['faster']:.1f}x" for r in everyone])
    for heading, key in (("MiB", "later"), ("temporary", "temporary")):
        add(heading, [_mib(r["memory"], key) for r in results])
    s = document["settings"]
    return [
        f"{document['title']}: V {document['vocab']:,}, D {s['width']}, layers: {s['layers']}, "
        f"{s['steps']} steps of {s['batch'] * s['window']:,} tokens",
        *conditions(document),
        "",
        *table(columns, _WIDTH),
        "",
        "x: how many times as fast as full, median of the rounds.",
        "MiB: peak growth in a training step of the head, gradients included; temporary: without.",
    ]


def scaling_table(point: dict[str, Any]) -> list[str]:
    """One size: a line per head."""
    timing = point["timing"]
    columns: Columns = [("", list(timing))]
    for question in QUESTIONS:
        some = [t[question] for t in timing.values()]
        columns.append((question, [milliseconds(t["median"]) for t in some]))
        columns.append(("", [f"{t['faster']:.1f}x" for t in some]))
    return table(columns, _WIDTH)


def milliseconds(seconds: float) -> str:
    """With three digits.

    >>> milliseconds(0.0123456), milliseconds(0.25), milliseconds(0.0001)
    ('12.3 ms', '250 ms', '0.100 ms')
    """
    value = 1e3 * seconds
    digits = max(0, 2 - max(-1, math.floor(math.log10(value)))) if value > 0 else 0
    return f"{value:,.{digits}f} ms"


def _mib(memory: dict[str, Any] | None, key: str) -> str:
    return "" if memory is None or memory[key] is None else f"{memory[key] / 2**20:,.0f}"


def plot_training(document: Document, stem: Path) -> None:
    """Perplexity by steps, and the time of the head's step."""
    figure, (curves, bars) = _figure(document, 2)
    for result in document["results"]:
        points = [p for p in result["curve"] if p["step"] > 0]
        x, y = [p["step"] for p in points], [math.exp(p["valid"]) for p in points]
        curves.plot(x, y, "o-", color=_COLORS[result["kind"]], label=result["kind"], markersize=3)
    curves.set_yscale("log")
    curves.set_xlabel("training steps", fontsize=8)
    curves.set_title("validation perplexity", fontsize=10, loc="left")
    curves.legend(fontsize=8, frameon=False)
    everyone = [*document["results"], *document["peers"]][::-1]
    names = [r.get("kind") or r["name"] for r in everyone]
    values = [1e3 * r["timing"][QUESTIONS[0]]["median"] for r in everyone]
    shades = [_COLORS.get(name, _PEER) for name in names]
    places = range(len(names))
    bars.barh(places, values, color=shades, height=0.72)
    bars.set_yticks(list(places), names, fontsize=8)
    bars.set_xlim(0, 1.25 * max(values))
    for place, value in zip(places, values, strict=True):
        text = " " + milliseconds(value / 1e3)
        bars.text(value, place, text, va="center", fontsize=8)
    s = document["settings"]
    bars.set_title(
        f"loss and gradients of the head, N {s['batch'] * s['window']:,}", fontsize=10, loc="left"
    )
    figure.suptitle(f"{document['title']}: V {document['vocab']:,}, D {s['width']}", fontsize=10)
    _write(figure, stem)


def plot_scaling(document: Document, stem: Path) -> None:
    """Seconds against V, a panel per question."""
    figure, axes = _figure(document, len(QUESTIONS))
    points, s = document["points"], document["settings"]
    for ax, question in zip(axes, QUESTIONS, strict=True):
        for kind in points[0]["timing"]:
            x = [p["vocab"] for p in points]
            y = [1e3 * p["timing"][kind][question]["median"] for p in points]
            ax.loglog(x, y, "o-", color=_COLORS[kind], label=kind, markersize=4)
        ax.set_title(question, fontsize=10, loc="left")
        ax.set_xlabel("words", fontsize=8)
        ax.set_ylabel("milliseconds", fontsize=8)
        ax.grid(alpha=0.25)
    axes[0].legend(fontsize=8, frameon=False)
    figure.suptitle(
        f"{document['title']}: D {s['width']}, N {s['tokens']:,} in training and 1 in questions",
        fontsize=10,
    )
    _write(figure, stem)


def _figure(document: Document, panels: int) -> tuple[Figure, list[Axes]]:
    import matplotlib
    from matplotlib.figure import Figure

    # The same document gives the same file, and text stays text.
    matplotlib.rcParams.update({"svg.hashsalt": "lmhead", "svg.fonttype": "none"})
    figure = Figure(figsize=(4.6 * panels, 4.2), layout="constrained")
    axes = list(figure.subplots(1, panels))
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
    figure.supxlabel("\n".join(conditions(document)), fontsize=7, color="#475569")
    return figure, axes


def _write(figure: Figure, stem: Path) -> None:
    for kind in ("png", "svg"):
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(stem.with_suffix(f".{kind}"), dpi=160, metadata=metadata)
