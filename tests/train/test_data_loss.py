"""No command deletes or overwrites a file that lmhead did not write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from bench.running import TINY
from click.testing import CliRunner

from lmhead.cli import main
from lmhead.models.checkpoint import steps_of
from lmhead.train import TrainError, export, resume, train
from train.runs import TEXT, quiet, small

# Every name that a run writes, and a few that look like its temporary or lock files.
NAMES = [
    "data/book.txt",
    "data/train.bin",
    "data/tokens.json",
    "checkpoints/step-00000001/config.json",
    "checkpoints/step-00000001/notes.txt",
    "config.toml",
    "log.jsonl",
    "loss.png",
    "standard_input.txt",
    "model.safetensors",
    ".lock",
    ".data.part/thesis.txt",
    ".probe.part",
    "notes.txt",
]
# Options that name something to write. A new one needs a test here, or in the list of those that
# are only read.
WRITES = {
    "train --out",
    "score --out",
    "bench --out",
    "bench --work",
    "eval --output",
    "eval --cache",
    "distill-cache --out",
}
READS = {
    "train --corpus",
    "train --resume",
    "train --file",
    "translate --run",
    "translate --pairs",
    "explore --run",
    "bench --data",
    "bench --folder",
    "bench --text",
}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def fill(folder: Path, names: list[str]) -> dict[str, bytes]:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEXT if name.endswith("book.txt") else "irreplaceable", encoding="utf-8")
    return contents(folder)


def paths_of(command: click.Command, name: str) -> Iterator[str]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None
            yield from paths_of(found, name or inner)
    for parameter in command.params:
        if isinstance(parameter.type, click.Path | click.File):
            yield f"{name} --{parameter.name}"


def test_every_option_that_names_a_path_is_known() -> None:
    assert set(paths_of(main, "")) <= WRITES | READS


@pytest.mark.parametrize(
    "arguments",
    [
        ["distill-cache", "tiny", "BOOK", "--out", "KEPT"],
        ["eval", "tiny", "--tasks", "BOOK", "--output", "KEPT"],
    ],
)
def test_an_existing_file_is_not_overwritten(tmp_path: Path, arguments: list[str]) -> None:
    before = fill(tmp_path, ["book.txt", "kept"])
    names = {"BOOK": str(tmp_path / "book.txt"), "KEPT": str(tmp_path / "kept")}
    result = CliRunner().invoke(main, [names.get(a, a) for a in arguments])
    assert result.exit_code == 2, result.output
    assert "exists; choose another" in result.output
    assert contents(tmp_path) == before


def test_train_refuses_a_folder_of_other_files(tmp_path: Path) -> None:
    """The command that once deleted the user's `data` folder, corpus included."""
    before = fill(tmp_path, NAMES)
    book = str(tmp_path / "data" / "book.txt")
    for options in (["--out", str(tmp_path)], ["--out", str(tmp_path), "--tokenizer", "words"]):
        result = CliRunner().invoke(main, ["train", book, *options])
        assert result.exit_code == 1, result.output
        assert contents(tmp_path) == before


