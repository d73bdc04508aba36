"""The contract of all implementations (tests/contract) on the ranks of one process group."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel.ranks import case

CONTRACT = Path(__file__).parent.parent / "contract"
FILES = ("test_answers.py", "test_corners.py", "test_gradients.py", "test_ignored_rows.py")
MORE = ("test_masked_tokens.py", "test_precision.py")


@case(3)  # uneven slices; the cases of other files run on 1, 2 and 4 ranks as well
def contract() -> None:
    files = [str(CONTRACT / name) for name in (*FILES, *MORE)]
    options = ["-q", "-x", "-p", "no:cacheprovider", "-k", "sharded and not tiles"]
    options += ["--assert=plain"]  # rewriting the assertions takes a quarter of the time
    assert pytest.main([*options, *files]) == 0
