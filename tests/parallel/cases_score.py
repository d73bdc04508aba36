"""`lmhead score` on several ranks: the numbers, rows and report of one process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import click
import pytest
import torch.distributed as dist

from lmhead.cli.cmd_score import command
from lmhead.errors import ModelError
from parallel.ranks import case

TEXTS = {
    "long.txt": "It was the best of times, it was the worst of times. " * 30,
    "short.txt": "One day.",
    "empty.txt": "",
    "third.txt": "The cat sat on the mat and the dog ran. " * 9,
}


def run(*arguments: str, ranks: bool) -> str:
    """Return the output of the command in this process; "" on ranks other than 0."""
    environment = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    os.environ.update(environment if ranks else {"RANK": "0", "WORLD_SIZE": "1"})
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(io.StringIO()):
        command.main([*arguments, "--window", "32", "--stride", "16"], standalone_mode=False)
    return written.getvalue()


@case(3)
def score_on_ranks() -> None:
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    folder, first = Path(str(box[0])), dist.get_rank() == 0
    if first:
        for name, text in TEXTS.items():
            (folder / name).write_text(text)
    dist.barrier()
    files = [str(folder / name) for name in TEXTS]
    out = str(folder / f"rows{dist.get_world_size()}.jsonl")
    asked: dict[str, list[str]] = {
        "one file": ["tiny", files[0], "--json", "--tokens"],
        "table": ["tiny", files[0]],
        "text": ["tiny", "--text", TEXTS["third.txt"]],
        "files": ["tiny", *files, "--json"],
        "table of files": ["tiny", *files],
        "rows": ["tiny", *files, "--out", out, "--top-k", "2", "--json"],
    }
    for name, arguments in asked.items():
        together = run(*arguments, ranks=True)
        assert (together != "") == first, (name, together)
        if not first:
            continue
        rows = Path(out).read_bytes() if name == "rows" else b""
        Path(out).unlink(missing_ok=True)
        assert together == run(*arguments, ranks=False), name
        if name == "rows":
            assert rows == Path(out).read_bytes()
            assert rows.count(b"\n") == json.loads(together)["scored_tokens"] > 200
    dist.barrier()
    broken = str(folder / "broken.txt")
    Path(broken).write_bytes(b"some text \xff")
    wrong: Any = (
        pytest.raises((click.ClickException, ModelError)) if first else contextlib.nullcontext()
    )
    for arguments in (["tiny", broken], ["tiny", str(folder / "none.txt")], ["no-model", files[0]]):
        with wrong:
            run(*arguments, ranks=True)  # the others end as well
    dist.barrier()
