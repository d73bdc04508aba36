"""`scripts/trace_calls.py`: the files that a call passes through."""

import re
import subprocess
import sys
from itertools import count

import pytest

from lmhead import checks
from scripts import trace_calls


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["trace_calls.py", *arguments])
    return trace_calls.main()


def test_all_calls_are_traced() -> None:
    """In a process of its own: a call also passes the support of FSDP where that was imported."""
    made = subprocess.run(
        [sys.executable, trace_calls.__file__, "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    blocks = made.stdout.strip().split("\n\n")
    assert [block.split(":")[0] for block in blocks] == list(trace_calls.CALLS)
    passed = {"loss": "head.py", "sampler": "sampling/sampler.py", "next": "cli/cmd_next.py"}
    for block in blocks:
        name, count, *rows = block.splitlines()
        files = [row.split()[1] for row in rows]
        assert count.startswith(f"{len(files)} files (limit ")
        assert passed.get(name.split(":")[0], files[0]) in files
        assert len(set(files)) == len(files)
        for file in files:
            assert (trace_calls.PACKAGE / file).is_file()


def test_only_files_of_the_package_count_and_only_in_the_call() -> None:
    calls = count()

    def call() -> object:
        next(calls)
        checks.check_integer("n", 3, low=1)
        return re.compile("x")

    assert trace_calls.trace(call) == {"checks.py": 1}
    assert next(calls) == 2, "the first call warms up"


@pytest.mark.parametrize(("limit", "code"), [(0, 1), (1000, 0)])
def test_check(limit: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = trace_calls.CALLS["screened-argmax"]._replace(limit=limit)
    monkeypatch.setitem(trace_calls.CALLS, "screened-argmax", traced)
    assert run(monkeypatch, "screened-argmax", "--check") == code


def test_an_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "nothing")
