"""`torchrun -m lmhead score`: one document, with the numbers of one process."""

import json
import os
import subprocess
from pathlib import Path

from preloaded_python import preloaded_python

import lmhead
from lmhead.analysis import score


def test_one_report_of_standard_input(tmp_path: Path) -> None:
    text = "It was the best of times, it was the worst of times. " * 40
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [preloaded_python(), *torchrun, "-m", "lmhead", "score", "tiny", "-", "--json"],
        input=text,
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": preloaded_python()},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # a second document would not parse
    expected = score(lmhead.open_model("tiny"), text).to_json()
    assert {name: found[name] for name in expected} == expected
