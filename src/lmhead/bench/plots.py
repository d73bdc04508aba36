"""Documents as pictures, PNG and SVG. Needs matplotlib: `pip install 'lmhead[bench]'`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from lmhead.bench.report import Document, conditions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS, _PEERS, _PRODUCT = "#0f766e", "#94a3b8", "#cbd5e1"
_LINES = ("#0f766e", "#d97706", "#4f46e5")
_MIB = 2**20


def can_plot() -> bool:
    """Whether matplotlib is here."""
    return importlib.util.find_spec("matplotlib") is not None


def write_plot(document: Document, stem: Path) -> list[Path]:
    """Draw what the document tells, to `stem`.png and `stem`.svg."""
    import matplotlib

    # The same document gives the same file, and text stays text.
    matplotlib.rcParams.update({"svg.hashsalt": "lmhead", "svg.fonttype": "none"})
    draw = {"memory": _memory, "scaling": _scaling, "sample": _sample, "decode": _decode}.get(
        document["benchmark"], _comparison
    )
    figure = draw(document)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=160, metadata=metadata)
    return paths


def _figure(
    document: Document, panels: int, height: float, width: float = 5.2
) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * panels, height), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("\n".join(conditions(document)), fontsize=7, color="#475569")
    return figure, list(axes)


def _bars(
    ax: Axes, labels: list[str], values: list[float], notes: list[str], colors: list[str]
) -> None:
    """Horizontal bars, the first on top, a note at the end of each."""
    places = list(range(len(labels)))[::-1]
    ax.barh(places, values, color=colors, height=0.72)
    ax.set_yticks(places, labels, fontsize=8)
    ax.set_xlim(0, max(values) * 1.3)
    ax.tick_params(axis="x", labelsize=8)
    for place, value, note in zip(places, values, notes, strict=True):
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        ax.annotate(
            note,
            (value, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            size=8,
            bbox=white,
        )


def _color(name: str, ours: bool) -> str:
    return _OURS if ours else _PRODUCT if name.startswith("product") else _PEERS


def _comparison(document: Document) -> Figure:
    results = document["results"]
    measured = [r for r in results if r["memory"] and r["memory"]["later"] is not None]
    figure, axes = _figure(document, 2 if measured else 1, 1.6 + 0.32 * len(results))
    against = "eager" if "eager" in document["baselines"] else None
    notes = [
        f"{r['median']:.3g} s"
        + (f", {r['ratios'][against]['median']:.2f}×" if against in r["ratios"] else "")
        for r in results
    ]
    colors = [_color(r["name"], r["ours"]) for r in results]
    _bars(axes[0], [r["label"] for r in results], [r["median"] for r in results], notes, colors)
    title = "seconds, median" + ("; × eager torch" if against else "")
    axes[0].set_title(title, fontsize=9, loc="left")
    if measured:
        sizes = [r["memory"]["later"] / _MIB for r in measured]
        colors = [_color(r["name"], r["ours"]) for r in measured]
        notes = [f"{size:,.0f}" for size in sizes]
        _bars(axes[1], [r["label"] for r in measured], sizes, notes, colors)
        axes[1].set_title("MiB, peak growth in a call", fontsize=9, loc="left")
    figure.suptitle(f"{document['benchmark']}: {document['title']}", fontsize=10)
    return figure


def _memory(document: Document) -> Figure:
    rows = [r for r in document["results"] if "skipped" not in r]
    figure, (ax,) = _figure(document, 1, 1.8 + 0.26 * len(rows), width=7.5)
    labels = [f"{r['shape']['name']}, N {r['shape']['tokens']}: {r['label']}" for r in rows]
    sizes = [r["temporary"] / _MIB for r in rows]
    notes = [
        f"{t:.0f} (logits: {r['logits'] / _MIB:,.0f})" for t, r in zip(sizes, rows, strict=True)
    ]
    if rows:
        _bars(ax, labels, sizes, notes, [_OURS] * len(rows))
    limit = document["max_bytes"] / _MIB
    ax.set_xlim(0, 1.5 * max([limit, *sizes]))
    ax.axvline(limit, color="#b91c1c", linewidth=1)
    ax.set_title(f"temporary memory in MiB; max_bytes = {limit:.0f} MiB", fontsize=9, loc="left")
    return figure


def _scaling(document: Document) -> Figure:
    figure, axes = _figure(document, 2, 4.0)
    for ax, axis in zip(axes, ("vocab", "tokens"), strict=True):
        series = [s for s in document["series"] if s["axis"] == axis]
        for s, color in zip(series, _LINES, strict=False):
            power = "" if s["exponent"] is None else f" ({axis}^{s['exponent']:.2f})"
            ax.loglog(s["sizes"], s["seconds"], "o-", color=color, label=s["label"] + power)
            # What linear would be, through the last point.
            last = s["seconds"][-1] / s["sizes"][-1]
            ax.loglog(s["sizes"], [last * n for n in s["sizes"]], ":", color=color, linewidth=1)
        ax.set_xscale("log", base=2)
        ax.set_xlabel({"vocab": "words", "tokens": "tokens"}[axis], fontsize=8)
        ax.set_ylabel("seconds", fontsize=8)
        if series:
            ax.legend(fontsize=7, frameon=False)
    figure.suptitle(f"{document['title']}; dotted: linear", fontsize=10)
    return figure


def _sample(document: Document) -> Figure:
    rows = document["results"]
    batches = sorted({r["batch"] for r in rows})
    figure, axes = _figure(document, max(1, len(batches)), 3.6)
    for ax, batch in zip(axes, batches, strict=False):
        some = [r for r in rows if r["batch"] == batch]
        labels, values, notes, colors = [], [], [], []
        for r in some:
            for who, color in (("ours", _OURS), ("theirs", _PEERS)):
                labels.append(r["label"] if who == "ours" else "Hugging Face")
                values.append(1e3 * r[who]["median"])
                ratio = f", 1/{1 / r['ratio']['median']:.0f}" if who == "ours" else ""
                notes.append(f"{values[-1]:.2f} ms{ratio}")
                colors.append(color)
        _bars(ax, labels, values, notes, colors)
        ax.set_title(f"milliseconds, median; batch of {batch}", fontsize=9, loc="left")
    figure.suptitle(f"sample: {document['title']}; V = {document['vocab']:,}", fontsize=10)
    return figure


def _decode(document: Document) -> Figure:
    figure, (ax, bars) = _figure(document, 2, 4.0)
    names = [w["name"] for w in document["growth"][0]["ways"]] if document["growth"] else []
    colors = {"screen 8": _OURS, "screen 4+4": "#14b8a6", "float32": _PEERS}
    for name in names:
        points = [
            (r["setting"]["vocab"], 1e3 * w["median"])
            for r in document["growth"]
            for w in r["ways"]
            if w["name"] == name
        ]
        ours = name.startswith("screen")
        style = "o-" if ours else "s--"
        ax.loglog(*zip(*points, strict=True), style, color=colors.get(name), label=name)
    ax.set_xscale("log", base=2)
    ax.set_xlabel(f"words (D = {document['growth_hidden_size']})", fontsize=8)
    ax.set_ylabel("milliseconds per token", fontsize=8)
    if names:
        ax.legend(fontsize=7, frameon=False)
    labels, values, notes, shades = [], [], [], []
    for result in document["results"]:
        for w in result["ways"]:
            labels.append(f"{result['setting']['name']}: {w['name']}")
            values.append(1e3 * w["median"])
            notes.append(f"{values[-1]:.1f} ms")
            shades.append(_OURS if w["ours"] else _PEERS)
    if labels:
        _bars(bars, labels, values, notes, shades)
        bars.tick_params(axis="y", labelsize=6)
    figure.suptitle(f"decode: {document['title']}", fontsize=10)
    return figure
