"""Time two source trees of lmhead against each other, in turns: `compare_revisions.py OLD NEW`.

OLD and NEW are folders of the repository, each with its compiled core in `src/lmhead`. A round
times both, every second round in the other order; the results must agree. CPU time, so that other
work on the machine matters less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import process_time
from typing import IO, Any

TASKS = (
    "loss",
    "loss through lazy logits",
    "loss, grad_filter=0.02",
    "query of five",
    "argmax of one row",
    "sample one row, top-p",
    "screened argmax",
)


def _task(name: str) -> Any:
    import torch
    import torch.nn.functional as F

    import lmhead

    torch.manual_seed(0)
    rows = 512 if "loss" in name or "query" in name else 1
    hidden = torch.randn(rows, 576)
    head = lmhead.LMHead(576, 49152)
    with torch.no_grad():
        head.weight.copy_(torch.randn(49152, 576) * 0.15)
    targets = torch.randint(49152, (rows,))
    weight = head.weight

    def loss(**options: Any) -> float:
        leaf = hidden.clone().requires_grad_()
        weight.grad = None
        if options.pop("lazy", False):
            value = F.cross_entropy(head(leaf), targets)
        else:
            value = lmhead.linear_cross_entropy(leaf, weight, targets, **options)
        value.backward()
        return float(value.detach())

    if name == "loss":
        return loss
    if name == "loss through lazy logits":
        return lambda: loss(lazy=True)
    if name == "loss, grad_filter=0.02":
        return lambda: loss(grad_filter=0.02)
    torch.set_grad_enabled(False)
    if name == "query of five":

        def query() -> float:
            answers = lmhead.query(
                hidden, weight, log_prob=targets, rank=targets, entropy=True, argmax=True, top_k=20
            )
            return float(answers.log_prob.mean()) + float(answers.argmax.sum())

        return query
    if name == "argmax of one row":
        return lambda: float(head(hidden).argmax(-1).sum())
    if name == "sample one row, top-p":
        sampler = lmhead.Sampler(temperature=0.8, top_p=0.9, seed=0)
        logits = torch.randn(1, 262144) * 3
        return lambda: float(sampler(logits).token.sum())
    screened = lmhead.ScreenedHead(head)
    return lambda: float(getattr(found := screened.argmax(hidden), "token", found).sum())


def _worker(src: str) -> None:
    """Answer task names on standard input with a value and seconds per call."""
    # The finder of an editable installation comes before the path.
    sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]
    sys.path.insert(0, src)
    import lmhead

    if not Path(lmhead.__file__).is_relative_to(src):
        raise RuntimeError(f"lmhead must come from {src}; got {lmhead.__file__}")
    tasks: dict[str, Any] = {}
    for line in sys.stdin:
        name = json.loads(line)
        if name not in tasks:
            tasks[name] = _task(name)
            tasks[name]()
        call = tasks[name]
        value, calls, start = call(), 0, process_time()
        while calls == 0 or process_time() - start < 0.2:
            call()
            calls += 1
        print(json.dumps([value, (process_time() - start) / calls]), flush=True)


class _Tree:
    """A process that runs tasks on the sources of one tree."""

    def __init__(self, place: Path, threads: int) -> None:
        src = str((place / "src").resolve())
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent),
            "OMP_NUM_THREADS": str(threads),
        }
        code = "import sys, compare_revisions as c; c._worker(sys.argv[1])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, src],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def time(self, name: str) -> tuple[float, float]:
        """Return the value of a task and its seconds."""
        given, answers = self.process.stdin, self.process.stdout
        if given is None or answers is None:
            raise RuntimeError("the worker has no streams")
        _write(given, json.dumps(name))
        value, seconds = json.loads(answers.readline())
        return value, seconds


def _write(stream: IO[str], line: str) -> None:
    stream.write(line + "\n")
    stream.flush()


def main() -> None:
    """Print the ratio of new to old for every task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    old, new = _Tree(options.old, options.threads), _Tree(options.new, options.threads)
    print(f"{'task':28}{'old ms':>10}{'new ms':>10}{'new / old':>11}")
    for name in TASKS:
        times: dict[_Tree, list[float]] = {old: [], new: []}
        for r in range(options.rounds):
            values = {}
            for tree in (old, new) if r % 2 == 0 else (new, old):
                values[tree], seconds = tree.time(name)
                times[tree].append(seconds)
            if abs(values[old] - values[new]) > 1e-5 * (1 + abs(values[old])):
                raise SystemExit(f"{name}: results differ: {values[old]} and {values[new]}")
        ratio = median(b / a for a, b in zip(times[old], times[new], strict=True))
        best = [min(times[tree]) * 1e3 for tree in (old, new)]
        print(f"{name:28}{best[0]:10.2f}{best[1]:10.2f}{ratio:11.3f}", flush=True)


if __name__ == "__main__":
    main()
