"""Threads, forks, spawned processes, sub-interpreters, signals: right answers or clear errors."""

import os
import sys

import pytest
from preloaded_python import preloaded_python

from scripts.reliability import processes

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")


@pytest.mark.timeout(2 * processes.SECONDS)
@pytest.mark.parametrize("name", processes.SCENARIOS)
def test_scenario(name: str) -> None:
    if name == "sub-interpreter" and sys.version_info >= (3, 13):
        pytest.skip("the module that makes sub-interpreters has another name from Python 3.13 on")
    about_processes = any(kind in name for kind in ("fork", "spawn", "sub-interpreter"))
    output = processes.run(name, sys.executable if about_processes else preloaded_python())
    assert output.startswith("ok"), output
