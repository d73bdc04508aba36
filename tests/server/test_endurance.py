"""Two hundred clients at once, good and bad: no crash, no leak, the right status for everyone.

`LMHEAD_SERVE_SECONDS=60 pytest -s tests/server/test_endurance.py` is the full minute, and prints
what it saw; the default is a few seconds.
"""

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.crowd import KINDS, Crowd

SECONDS = float(os.environ.get("LMHEAD_SERVE_SECONDS", "4"))
CLIENTS = 200
REST = 6.0  # seconds after which connections that are kept alive have ended, and all jobs

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="memory and open files are read from /proc"
)


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`lmhead explore tiny` in a process of its own, and its port."""
    code = "from lmhead.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "explore", "tiny", "--no-browser", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline().strip().rstrip("/").split(":")[-1])
    finally:
        process.kill()
        process.communicate(timeout=20)


def footprint(process: subprocess.Popen[str]) -> tuple[float, int, int]:
    """Resident megabytes, open files, threads."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = dict(line.split(":", 1) for line in status.splitlines())
    files = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
    return int(found["VmRSS"].split()[0]) / 1024, files, int(found["Threads"])


def test_a_crowd_leaves_the_server_as_it_was(
    server: tuple[subprocess.Popen[str], int],
) -> None:
    process, port = server
    # What is made once is made now; in a short time some requests only get 429.
    memory, before = footprint(process)[0], 0.0
    for _ in range(5):
        Crowd(port, "tiny").run(CLIENTS, 2.0)
        before, memory = memory, footprint(process)[0]
        if memory < before + 5:
            break
    time.sleep(REST)
    memory, files, threads = footprint(process)
    # A leak grows with each crowd; what was not made in the first seconds grows once.
    for _ in range(3):
        crowd = Crowd(port, "tiny")
        began = time.monotonic()
        crowd.run(CLIENTS, SECONDS)
        took = time.monotonic() - began
        until = time.monotonic() + REST
        before, later = memory, footprint(process)
        while time.monotonic() < until and (later[1] > files or later[2] > threads):
            time.sleep(0.2)
            later = footprint(process)
        print(_summary(crowd, took, (before, files, threads), later))
        memory = later[0]
        if memory < before + 30:
            break
    assert process.poll() is None
    assert not crowd.wrong
    assert {kind for kind, _ in crowd.seen} == {kind.name for kind in KINDS}
    # Which of the many requests is answered and which gets 429 is chance.
    assert sum(crowd.seen[kind, 200] for kind in ("next", "slow", "paths")) > 0
    assert sum(crowd.seen[kind, 200] for kind in ("completion", "echo", "guided", "stream")) > 0
    assert later[1] <= files
    assert later[2] <= threads
    assert memory < before + 30
    answer = httpx.post(
        f"http://127.0.0.1:{port}/api/next", json={"model": "tiny", "prompt": "In the"}, timeout=10
    )
    assert answer.status_code == 200
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    message = "a client's mistake is no line of the log"
    lines = [line for line in errors.splitlines() if not line.startswith("Opening ")]
    assert " ".join(lines).split() == ["Press", "Ctrl-C", "to", "stop.", "Interrupted."], message


def _summary(crowd: Crowd, took: float, *prints: tuple[float, int, int]) -> str:
    """What happened, as a table."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    for (kind, status), count in sorted(crowd.seen.items()):
        by_kind[kind].append(f"{status or 'left'} x {count:,}")
    total = sum(crowd.seen.values())
    lines = [f"{total:,} clients in {took:.1f} s, {CLIENTS} at once, {total / took:,.0f} a second"]
    for kind, seen in by_kind.items():
        lines.append(f"  {kind:16} {', '.join(seen)}; slowest {crowd.slowest[kind]:.2f} s")
    for name, (memory, files, threads) in zip(("before", "after"), prints, strict=True):
        lines.append(f"  {name:7} {memory:.1f} MB, {files} open files, {threads} threads")
    return "\n" + "\n".join([*lines, *(f"  WRONG {w} x {n}" for w, n in crowd.wrong.items())])
