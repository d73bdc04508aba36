"""One task, one shape, everybody: from the inputs to the document that the reports are made of."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmhead.bench import machine
from lmhead.bench.runner import Measured, Progress, Run
from lmhead.bench.shapes import Shape
from lmhead.bench.statistics import ratio, summary
from lmhead.bench.task import Task

# Python, torch and its libraries in a process.
_PROCESS = 400 * 2**20
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Settings:
    """What a user can choose.

    Attributes:
        shape: of the head, and how many tokens.
        dtype: of hidden states and weight, by name.
        rounds: how many.
        threads: of torch; None for torch's own choice.
        only: names of the implementations; all if empty.
        data: the folder of real hidden states.
        memory: whether to measure it too.
    """

    shape: Shape
    dtype: str = "float32"
    rounds: int = 5
    threads: int | None = None
    only: tuple[str, ...] = ()
    data: Path | None = None
    memory: bool = True


def compare(task: Task, settings: Settings, progress: Progress) -> dict[str, Any]:
    """Run the task and return all that is known, ready for JSON.

    Ctrl-C ends the run early; what was measured until then is returned.

    Raises:
        ValueError: a name that is not known, or too little memory.
    """
    run = Run(task, settings.dtype, list(map(Measured, task.pick(settings.only))), settings.threads)
    _check_memory(run, settings)
    # Late, since they load torch.
    import torch

    from lmhead.bench.data import make_inputs
    from lmhead.bench.queries import TOP_K
    from lmhead.bench.truth import truth_of

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    facts: dict[str, Any] = {"data": None}
    with tempfile.TemporaryDirectory(prefix="lmhead-bench-") as folder:
        inputs_path, truth_path = Path(folder) / "inputs.pt", Path(folder) / "truth.pt"
        try:
            progress("inputs")
            inputs = make_inputs(settings.shape, settings.dtype, settings.data)
            inputs.save(inputs_path)
            progress("the truth, in float64")
            truth = truth_of(task.name, inputs, top_k=TOP_K)
            torch.save(truth, truth_path)
            loss = float(truth["loss"] if "loss" in truth else -truth["log_prob"].mean())
            facts["data"] = {"origin": inputs.origin, "entropy": inputs.entropy, "loss": loss}
            del inputs, truth
            run.time(inputs_path, truth_path, settings.rounds, progress)
            if settings.memory:
                run.memory(inputs_path, progress)
        except KeyboardInterrupt:
            run.interrupted = True
    return {**facts, **_document(run, settings)}


def _document(run: Run, settings: Settings) -> dict[str, Any]:
    from lmhead.sweep import native

    shape, task = settings.shape, run.task
    done = [m for m in run.measured if m.seconds]
    seconds = {m.implementation.name: m.seconds for m in done}
    fastest = min((min(seconds[n]) for n in seconds if n.startswith("product")), default=None)
    rate = None if fastest is None else shape.flops() / fastest / 1e9
    results = []
    for m in done:
        i = m.implementation
        time = summary(m.seconds)
        gflops = shape.flops(i.work or task.products) / time.median / 1e9
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
                "memory": None
                if m.growth is None
                else {**asdict(m.growth), "temporary": m.growth.temporary},
            }
        )
    return {
        "benchmark": task.name,
        "title": task.title,
        "shape": asdict(shape),
        "dtype": run.dtype,
        "rounds": settings.rounds,
        "interrupted": run.interrupted,
        "native": native.core is not None,
        **machine.describe(run.threads),
        "product_gflops": rate,
        "headings": dict(task.headings),
        "baselines": [b for b in task.baselines if b in seconds],
        "results": results,
        "skipped": [
            {
                "name": m.implementation.name,
                "label": m.implementation.label,
                "reason": m.skipped,
                "failed": m.failed,
            }
            for m in run.measured
            if m.skipped is not None
        ],
    }


def _check_memory(run: Run, settings: Settings) -> None:
    """Refuse a run that would drive the machine out of memory."""
    available = machine.available_bytes()
    if available is None:
        return
    shape, size = settings.shape, _BYTES[settings.dtype]
    head = shape.vocab * shape.hidden_size
    # The inputs of everybody, the truth, and at the peak of a dense one: logits, softmax, gradient.
    needed = len(run.measured) * (_PROCESS + head * size) + 3 * head * 4
    if any(not m.implementation.ours for m in run.measured):
        needed += 3 * 4 * shape.tokens * shape.vocab
    if needed > available:
        raise ValueError(
            f"this run needs about {needed / 2**30:.1f} GiB of memory, "
            f"{available / 2**30:.1f} GiB are free: give fewer --tokens, or --only some of them"
        )
