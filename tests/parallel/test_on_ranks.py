"""All cases on 1 to 4 ranks, started together: see ranks.py and cases_*.py."""

import fcntl
import os
from pathlib import Path

import pytest

from parallel import ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the cases have left how they ended; the processes of pytest-xdist share one launch."""
    base = tmp_path_factory.getbasetemp()
    made = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "on-ranks"
    made.mkdir(exist_ok=True)
    with (made / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "said").exists():
            ranks.launch(made)
    return made


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "world"), ranks.names())
def test_on_ranks(folder: Path, name: str, world: int) -> None:
    assert ranks.outcome(folder, name, world) == ""
