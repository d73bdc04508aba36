"""Time of lmhead against the number of rows and against the vocabulary: both must be linear.

The hidden size is small, so that a vocabulary of a million tokens takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import loss, query, report
from benchmarks.float64_reference import errors, expected_results
from benchmarks.inputs import generate
from benchmarks.plots import LINES, Figure, label, new_figure
from benchmarks.report import Columns, Document
from benchmarks.runner import Run, benchmark, rounds
from benchmarks.shapes import Shape
from benchmarks.timing import exponent, time_calls

HIDDEN_SIZE = 64


@dataclass(frozen=True)
class Axis:
    """Shapes of which one size grows: "vocab" or "tokens"."""

    name: str
    shapes: tuple[Shape, ...]

    def size(self, shape: Shape) -> int:
        """Return the size that grows."""
        return shape.vocab if self.name == "vocab" else shape.tokens


def make_axes(*, quick: bool = False) -> tuple[Axis, Axis]:
    """Return V up to 2^20 at 256 rows, and up to 8192 rows at V = 32768.

    >>> [shape.vocab for shape in make_axes(quick=True)[0].shapes]
    [4096, 8192, 16384]
    """
    vocab = range(12, 15) if quick else range(14, 21)
    tokens = range(6, 9) if quick else range(8, 14)
    return (
        Axis("vocab", tuple(Shape(f"2^{v}", 2**v, HIDDEN_SIZE, 256) for v in vocab)),
        Axis("tokens", tuple(Shape(f"2^{n}", 2**15, HIDDEN_SIZE, 2**n) for n in tokens)),
    )


def _series(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the points of one axis and implementation, and the power that the time grows with."""
    by_name: dict[tuple[str, str], dict[str, Any]] = {}
    for p in points:
        new = {name: p[name] for name in ("axis", "name", "label")}
        series = by_name.setdefault((p["axis"], p["name"]), {**new, "sizes": [], "seconds": []})
        series["sizes"].append(p["size"])
        series["seconds"].append(p["seconds"])
    for series in by_name.values():
        enough = len(series["sizes"]) > 1
        series["exponent"] = exponent(series["sizes"], series["seconds"]) if enough else None
    return list(by_name.values())


def lines(document: Document, width: int) -> list[str]:
    """Return a table per axis."""
    out = []
    for axis in ("vocab", "tokens"):
        series = [s for s in document["series"] if s["axis"] == axis]
        if not series:
            continue
        sizes = series[0]["sizes"]
        names = [f"{axis} {size:,}" for size in sizes] + ["time grows with the power"]
        columns: Columns = [("seconds", names)]
        for s in series:
            power = "" if s["exponent"] is None else f"{s['exponent']:.3f}"
            columns.append((s["label"], [*(f"{t:.4f}" for t in s["seconds"]), power]))
        out += [*report.table(columns, width), ""]
    wrong = [p for p in document["points"] if p["wrong"]]
    return out + [
        f"WRONG: {p['label']}, {p['axis']} {p['size']:,}: {', '.join(p['wrong'])}" for p in wrong
    ]


def draw(document: Document) -> Figure:
    """Draw seconds against each size, and the line of linear growth through the last point."""
    figure, axes = new_figure(document, 2, 4.0, title=f"{document['title']}; dotted: linear")
    for ax, axis in zip(axes, ("vocab", "tokens"), strict=True):
        series = [s for s in document["series"] if s["axis"] == axis]
        for s, color in zip(series, LINES, strict=False):
            power = "" if s["exponent"] is None else f" ({axis}^{s['exponent']:.2f})"
            ax.loglog(s["sizes"], s["seconds"], "o-", color=color, label=s["label"] + power)
            last = s["seconds"][-1] / s["sizes"][-1]
            ax.loglog(s["sizes"], [last * n for n in s["sizes"]], ":", color=color, linewidth=1)
        ax.set_xscale("log", base=2)
        x = {"vocab": "vocabulary", "tokens": "rows"}[axis]
        label(ax, x=x, y="seconds", legend=bool(series))
    return figure


@benchmark(
    "scaling",
    f"time against vocabulary and tokens, D {HIDDEN_SIZE}, float32",
    lines,
    draw=draw,
    quick=True,
)
@rounds(3)
def command(run: Run, rounds: int) -> None:
    """Measure how time grows with the vocabulary, up to a million tokens, and the number of rows.

    \b
    Examples:
      lmhead bench scaling
      lmhead bench scaling --quick --no-plot
    """
    ours = {f"{t.name}/{i.name}": (t, i) for t in (loss.TASK, query.TASK) for i in t.ours()}
    points: list[dict[str, Any]] = []
    run.document |= {"rounds": rounds, "points": points, "series": []}
    for axis, shape in ((a, shape) for a in make_axes(quick=run.quick) for shape in a.shapes):
        label = f"{axis.name} {axis.size(shape):,}"
        run.progress(f"{label}: inputs, and the expected results in float64")
        inputs = generate(shape.vocab, shape.hidden_size, shape.tokens)
        expected = {task: expected_results(task, inputs) for task in ("loss", "query")}
        steps, wrong = {}, {}
        for name, (task, i) in ours.items():
            run.progress(f"{label}: {i.label}")
            steps[name] = i.prepare(inputs.detached())
            row_errors = errors(steps[name](), expected[task.name])
            wrong[name] = task.too_far(i.name, "float32", row_errors)
        seconds = time_calls(steps, rounds, run.progress)
        for name, (_, i) in ours.items():
            point = {"axis": axis.name, "size": axis.size(shape), "name": name, "label": i.label}
            points.append({**point, "seconds": min(seconds[name]), "wrong": wrong[name]})
        run.document["series"] = _series(points)
    run.wrong = any(point["wrong"] for point in points)
