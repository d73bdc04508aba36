"""Crash at the n-th file operation, then resume; for `test_kill.py`, which starts this program.

    python crashes.py FOLDER all | N

The process ends, as by kill -9 without any cleanup, before its n-th fsync, rename, unlink, mkdir or
write of tensors; the latter with half of a file written. Then the run is resumed to its end, and
must have the bytes of an uninterrupted run. `all` tries every n, a number that many, spread evenly.
It forks, so that torch is loaded once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch

from lmhead.train import resume, run_files, train
from train.runs import fingerprint, history, latest, quiet, small

CRASHED = 77


class Crash:
    """Counts file operations and ends the process at one of them."""

    def __init__(self, end: int | None) -> None:
        self.now, self.end = 0, end
        for name in ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir"):
            setattr(os, name, self.ticking(getattr(os, name)))
        vars(run_files)["save_file"] = self.tearing

    def tick(self) -> bool:
        self.now += 1
        return self.now == self.end

    def ticking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.tick():
                os._exit(CRASHED)
            return function(*arguments, **options)

        return call

    def tearing(self, tensors: dict[str, Any], path: Path) -> None:
        if self.tick():
            content = safetensors.torch.save(tensors)
            path.write_bytes(content[: len(content) // 2])
            os._exit(CRASHED)
        safetensors.torch.save_file(tensors, path)


def forked(work: Callable[[], int]) -> int:
    """Run it in a forked process; return the exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(folder: Path, out: Path, end: int | None) -> int:
    crash = Crash(end)
    if (out / "config.toml").exists():
        resume(out, progress=quiet())
    else:
        train(small(folder, steps=7, eval_every=2, keep=1), out, progress=quiet())
    (folder / "operations").write_text(str(crash.now))
    return 0


def main(folder: Path, tries: str) -> None:
    # Import once, for all forks, what is imported on first use.
    train(small(folder, steps=2), folder / "warm", progress=quiet())
    whole = folder / "whole"
    assert forked(lambda: run(folder, whole, None)) == 0
    operations = int((folder / "operations").read_text())
    number = operations if tries == "all" else int(tries)
    ends = sorted({1 + i * operations // number for i in range(number)})
    expected = latest(whole)
    for end in ends:
        out = folder / f"run-{end}"
        code = forked(lambda out=out, end=end: run(folder, out, end))  # type: ignore[misc]
        assert code == CRASHED, f"{end}: ended with {code}"
        assert forked(lambda out=out: run(folder, out, None)) == 0, end  # type: ignore[misc]
        last = latest(out)
        assert last.name == expected.name
        assert fingerprint(last) == fingerprint(expected), end
        assert history(out) == history(whole), end
        assert not list(out.rglob(".*-part")), end
        assert {p.name for p in (out / "checkpoints").iterdir()} == {
            p.name for p in (whole / "checkpoints").iterdir()
        }, end
    print(f"crashed {len(ends)} times at {operations} operations")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
