"""A folder that is filled once, even if pytest-xdist splits a module between processes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

try:
    import fcntl
except ImportError:  # not on Windows: no lock
    fcntl = None  # type: ignore[assignment]


def session_folder(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]
) -> Path:
    """Return a folder of this test session; the first process fills it, others wait for it."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / name, shared / f"{name}.done"
    with (shared / f"{name}.lock").open("w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir()
            try:
                make(folder)
            finally:
                done.touch()
    return folder