@pytest.mark.parametrize("name", NAMES)
def test_train_refuses_a_folder_with_any_other_file(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    before = fill(out, [name])
    with pytest.raises(TrainError, match=r"is not empty and is not a training run|there is a run"):
        train(small(tmp_path), out, progress=quiet())
    assert contents(out) == before
    with pytest.raises(ValueError, match="there is no run in"):
        resume(out, progress=quiet())
    assert contents(out) == before


def test_an_empty_folder_is_fine(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert train(small(tmp_path, steps=1), tmp_path / "out", progress=quiet()).step == 1


@pytest.mark.parametrize("name", ["data/book.txt", "data/tokens.json", "log.jsonl", "notes.txt"])
def test_files_added_after_a_failed_start(tmp_path: Path, name: str) -> None:
    """The folder carries our mark, what was put into it since does not."""
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="block must be below"):
        train(small(tmp_path, block=10**6), out, progress=quiet())
    assert (out / "data").is_dir()
    if name == "data/tokens.json":
        shutil.rmtree(out / "data")
    before = fill(out, [name])
    with pytest.raises(TrainError, match=r"is not empty|files that lmhead did not write"):
        train(small(tmp_path), out, progress=quiet())
    after = contents(out)
    assert {path: after[path] for path in before if path != ".lmhead-run"} == {
        path: before[path] for path in before if path != ".lmhead-run"
    }


def test_a_file_called_data(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".lmhead-run").touch()
    (out / "data").write_text("irreplaceable")
    with pytest.raises(TrainError, match=r"did not write \(data\)"):
        train(small(tmp_path), out, progress=quiet())
    assert (out / "data").read_text() == "irreplaceable"


def test_a_link_called_data(tmp_path: Path) -> None:
    out, real = tmp_path / "out", tmp_path / "real"
    out.mkdir()
    (out / ".lmhead-run").touch()
    before = fill(real, ["book.txt", "train.bin"])
    (out / "data").symlink_to(real)
    with pytest.raises(TrainError, match="did not write"):
        train(small(tmp_path), out, progress=quiet())
    assert contents(real) == before


def test_comments_in_the_settings_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(small(tmp_path, steps=1), out, progress=quiet())
    file = out / "config.toml"
    file.write_text("# irreplaceable\n" + file.read_text())
    before = file.read_bytes()
    resume(out, progress=quiet())
    assert file.read_bytes() == before


def test_checkpoints_with_notes_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(small(tmp_path, steps=4, save_every=1, keep=4), out, progress=quiet())
    first, second = (out / "checkpoints" / f"step-{step:08}" for step in (1, 2))
    (first / "notes.txt").write_text("irreplaceable")
    (second / "config.json").write_text(json.dumps({"format": "other"}))
    resume(out, {"steps": 8, "keep": 1, "eval_every": 0}, progress=quiet())
    assert {1, 2, 8} <= set(steps_of(out)) <= {1, 2, 4, 8}  # 4 may be the best one
    assert (first / "notes.txt").read_text() == "irreplaceable"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.partial", "rows.jsonl.partial.json"])
def test_score_refuses_what_exists(tmp_path: Path, name: str) -> None:
    book = tmp_path / "book.txt"
    book.write_text("Once upon a time.")
    before = fill(tmp_path, [name])
    command = ["score", "tiny", str(book), "--out", str(tmp_path / "rows.jsonl")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code in (1, 2), result.output
    assert f"{tmp_path / name} " in result.output.replace("\n", " ")
    after = contents(tmp_path)
    assert {path: after[path] for path in before} == before


@pytest.mark.parametrize("suffix", ["json", "png", "svg"])
def test_bench_refuses_what_exists(tmp_path: Path, suffix: str) -> None:
    name = "loss-200x16-24-float32"
    before = fill(tmp_path, [f"{name}.{suffix}"])
    command = ["bench", "loss", *TINY, "--only", "eager", "--out", str(tmp_path)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1, result.output
    assert f"{name}.{suffix} exists and is not of a benchmark" in result.output
    assert "eager" in result.output  # what was measured is printed
    assert contents(tmp_path) == before
    (tmp_path / f"{name}.{suffix}").unlink()
    for _ in range(2):  # a result is replaced
        assert CliRunner().invoke(main, command).exit_code == 0


def test_export_refuses_what_exists(tmp_path: Path) -> None:
    run = train(small(tmp_path, steps=1), tmp_path / "run", progress=quiet()).checkpoint
    for name in ("folder/notes.txt", "file"):
        before = fill(tmp_path, [name])
        target: Any = tmp_path / name.split("/")[0]
        with pytest.raises(TrainError, match="exists already"):
            export(run, target)
        assert contents(tmp_path) == before
