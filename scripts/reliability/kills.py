"""Kill training runs at random moments and compare their results with an undisturbed run.

    PYTHONPATH=tests python -m scripts.reliability.kills --kills 50 [--write]

Each run is a forked process that executes `lmhead train`, or two of them, the ranks of a
data-parallel run. One process is killed with SIGKILL at a random moment, before or after new
checkpoints; then the run is resumed. In the end weights, optimizer state, tokenizer
and log must be those of a run that nothing has disturbed, byte for byte (times apart).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from train.runs import SMALL, corpus, fingerprint, history, latest

from lmhead.cli import main as lmhead
from scripts.reliability.record import keep

LAUNCHER = 10.0  # seconds for the other rank to notice by itself
PATIENCE = 240.0  # seconds until a process that does not end counts as hanging


def options(steps: int) -> list[str]:
    """Return the settings of a run as options."""
    settings = SMALL | {"steps": steps, "save_every": 5, "eval_every": 20, "log_every": 10}
    arguments: list[str] = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        else:
            arguments += [f"--{option}", str(value)]
    return arguments


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def start(arguments: list[str], ranks: int, log: Path) -> list[int]:
    """Start `lmhead train` in forked processes, one per rank; return their ids."""
    port, pids = str(free_port()), []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if ranks > 1:
                    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    os.environ |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
                    os.environ["MASTER_PORT"] = port
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                for stream in (1, 2):
                    os.dup2(output, stream)
                lmhead(["train", *arguments])
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def wait(pids: list[int]) -> list[int]:
    """Return the exit codes; those that hang are killed and an error says so.

    A rank that waits for one that was killed before they were connected is sent SIGTERM, as
    torchrun does at once.
    """
    end, codes = time.monotonic() + PATIENCE, dict.fromkeys(pids, -1)
    running, first_end = set(pids), None
    while running and time.monotonic() < end:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
                running.discard(pid)
                first_end = time.monotonic()
        if running and first_end is not None and time.monotonic() - first_end > LAUNCHER:
            for pid in running:
                os.kill(pid, signal.SIGTERM)
            first_end = None
        time.sleep(0.01)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if running:
        raise SystemExit(f"{len(running)} processes did not end within {PATIENCE:.0f} s")
    return [codes[pid] for pid in pids]


def steps_written(out: Path) -> int:
    """Return the step of the last checkpoint, 0 before the first."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(latest(out).name.removeprefix("step-"))
    return 0


def wait_for_checkpoints(out: Path, step: int) -> None:
    """Return when a run has reached a step, or cannot reach it."""
    end = time.monotonic() + PATIENCE / 4
    while steps_written(out) < step and time.monotonic() < end:
        time.sleep(0.005)


def kill_often(folder: Path, kills: int, ranks: int, draw: random.Random) -> dict[str, Any]:
    """Return the result of a run that was killed `kills` times."""
    steps = 40 + 20 * kills
    arguments = [corpus(folder), *options(steps)]
    undisturbed, out, log = folder / "whole", folder / "killed", folder / "log"
    if any(wait(start([*arguments, "--out", str(undisturbed)], ranks, log))):
        raise SystemExit(f"the undisturbed run failed: {log.read_text()}")
    counts = Counter[str]()
    while counts["kills"] < kills:
        begun = (out / "config.toml").exists()
        before = steps_written(out)
        given = ["--resume", str(out)] if begun else [*arguments, "--out", str(out)]
        pids = start(given, ranks, log)
        wait_for_checkpoints(out, before + 5 * draw.choice([0, 1, 2, 3]))
        time.sleep(draw.uniform(0.0, 0.5))
        with contextlib.suppress(ProcessLookupError):
            os.kill(draw.choice(pids), signal.SIGKILL)
        codes = wait(pids)
        counts["kills"] += -signal.SIGKILL in codes
        if ranks > 1:
            alone = any(code > 0 and code != 128 + signal.SIGTERM for code in codes)
            counts["other rank noticed" if alone else "launcher ended the other rank"] += 1
        counts["after a checkpoint" if steps_written(out) > before else "before one"] += 1
        if all(code == 0 for code in codes):
            raise SystemExit(f"the run ended after {counts['kills']} kills: more steps are needed")
    if any(wait(start(["--resume", str(out)], ranks, log))):
        raise SystemExit(f"the last resume failed: {log.read_text()[-2000:]}")
    same = fingerprint(latest(out)) == fingerprint(latest(undisturbed))
    return {
        **dict(counts),
        "steps": steps,
        "weights_equal": same and latest(out).name == latest(undisturbed).name,
        "log_equal": history(out) == history(undisturbed),
    }


def main() -> int:
    """Return 1 if a run ended with other weights or another log."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    summary: dict[str, Any] = {}
    for ranks in options.ranks:
        name = "single process" if ranks == 1 else "two ranks"
        with tempfile.TemporaryDirectory() as folder:
            draw = random.Random(options.seed)
            summary[name] = kill_often(Path(folder), options.kills, ranks, draw)
        print(name, summary[name], file=sys.stderr, flush=True)
    keep("kills", summary, write=options.write)
    good = all(one["weights_equal"] and one["log_equal"] for one in summary.values())
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
