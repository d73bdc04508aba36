"""5,000 calls with odd tensors in subprocesses: answers or Python exceptions, never a crash."""

import subprocess
from pathlib import Path

import pytest
from preloaded_python import preloaded_python


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seeds", "calls"), [("0,1,2", 3000), ("3,4", 2000)])
def test_no_call_crashes(seeds: str, calls: int, tmp_path: Path) -> None:
    last = tmp_path / "last_call.txt"
    script = Path(__file__).with_name("fuzz_calls.py")
    done = subprocess.run(
        [preloaded_python(), str(script), "1000", seeds, str(last)],
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    assert done.returncode == 0, (
        f"exit code {done.returncode} in {last.read_text().splitlines()[0]}\n{done.stderr[-3000:]}"
    )
    assert done.stdout.startswith(f"{calls} calls")
    assert "'answer'" in done.stdout
