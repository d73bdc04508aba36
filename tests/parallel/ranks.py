"""Run cases on several ranks of `torch.distributed` with gloo, on this machine alone.

    python ranks.py FOLDER SECONDS MODULE WORLD [WORLD ...]

imports MODULE once, and for each WORLD forks that many ranks, which run all its cases for that
world size one after the other. Each rank writes how a case ended into FOLDER. A rank that fails or
outlives SECONDS ends the others: `torch.multiprocessing` does that, and the ranks die with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).parent.parent

Case = Callable[[], None]
CASES: dict[str, dict[str, tuple[tuple[int, ...], Case]]] = {}


def case(*worlds: int) -> Callable[[Case], Case]:
    """Register a function to be run by every rank, for each of these numbers of ranks."""

    def register(function: Case) -> Case:
        module = CASES.setdefault(function.__module__.rsplit(".", 1)[-1], {})
        module[function.__name__] = (worlds, function)
        return function

    return register


def names(module: str) -> list[tuple[str, int]]:
    """Return all cases of a module: (name, world size)."""
    import_module(f"parallel.{module}")
    return [(name, world) for name, (worlds, _) in CASES[module].items() for world in worlds]


def launch(folder: Path, module: str, *, seconds: int = 90) -> None:
    """Run all cases of a module; `outcome` then says how each ended."""
    worlds = sorted({world for _, world in names(module)})
    command = [sys.executable, str(TESTS / "parallel" / "ranks.py"), str(folder), str(seconds)]
    paths = [str(TESTS), *sys.path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        [*command, module, *map(str, worlds)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            _, said = process.communicate(timeout=seconds * (len(worlds) + 1))
        except subprocess.TimeoutExpired:
            said = "timed out"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    (folder / "said").write_text(said)


def outcome(folder: Path, name: str, world: int) -> str:
    """Return what went wrong in a case on any rank; "" if nothing did."""
    found = []
    for rank in range(world):
        path = folder / f"{name}-{world}-{rank}"
        if not path.exists():
            return f"{name} did not finish on rank {rank}: {(folder / 'said').read_text()[-3000:]}"
        found.append(path.read_text())
    return "".join(found)


def _rank(rank: int, world: int, folder: str, seconds: int, module: str) -> None:
    import torch
    import torch.distributed as dist

    from lmhead.errors import PerformanceWarning

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's own, of views and of experimental features
    warnings.simplefilter("error", PerformanceWarning)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store-{world}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    for name, (worlds, function) in CASES[module].items():
        if world not in worlds:
            continue
        said = ""
        try:
            function()
        except Exception:
            said = f"rank {rank} of {world}:\n{traceback.format_exc()}"
        Path(folder, f"{name}-{world}-{rank}").write_text(said)
        if said:
            os._exit(1)  # the others may wait for this rank in another collective
    dist.destroy_process_group()


def main(folder: str, seconds: str, module: str, worlds: Sequence[str]) -> None:
    """Fork the ranks; see above."""
    from torch.multiprocessing.spawn import start_processes

    sys.modules["parallel.ranks"] = sys.modules["__main__"]
    import_module(f"parallel.{module}")
    for world in map(int, worlds):
        args = (world, folder, int(seconds), module)
        start_processes(_rank, args, nprocs=world, start_method="fork")  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
