"""Print the files of lmhead that a call passes through, in the order of first use.

python scripts/trace_calls.py               all calls
python scripts/trace_calls.py loss next     some of them
python scripts/trace_calls.py --check       exit code 1 if a call passes more files than its limit

Every call is made once before it is traced, so that imports and caches do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.nn.functional as F

import lmhead
from lmhead.cli import main as lmhead_command

PACKAGE = Path(lmhead.__file__).resolve().parent
V, D = 8192, 64

Call = Callable[[], object]


def _loss() -> Call:
    head, hidden = lmhead.LMHead(D, V), torch.randn(2, 64, D, requires_grad=True)
    targets = torch.randint(V, (2 * 64,))
    return lambda: torch.autograd.backward(F.cross_entropy(head(hidden).view(-1, V), targets))


def _sampler() -> Call:
    head, hidden = lmhead.LMHead(D, V), torch.randn(8, D)
    sampler = lmhead.Sampler(temperature=0.8, top_p=0.9, seed=0)
    return torch.no_grad()(lambda: sampler(head(hidden)))


def _screened_argmax() -> Call:
    screened, hidden = lmhead.ScreenedHead(lmhead.LMHead(D, V)), torch.randn(1, D)
    return torch.no_grad()(lambda: screened.argmax(hidden))


def _next() -> Call:
    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            lmhead_command.main(["next", "tiny", "I love"], standalone_mode=False)

    return run


class Traced(NamedTuple):
    """What is written, how the call is made, and the largest number of files it should pass."""

    code: str
    make: Callable[[], Call]
    limit: int


CALLS = {
    "loss": Traced("F.cross_entropy(head(h).view(-1, V), y).backward()", _loss, 15),
    "sampler": Traced("Sampler(temperature=0.8, top_p=0.9)(head(h)), 8 rows", _sampler, 12),
    "screened-argmax": Traced("ScreenedHead(head).argmax(h)", _screened_argmax, 8),
    "next": Traced('lmhead next tiny "I love"', _next, 25),
}


def trace(call: Call) -> Counter[str]:
    """Return the number of function calls by file of the package, in the order of first use."""
    call()
    found: Counter[str] = Counter()

    def record(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found[frame.f_code.co_filename] += 1

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    inside = ((Path(file), count) for file, count in found.items())
    return Counter(
        {
            file.relative_to(PACKAGE).as_posix(): count
            for file, count in inside
            if file.is_relative_to(PACKAGE)
        }
    )


def main() -> int:
    """Trace the named calls and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(CALLS)}")
    parser.add_argument("--check", action="store_true", help="exit code 1 above a limit")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in CALLS]
    if unknown:
        parser.error(f"NAME must be one of {', '.join(CALLS)}; got {unknown[0]!r}")
    above = []
    for name in given.names or CALLS:
        traced = CALLS[name]
        files = trace(traced.make())
        above += [name] if len(files) > traced.limit else []
        print(f"{name}: {traced.code}")
        print(f"{len(files)} files (limit {traced.limit}), {files.total()} function calls")
        for number, (file, count) in enumerate(files.items(), 1):
            print(f"{number:4d}  {file:36s} {count:5d}")
        print()
    if given.check and above:
        print(f"above the limit: {', '.join(above)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
