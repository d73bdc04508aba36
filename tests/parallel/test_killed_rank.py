"""Killing a rank during a sweep ends the others with an error, not a hang; no process is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from preloaded_python import preloaded_python

SECONDS = 30  # time-out of the process group
WORK = f"""
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes
import lmhead

def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{{folder}}/store", rank=rank,
                            world_size=3, timeout=timedelta(seconds={SECONDS}))
    mesh = init_device_mesh("cpu", (3,))
    weight = distribute_tensor(torch.randn(3000, 16), mesh, [Shard(0)]).requires_grad_()
    hidden, targets = torch.randn(64, 16), torch.randint(3000, (64,))
    open(f"{{folder}}/{{rank}}.pid", "w").write(str(os.getpid()))
    try:
        while True:
            lmhead.linear_cross_entropy(hidden, weight, targets, max_bytes=4096).backward()
            open(f"{{folder}}/{{rank}}.swept", "a").write(".")
    except RuntimeError as error:
        open(f"{{folder}}/{{rank}}.error", "w").write(repr(error))
        raise

if __name__ == "__main__":
    processes = start_processes(work, (sys.argv[1],), nprocs=3, start_method="fork", join=False)
    for process in processes.processes:
        process.join()  # each by itself: nothing but the lost connection ends the others
    print([process.exitcode for process in processes.processes])
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_killing_a_rank_ends_the_others_with_an_error(tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(WORK)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [preloaded_python(), str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        swept = [tmp_path / f"{rank}.swept" for rank in range(3)]
        while not all(path.exists() for path in swept) and time.monotonic() < deadline:
            time.sleep(0.05)
        pids = [int((tmp_path / f"{rank}.pid").read_text()) for rank in range(3)]
        os.kill(pids[1], signal.SIGKILL)
        output, errors = process.communicate(timeout=SECONDS + 60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert "[1, -9, 1]" in output, (output, errors)
    for rank in (0, 2):
        assert "gloo" in (tmp_path / f"{rank}.error").read_text()  # a lost connection
    assert not any(map(alive, pids))
