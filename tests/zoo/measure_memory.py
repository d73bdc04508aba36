"""Peak memory of a snippet, forward and backward, in a fresh process.

    python tests/zoo/measure_memory.py                 ten snippets at N = 4096, V = 131072, D = 64
    python tests/zoo/measure_memory.py trl-gkd_jsd     one of them, or any other
    python tests/zoo/measure_memory.py --all           every snippet, each in a forked process

The bound is `max_bytes` plus the results and the gradients; inputs are made before. The dense
logits alone would take 2 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

TEN = [
    "trl-grpo_temperature_in_place",
    "trl-selective_log_softmax_loop",
    "trl-entropy_from_logits_split",
    "trl-gkd_jsd_per_token",
    "trl-sft_token_accuracy",
    "verl-temperature_per_row_in_place",
    "openrlhf-knowledge_distillation",
    "transformers-label_smoother",
    "losses-focal_loss_by_probabilities",
    "decoding-rank_of_the_target",
]
FULL_SIZE = ("full", "probabilities", "allowed_rows", "forbidden_rows")  # fields of a batch
MIB = 2**20
# Thread pools, the allocator, autograd's nodes, and chunks that are a little too large.
SLACK = 32 * MIB
LIMIT = 4096 * MIB


def status(field: str) -> int:
    """VmRSS or VmHWM in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def measure(name: str, batch: int, positions: int, vocab: int, dim: int, max_bytes: int) -> None:
    """Print the peak and the bound of one snippet as JSON; this is the fresh process."""
    import torch

    import zoo.snippets  # noqa: F401
    from zoo.allocations import reduced
    from zoo.catalogue import SNIPPETS, Sizes, run

    torch.set_num_threads(1)
    # A snippet that goes wrong ends with an error, not with the memory of the machine.
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    entry, began = SNIPPETS[name], [0, 0.0]
    batches: list[Any] = []

    def measured(z: Any, x: Any) -> Any:
        for field in FULL_SIZE:
            if batches and field in vars(batches[0]):
                getattr(x, field)  # what the run on small sizes asked for
        batches.append(x)
        Path("/proc/self/clear_refs").write_text("5")
        began[:] = [status("VmRSS"), time.perf_counter()]
        return entry.function(z, x)

    watched = replace(entry, function=measured)
    run(watched, Sizes(4, 6, 101, 8), torch.float32, lazy=True, finish=reduced)  # loads everything
    sizes = Sizes(batch, positions, vocab, dim)
    done = run(watched, sizes, torch.float32, lazy=True, max_bytes=max_bytes, finish=reduced)
    peak, seconds = status("VmHWM") - began[0], time.perf_counter() - began[1]
    held = sum(t.nbytes for t in (*done.results, *done.gradients.values()))
    row = {"name": name, "peak": peak, "bound": max_bytes + held + SLACK, "seconds": seconds}
    print(json.dumps(row))


def in_fresh_process(name: str, *sizes: int) -> dict[str, Any]:
    """peak and bound in bytes, and seconds."""
    return _from_process("--measure", name, "--sizes", *map(str, sizes))[0]


def in_forks_of_a_fresh_process(names: list[str], *sizes: int) -> list[dict[str, Any]]:
    """The same of several snippets, for which torch is imported once."""
    return _from_process("--fork", *names, "--sizes", *map(str, sizes))


def _from_process(*arguments: str) -> list[dict[str, Any]]:
    """Every line of JSON that this file prints."""
    command = [sys.executable, __file__, *arguments]
    # glibc keeps freed blocks below 32 MiB for itself; what counts is what the program holds.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=1800, env=environment
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return [json.loads(line) for line in done.stdout.splitlines()]


def in_forked_process(name: str, *sizes: int) -> dict[str, Any]:
    """The same without the time to import torch; the parent must have run nothing large."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(writing, 1)
            measure(name, *sizes)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}".replace("\n", " "))
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(writing)
    with open(reading) as output:
        text = output.read()
    os.waitpid(child, 0)
    try:
        row: dict[str, Any] = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        raise RuntimeError(text or "ended without a result") from None
    return row


def every_snippet() -> list[str]:
    """Names of those that stream and make nothing large themselves; torch is loaded."""
    import torch

    import zoo.snippets  # noqa: F401
    from zoo.catalogue import SNIPPETS

    torch.set_num_threads(1)
    return [n for n, entry in SNIPPETS.items() if entry.builds is None and entry.large is None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=TEN)
    parser.add_argument("--all", action="store_true", help="every snippet that streams")
    parser.add_argument("--measure", metavar="NAME", help="run this snippet in this process")
    parser.add_argument("--fork", metavar="NAME", nargs="+", help="run each in a forked process")
    parser.add_argument(
        "--sizes",
        nargs=5,
        type=int,
        default=[8, 512, 131072, 64, 128 * MIB],
        metavar=("B", "T", "V", "D", "MAX_BYTES"),
    )
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, *options.sizes)
        return
    if options.fork:
        every_snippet()
        for name in options.fork:
            print(json.dumps(in_forked_process(name, *options.sizes)), flush=True)
        return
    failed = False
    run, names = in_fresh_process, options.names
    if options.all:
        run, names = in_forked_process, every_snippet()
        wanted = options.names if options.names != TEN else names
        names = [name for name in names if name in wanted]
    for name in names:
        try:
            row = run(name, *options.sizes)
        except RuntimeError as error:
            print(f"{name:40} failed: {str(error).splitlines()[-1]}", flush=True)
            failed = True
            continue
        failed |= row["peak"] > row["bound"]
        print(
            f"{name:40} peak {row['peak'] / MIB:8.0f} MiB, bound {row['bound'] / MIB:6.0f} MiB, "
            f"{row['seconds']:6.1f} s{'  TOO MUCH' * (row['peak'] > row['bound'])}",
            flush=True,
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
