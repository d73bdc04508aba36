"""Run cases on several ranks of `torch.distributed` with gloo, on this machine alone.

    python ranks.py FOLDER SECONDS WORLD [WORLD ...]

imports all modules of cases once, and for each WORLD forks that many ranks, which run all cases for
that world size one after the other, so that processes and groups are started once per world. Each
rank writes how a case ended into FOLDER. A rank that fails or outlives SECONDS ends the others:
`torch.multiprocessing` does that, and the ranks die with it; new ones start with the next case.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).parent.parent
MODULES = (
    "cases_vocab",
    "cases_peers",
    "cases_styles",
    "cases_fsdp",
    "cases_score",
    "cases_contract",
)
WORLDS = (1, 2, 3, 4)

Case = Callable[[], None]
CASES: dict[str, tuple[tuple[int, ...], Case]] = {}  # by "module.function"


def case(*worlds: int) -> Callable[[Case], Case]:
    """Register a function to be run by every rank, for each of these numbers of ranks."""

    def register(function: Case) -> Case:
        CASES[f"{function.__module__.rsplit('.', 1)[-1]}.{function.__name__}"] = (worlds, function)
        return function

    return register


def names() -> list[tuple[str, int]]:
    """Return all cases: (name, world size)."""
    for module in MODULES:
        import_module(f"parallel.{module}")
    return [(name, world) for name, (worlds, _) in CASES.items() for world in worlds]


def launch(folder: Path, *, seconds: int = 120) -> None:
    """Run all cases; `outcome` then returns the result of each."""
    from preloaded_python import preloaded_python

    command = [preloaded_python(), str(TESTS / "parallel" / "ranks.py"), str(folder), str(seconds)]
    paths = [str(TESTS), *sys.path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        [*command, *map(str, WORLDS)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            _, errors = process.communicate(timeout=seconds * (len(WORLDS) + 1))
        except subprocess.TimeoutExpired:
            errors = "timed out"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    (folder / "errors").write_text(errors)


def outcome(folder: Path, name: str, world: int) -> str:
    """Return the errors of a case on all ranks; "" if there are none."""
    texts = []
    for rank in range(world):
        path = folder / f"{name}-{world}-{rank}"
        if not path.exists():
            return (
                f"{name} did not finish on rank {rank}: {(folder / 'errors').read_text()[-3000:]}"
            )
        texts.append(path.read_text())
    return "".join(texts)


def _rank(rank: int, world: int, folder: str, seconds: int, cases: list[str]) -> None:
    import torch
    import torch.distributed as dist

    from lmhead.errors import PerformanceWarning

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's own, of views and of experimental features
    warnings.simplefilter("error", PerformanceWarning)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store-{world}-{len(cases)}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    environment = dict(os.environ)
    for name in cases:
        error, start = "", time.process_time()
        Path(folder, f"{name}-{world}-started").touch()
        try:
            CASES[name][1]()
        except Exception:
            error = f"rank {rank} of {world}:\n{traceback.format_exc()}"
        os.environ.clear()
        os.environ.update(environment)
        Path(folder, f"{name}-{world}-{rank}").write_text(error)
        with Path(folder, "seconds").open("a") as file:
            file.write(f"{time.process_time() - start:.2f} {name} {rank}/{world}\n")
        if error:
            os._exit(1)  # the others may wait for this rank in another collective
    dist.destroy_process_group()


def main(folder: str, seconds: str, worlds: Sequence[str]) -> None:
    """Fork the ranks; see above."""
    from torch.multiprocessing.spawn import ProcessException, start_processes

    sys.modules["parallel.ranks"] = sys.modules["__main__"]
    names()
    for world in map(int, worlds):
        cases = [name for name, (sizes, _) in CASES.items() if world in sizes]
        while cases:
            args = (world, folder, int(seconds), cases)
            try:
                start_processes(_rank, args, nprocs=world, start_method="fork")  # type: ignore[no-untyped-call]
                break
            except ProcessException as error:  # written by the rank that failed
                print(error, file=sys.stderr)
                started = [c for c in cases if Path(folder, f"{c}-{world}-started").exists()]
                if not started:
                    break
                cases = cases[len(started) :]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
