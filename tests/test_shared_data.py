"""Tests that need data files say which, and which variable names their folder."""

import os
import subprocess
import sys
from pathlib import Path

import shared_data


def test_a_missing_file_is_named_in_the_reason() -> None:
    mark = shared_data.needs(shared_data.FOLDER / "nothing" / "here.txt").mark
    assert mark.args == (True,)
    assert mark.kwargs["reason"] == "set LMHEAD_DATA to a folder with nothing/here.txt"


def test_the_variable_names_the_folder(tmp_path: Path) -> None:
    file = tmp_path / "wikitext-2" / "test.txt"
    file.parent.mkdir()
    file.write_text("text", encoding="utf-8")
    code = "import shared_data as d; print(d.WIKITEXT_TEST, d.needs(d.WIKITEXT_TEST).mark.args[0])"
    environment = {
        **os.environ,
        "LMHEAD_DATA": str(tmp_path),
        "PYTHONPATH": os.path.dirname(__file__),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == [str(file), "False"]
