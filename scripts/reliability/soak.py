"""Generate, score, train and serve in turn for a long time; record memory, handles and threads.

    python -m scripts.reliability.soak --minutes 60 [--write]

One process generates, scores and trains in turn, another serves and is asked all the time. Their
resident memory, open file handles and threads are read once per round. The summary compares the
median of the last third with that of the second: the first is warming up. `--write` keeps the
summary in docs/reliability.json and draws docs/images/soak.svg. SIGTERM ends it early.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

from scripts.reliability.record import RESULTS, keep

TEXT = "Once upon a time there was a cat that could count to ten. " * 20
TRAIN = (
    "--tokenizer characters --layers 1 --heads 2 --width 16 --block 8 --batch 3 --steps 12 "
    "--no-curve --threads 1 --save-every 5"
)

LABELS = {"megabytes": "MB"}  # short, so that it does not touch the numbers


class Sample(NamedTuple):
    """The resources of a process at a time."""

    seconds: float
    megabytes: float
    handles: int
    threads: int


def sample(pid: int, begin: float) -> Sample:
    """Read /proc."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]
    threads = int(re.search(r"Threads:\s+(\d+)", status)[1])  # type: ignore[index]
    handles = len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(time.monotonic() - begin, resident, handles, threads)


def run_command(arguments: list[str]) -> None:
    """Run a command of lmhead in this process."""
    from lmhead.cli import main

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main(arguments, standalone_mode=False)
        except SystemExit as end:
            if end.code not in (0, None):
                raise


def worker(folder: Path) -> None:
    """Run rounds until standard input is closed; print a line after each."""
    text = folder / "text.txt"
    text.write_text(TEXT)
    for number in range(10**9):
        run_command(["generate", "Once upon a time", "-n", "20", "--seed", str(number)])
        run_command(["score", str(text)])
        run_command(["train", str(text), "--out", str(folder / f"run{number}"), *TRAIN.split()])
        subprocess.run(["rm", "-rf", str(folder / f"run{number}")], check=True)
        print(number, flush=True)
        if not sys.stdin.readline():
            return


def ask(port: int, number: int) -> None:
    """Ask the server for a completion."""
    body = {"prompt": "Once upon", "max_tokens": 8, "seed": number, "logprobs": 2, "echo": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        assert json.loads(answer.read())["choices"]


def soak(minutes: float, folder: Path, log: Path | None) -> tuple[dict[str, list[Sample]], int]:
    """Return the samples of both processes, and how often the server was asked."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    serve = [sys.executable, "-m", "lmhead", "serve", "--port", "0"]
    work = [sys.executable, "-m", "scripts.reliability.soak", "--worker", str(folder)]
    server = subprocess.Popen(
        serve, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    runner = subprocess.Popen(
        work, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert server.stdout is not None
    assert runner.stdout is not None
    assert runner.stdin is not None
    port = 0
    while not port:
        line = server.stdout.readline()
        if not line:
            raise SystemExit("the server did not start")
        found = re.search(r"127\.0\.0\.1:(\d+)", line)
        port = int(found[1]) if found else 0
    threading.Thread(target=server.stdout.read, daemon=True).start()
    begin, asked, stopped = time.monotonic(), 0, threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())  # summarise what there is
    samples: dict[str, list[Sample]] = {"generate, score, train": [], "serve": []}
    try:
        while time.monotonic() - begin < 60 * minutes and not stopped.is_set():
            if not runner.stdout.readline():
                raise SystemExit("the worker has ended")
            for _ in range(5):
                ask(port, asked)
                asked += 1
            samples["generate, score, train"].append(sample(runner.pid, begin))
            samples["serve"].append(sample(server.pid, begin))
            if log is not None:
                last = {name: part[-1] for name, part in samples.items()}
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(last) + "\n")
            runner.stdin.write("\n")
            runner.stdin.flush()
    finally:
        for process in (runner, server):
            process.terminate()
            process.wait()
    return samples, asked


def flat(samples: list[Sample]) -> dict[str, float]:
    """Return medians of the second and the last third."""
    third = len(samples) // 3
    parts = {"second_third": samples[third : 2 * third], "last_third": samples[2 * third :]}
    return {
        f"{field}_{name}": round(statistics.median(getattr(s, field) for s in part), 1)
        for field in ("megabytes", "handles", "threads")
        for name, part in parts.items()
    }


def draw(samples: dict[str, list[Sample]], path: Path) -> None:
    """Draw resident memory, handles and threads over time, as SVG."""
    colours = {"generate, score, train": "#00695c", "serve": "#c2185b"}
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 330" '
        'font-family="sans-serif" font-size="11">'
    ]
    end = max(s.seconds for part in samples.values() for s in part)
    for place, field in enumerate(("megabytes", "handles", "threads")):
        top, height = 20 + 100 * place, 70
        most = 1.1 * max(getattr(s, field) for part in samples.values() for s in part)
        lines.append(f'<text x="8" y="{top + 10}" fill="#555">{LABELS.get(field, field)}</text>')
        lines.append(f'<text x="95" y="{top + 10}" text-anchor="end" fill="#555">{most:.0f}</text>')
        lines.append(f'<text x="95" y="{top + height}" text-anchor="end" fill="#555">0</text>')
        lines.append(f'<path d="M100 {top}V{top + height}H700" fill="none" stroke="#999"/>')
        for name, part in samples.items():
            places = [(s.seconds / end, getattr(s, field) / most) for s in part]
            points = " ".join(
                f"{100 + 600 * x:.1f},{top + height * (1 - y):.1f}" for x, y in places
            )
            lines.append(f'<polyline points="{points}" fill="none" stroke="{colours[name]}"/>')
    lines.append(
        f'<text x="700" y="305" text-anchor="end" fill="#555">{end / 60:.0f} minutes</text>'
    )
    for place, (name, colour) in enumerate(colours.items()):
        lines.append(f'<text x="{100 + 200 * place}" y="322" fill="{colour}">{name}</text>')
    path.write_text("\n".join([*lines, "</svg>"]) + "\n", encoding="utf-8")


def main() -> int:
    """Return 1 if memory grew by more than 5 % or a handle or thread was leaked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--log", type=Path, help="add every sample to this file")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        worker(given.worker)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        samples, asked = soak(given.minutes, Path(folder), given.log)
    summary = {
        "minutes": round(samples["serve"][-1].seconds / 60, 1),
        "rounds": len(samples["serve"]),
        "requests": asked,
        **{name: flat(part) for name, part in samples.items()},
    }
    keep("soak", summary, write=given.write)
    if given.write:
        draw(samples, RESULTS.parent / "images" / "soak.svg")
    return int(
        any(
            flat(part)["megabytes_last_third"] > 1.05 * flat(part)["megabytes_second_third"] + 5
            or flat(part)["handles_last_third"] > flat(part)["handles_second_third"] + 1
            or flat(part)["threads_last_third"] > flat(part)["threads_second_third"] + 1
            for part in samples.values()
        )
    )


if __name__ == "__main__":
    sys.exit(main())
