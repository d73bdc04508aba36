"""All implementations of one task at one shape: checked, timed in rounds, memory, table, plot."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import click

from benchmarks import machine, report
from benchmarks.float64_reference import errors, expected_results, fingerprint
from benchmarks.fresh_process import growth_of
from benchmarks.inputs import Inputs
from benchmarks.model_inputs import make_inputs
from benchmarks.plots import OURS, PEERS, PRODUCT, Figure, bars, label, new_figure
from benchmarks.report import MIB, Columns, Document
from benchmarks.runner import DTYPE, FOLDER, SHAPE_HELP, TOKENS, Option, Run, ShapeType, rounds
from benchmarks.shapes import Shape
from benchmarks.task import Implementation, Results, Step, Task, UnavailableError
from benchmarks.timing import interleave, ratio, summary
from lmhead.cli._command_group import combine_options
from lmhead.cli._peak_memory import Growth

# Pause between two calls: threads of the previous implementation spin for a moment before they
# sleep.
_PAUSE = 0.05
# A timed call may differ from the checked one by the order of its sums.
_SAME = 1e-3
# Memory of Python, torch and its libraries in a process.
_PROCESS = 400 * MIB
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass
class Measured:
    """The measurements of one implementation.

    Attributes:
        step: the call that is timed.
        seconds: by rounds.
        errors: of the results against float64.
        checked: a number per result of the first call, which later calls must repeat.
        wrong: the results whose error is above the tolerance, or that changed after the first call.
        growth: of the memory of a fresh process, None if it was not measured.
        skipped: why it could not run; None if it could.
    """

    task: Task
    implementation: Implementation
    step: Step = dict
    seconds: list[float] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    checked: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    growth: Growth | None = None
    skipped: str | None = None

    @property
    def label(self) -> str:
        """The implementation's label."""
        return self.implementation.label

    def check(self, inputs: Inputs, expected: Results, dtype: str) -> None:
        """Prepare the implementation and compare its first call with float64."""
        with self._skip_on_error():
            self.step = self.implementation.prepare(inputs.detached())
            results = self.step()
            self.checked, self.errors = fingerprint(results), errors(results, expected)
            self.wrong = self.task.too_far(self.implementation.name, dtype, self.errors)

    def measure(self) -> None:
        """Time one call, whose results must be those of the check."""
        if self.skipped is not None:
            return
        with self._skip_on_error():
            time.sleep(_PAUSE)
            start = time.perf_counter()
            results = self.step()
            self.seconds.append(time.perf_counter() - start)
            for name, value in fingerprint(results).items():
                same = abs(value - self.checked[name]) <= _SAME * abs(self.checked[name])
                if not same and name not in self.wrong:
                    self.wrong.append(name)

    def measure_memory(self, inputs: Path, threads: int) -> None:
        """Measure the peak growth of a fresh process."""
        with self._skip_on_error():
            self.growth = growth_of(self.task.module, self.implementation.name, inputs, threads)

    @contextmanager
    def _skip_on_error(self) -> Iterator[None]:
        try:
            yield
        except UnavailableError as error:
            self.skipped = str(error)
        except Exception as error:
            self.skipped = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def compare(
    run: Run,
    task: Task,
    *,
    shape: Shape,
    tokens: int | None,
    dtype: str,
    rounds: int,
    only: tuple[str, ...],
    baseline: tuple[str, ...],
    data: Path | None,
    memory: bool,
) -> None:
    """Run the implementations of a task; the arguments are the options of the command.

    Raises:
        ValueError: an unknown name, or too little memory.
    """
    if run.quick:
        rounds, memory = min(rounds, 2), False
        tokens = tokens or max(16, shape.tokens // 8)
    shape = replace(shape, tokens=tokens or shape.tokens)
    chosen = task.pick(only)
    task.pick(baseline, "baseline")
    task = replace(task, baselines=baseline or task.baselines)
    _check_memory(chosen, shape, dtype)
    run.name = f"{task.name}-{shape.name}-{shape.tokens}-{dtype}"
    run.document |= {"shape": asdict(shape), "dtype": dtype, "rounds": rounds}
    threads = run.document["threads"]
    measured = [Measured(task, i) for i in chosen]
    try:
        run.progress("inputs, and the expected results in float64")
        inputs = make_inputs(shape, dtype, data)
        expected = expected_results(task.name, inputs)
        loss = expected["loss"] if "loss" in expected else -expected["log_prob"].mean()
        facts = {"origin": inputs.origin, "entropy": inputs.entropy, "loss": float(loss)}
        run.document["data"] = facts
        for m in measured:
            run.progress(f"{m.label}: first call, compared with float64")
            m.check(inputs, expected, dtype)
        interleave([m for m in measured if m.skipped is None], rounds, run.progress)
        with tempfile.TemporaryDirectory(prefix="lmhead-bench-") as folder:
            file = Path(folder) / "inputs.pt"
            inputs.save(file)
            for m in measured if memory else ():
                if m.skipped is None and m.implementation.work is None:
                    run.progress(f"memory: {m.label}")
                    m.measure_memory(file, threads)
    finally:  # an interrupted run keeps what was measured
        run.document |= _results(task, shape, measured)
    run.wrong = any(r["wrong"] for r in run.document["results"])
    run.wrong = run.wrong or any(s["failed"] for s in run.document["skipped"])


def _results(task: Task, shape: Shape, measured: Sequence[Measured]) -> Document:
    done = [m for m in measured if m.seconds]
    seconds = {m.implementation.name: m.seconds for m in done}
    fastest = min((min(seconds[n]) for n in seconds if n.startswith("product")), default=None)
    rate = None if fastest is None else shape.flops() / fastest / 1e9
    results = []
    for m in done:
        i = m.implementation
        time = summary(m.seconds)
        gflops = shape.flops(i.work or task.products) / time.median / 1e9
        growth = m.growth
        results.append(
            {
                "name": i.name,
                "label": i.label,
                "ours": i.ours,
                "version": machine.version(i.package or ("lmhead" if i.ours else "torch")),
                "seconds": m.seconds,
                **asdict(time),
                "ratios": {
                    b: asdict(ratio(m.seconds, seconds[b]))
                    for b in task.baselines
                    if b in seconds and b != i.name
                },
                "gflops": gflops,
                "of_product": None if rate is None else gflops / rate,
                "errors": m.errors,
                "wrong": m.wrong,
                "memory": growth and {**asdict(growth), "temporary": growth.temporary},
            }
        )
    skipped = [
        {"name": i.name, "label": i.label, "reason": m.skipped, "failed": i.ours}
        for m in measured
        for i in (m.implementation,)
        if m.skipped is not None
    ]
    return {
        "product_gflops": rate,
        "headings": dict(task.headings),
        "baselines": [b for b in task.baselines if b in seconds],
        "results": results,
        "skipped": skipped,
    }


def _check_memory(chosen: Sequence[Implementation], shape: Shape, dtype: str) -> None:
    """Refuse a run that would need more memory than the machine has free."""
    available = machine.read_meminfo("MemAvailable")
    if available is None:
        return
    size, head = _BYTES[dtype], shape.vocab * shape.hidden_size
    # The inputs of this and of a fresh process, the expected results in float64, and at the peak of
    # a dense implementation: logits, softmax, gradient.
    needed = 2 * (_PROCESS + head * size) + 3 * head * 4
    if any(not i.ours for i in chosen):
        needed += 3 * 4 * shape.tokens * shape.vocab
    if needed > available:
        raise ValueError(
            f"this run needs about {needed / 2**30:.1f} GiB of memory, "
            f"{available / 2**30:.1f} GiB are free: give fewer --tokens, or --only some of them"
        )


def lines(document: Document, width: int) -> list[str]:
    """Return the table: times, ratios, rate, memory, errors."""
    results = document["results"]
    out = ["Nothing was measured."]
    if results:
        out = [*report.table(_columns(document), width), "", *_legend(document)]
    out += [f"Skipped: {s['label']}: {s['reason']}" for s in document["skipped"]]
    out += [f"WRONG: {r['label']}: {', '.join(r['wrong'])}" for r in results if r["wrong"]]
    if document["interrupted"]:
        rounds = max((len(r["seconds"]) for r in results), default=0)
        out.append(f"Rounds done: {rounds} of {document['rounds']}.")
    return out


def _columns(document: Document) -> Columns:
    results = document["results"]
    slow = max(r["median"] for r in results) >= 1
    unit, factor = ("s", 1.0) if slow else ("ms", 1000.0)
    columns: Columns = [
        ("", [r["label"] for r in results]),
        (f"time/{unit}", [f"{r['median'] * factor:.3f}" for r in results]),
        ("best", [f"{r['best'] * factor:.3f}" for r in results]),
        ("spread", [f"{r['spread'] / r['median']:.1%}" for r in results]),
    ]
    columns += [(f"vs {b}", [_ratio(r, b) for r in results]) for b in document["baselines"]]
    columns.append(("GFLOP/s", [f"{r['gflops']:.1f}" for r in results]))
    if document["product_gflops"]:
        columns.append(("of product", [f"{r['of_product']:.0%}" for r in results]))
    if any(r["memory"] for r in results):
        columns.append(("MiB", [report.mib((r["memory"] or {}).get("later")) for r in results]))
    headings = document["headings"].items()
    return columns + [(heading, [_error(r, name) for r in results]) for name, heading in headings]


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


def _legend(document: Document) -> list[str]:
    out = [
        "time: median of the rounds; spread: half the distance between their quartiles.",
        "vs: median of the ratios of times within a round.",
    ]
    if document["product_gflops"]:
        rate = document["product_gflops"]
        out.append(f"of product: fraction of the {rate:.0f} GFLOP/s of a product.")
    sizes = [r["memory"]["results"] for r in document["results"] if r["memory"]]
    if sizes:
        results = f"including {max(sizes) / MIB:,.0f} MiB of results."
        out.append(f"MiB: peak growth of a fresh process in a call, {results}")
    ids = "; ids: fraction of rows with a wrong one" if "rank" in document["headings"] else ""
    return [*out, f"last columns: relative Frobenius error against float64{ids}."]


def draw(document: Document) -> Figure:
    """Draw times, and memory where it was measured."""
    results = document["results"]
    measured = [r for r in results if r["memory"] and r["memory"]["later"] is not None]
    panels = 2 if measured else 1
    figure, axes = new_figure(document, panels, 1.6 + 0.32 * len(results))
    eager = "eager" in document["baselines"]
    times = []
    for r in results:
        note = f"{r['median']:.3g} s"
        note += f", {r['ratios']['eager']['median']:.2f}×" if "eager" in r["ratios"] else ""
        times.append((r["label"], r["median"], note, _color(r)))
    bars(axes[0], times)
    label(axes[0], title="seconds, median" + ("; × eager torch" if eager else ""))
    if measured:
        sizes = [(r, r["memory"]["later"] / MIB) for r in measured]
        bars(axes[1], [(r["label"], size, f"{size:,.0f}", _color(r)) for r, size in sizes])
        label(axes[1], title="MiB, peak growth in a call")
    return figure


def _color(result: Document) -> str:
    if result["ours"]:
        return OURS
    return PRODUCT if result["name"].startswith("product") else PEERS


def task_options(task: Task) -> Option:
    """Return the options of a comparison."""
    names = ", ".join(task.implementations)
    return combine_options(
        click.option("--shape", type=ShapeType(), default="smollm2", help=SHAPE_HELP),
        TOKENS,
        DTYPE,
        rounds(5),
        click.option("--only", multiple=True, metavar="NAME", help=f"Some of: {names}."),
        click.option(
            "--baseline",
            multiple=True,
            metavar="NAME",
            help=f"Divide times by this one's.  [default: {', '.join(task.baselines)}]",
        ),
        click.option(
            "--data",
            type=FOLDER,
            help="Folder of SmolLM2's hidden states and head.  [default: LMHEAD_BENCH_DATA]",
        ),
        click.option("--memory/--no-memory", default=True, help="Measure peak memory too."),
    )
