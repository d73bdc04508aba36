"""Threads, forks, spawned processes, sub-interpreters, signals: right answers or clear errors."""

import os
import sys

import pytest

from scripts.reliability import processes

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")


@pytest.mark.timeout(2 * processes.SECONDS)
@pytest.mark.parametrize("name", processes.SCENARIOS)
def test_scenario(name: str) -> None:
    if name == "sub-interpreter" and sys.version_info >= (3, 13):
        pytest.skip("the module that makes sub-interpreters has another name from Python 3.13 on")
    output = processes.run(name)
    assert output.startswith("ok"), output
