"""A loss and its gradients with the vocabulary split over ranks: time, memory, bytes sent.

    lmhead          `VocabParallel`: numbers per row are exchanged, logits are never gathered
    gather          the plan of Hugging Face: every rank gathers all logits
    loss_parallel   torch's: logits stay sharded, and exist in full on the ranks together

Ranks are processes of this machine with gloo and one thread each. Times are of the slowest rank, in
interleaved rounds; memory is the peak growth of each rank's process in a call, the most of all
ranks. CPU time is what a rank computed, without waiting for the others.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import report
from benchmarks.report import Document
from benchmarks.runner import Run, benchmark, integer, rounds
from benchmarks.timing import ratio, summary
from lmhead import LMHead
from lmhead.cli._peak_memory import call_with_growth

NAMES = ("lmhead", "gather", "loss_parallel")
Step = Callable[[], dict[str, Tensor]]


def _steps(vocab: int, width: int, tokens: int) -> tuple[dict[str, Step], Callable[[], None]]:
    """Return a training step per implementation on the same tensors, and what frees gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=random).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=random)
    random.manual_seed(1 + dist.get_rank())
    part = torch.rand(vocab // dist.get_world_size(), width, generator=random).sub_(0.5)
    split = DTensor.from_local(part.mul_(width**-0.5), mesh, [Shard(0)], run_check=False)
    weight: Any = nn.Parameter(split)
    head = LMHead(width, vocab, device="meta")
    head.weight = weight

    def logits() -> Any:  # what ColwiseParallel makes of nn.Linear
        return F.linear(DTensor.from_local(hidden, mesh, [Replicate()], run_check=False), weight)

    def lazy() -> Tensor:
        return F.cross_entropy(head(hidden), targets)

    def gather() -> Tensor:
        whole = logits().redistribute(placements=[Replicate()]).to_local()
        return F.cross_entropy(whole, targets)

    def sharded() -> Tensor:
        return F.cross_entropy(logits(), targets)

    def clear() -> None:
        hidden.grad = weight.grad = None

    def make(loss_of: Callable[[], Tensor]) -> Step:
        def step() -> dict[str, Tensor]:
            clear()
            with loss_parallel():  # changes nothing for plain tensors
                loss: Any = loss_of()
                loss.backward()
            value = loss.full_tensor() if isinstance(loss, DTensor) else loss
            leaves: tuple[Any, ...] = (hidden, weight)
            grads = [leaf.grad for leaf in leaves]
            return {"loss": value.detach(), "hidden": grads[0], "weight": grads[1].to_local()}

        return step

    return dict(zip(NAMES, map(make, (lazy, gather, sharded)), strict=True)), clear


def _rank(rank: int, folder: str, settings: dict[str, int]) -> None:
    """Measure on one rank, and write what was found."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=settings["ranks"]
    )
    steps, clear = _steps(settings["vocab"], settings["width"], settings["tokens"])
    found: dict[str, Any] = {
        n: {"seconds": [], "cpu": [], "memory": [], "error": {}} for n in NAMES
    }
    first: dict[str, Tensor] = {}
    for name, step in steps.items():
        made = {key: value.clone() for key, value in step().items()}
        first = first or made
        for key, value in made.items():
            size = float(first[key].double().norm())
            found[name]["error"][key] = float((value - first[key]).double().norm()) / size
    for number in range(settings["rounds"]):
        for name in (*NAMES[number % 3 :], *NAMES[: number % 3]):
            dist.barrier()
            start, cpu = perf_counter(), process_time()
            steps[name]()
            found[name]["cpu"].append(process_time() - cpu)
            found[name]["seconds"].append(perf_counter() - start)
    del made, first
    for name in NAMES:
        clear()  # the gradient of the weight counts for each
        dist.barrier()
        found[name]["memory"] = [call_with_growth(steps[name])[1]]
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def measure(settings: dict[str, int]) -> dict[str, Any]:
    """Run all ranks; return the slowest of each round, and the most memory."""
    from torch.multiprocessing.spawn import start_processes

    root = str(Path(__file__).resolve().parents[1])
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, root)  # new processes import this file
        try:
            start_processes(  # type: ignore[no-untyped-call]
                _rank, (folder, settings), nprocs=settings["ranks"], start_method="spawn"
            )
        finally:
            sys.path.remove(root)
        every = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]

    def most(name: str, key: str) -> list[float]:
        return [max(values) for values in zip(*(found[name][key] for found in every), strict=True)]

    points: dict[str, Any] = {}
    for name in NAMES:
        seconds, cpu = most(name, "seconds"), most(name, "cpu")
        errors = [found[name]["error"] for found in every]
        points[name] = {
            "seconds": summary(seconds).__dict__,
            "cpu_seconds": summary(cpu).__dict__,
            "ratio": ratio(seconds, most("lmhead", "seconds")).__dict__,
            "cpu_ratio": ratio(cpu, most("lmhead", "cpu")).__dict__,
            "memory": max(most(name, "memory")),
            "error": {key: max(error[key] for error in errors) for key in errors[0]},
        }
    return points


def lines(document: Document, width: int) -> list[str]:
    """Return the table."""
    points = document["points"]

    def column(*keys: str, form: str = "{:.2f}") -> list[str]:
        found = []
        for point in points.values():
            value = point
            for key in keys:
                value = value[key]
            found.append(form.format(value))
        return found

    memory = [f"{point['memory'] / 2**20:,.0f}" for point in points.values()]
    columns = [
        ("", list(points)),
        ("seconds", column("seconds", "median")),
        ("of lmhead", column("ratio", "median")),
        ("CPU s", column("cpu_seconds", "median")),
        ("of lmhead", column("cpu_ratio", "median")),
        ("MiB per rank", memory),
        ("error", column("error", "weight", form="{:.0e}")),
    ]
    return report.table(columns, width)


@benchmark("vocab-parallel", "a loss with the vocabulary split over ranks", lines, quick=True)
@integer("--ranks", 4, "Processes, one thread each.")
@integer("--vocab", 262144, "V.")
@integer("--width", 640, "D.")
@integer("--tokens", 512, "N.")
@rounds(5)
def command(run: Run, ranks: int, vocab: int, width: int, tokens: int, rounds: int) -> None:
    """Time a vocabulary-parallel loss, gathered logits, and torch's `loss_parallel`."""
    settings = {"ranks": ranks, "vocab": vocab, "width": width, "tokens": tokens, "rounds": rounds}
    if run.quick:
        settings |= {"ranks": 2, "vocab": 1000, "width": 32, "tokens": 64, "rounds": 2}
    if settings["vocab"] % settings["ranks"]:
        raise ValueError(f"--vocab must be a multiple of --ranks; got {vocab} and {ranks}")
    run.document["settings"] = settings
    run.document["points"] = measure(settings)
    run.wrong = any(
        error > 1e-4 for p in run.document["points"].values() for error in p["error"].values()
    )
