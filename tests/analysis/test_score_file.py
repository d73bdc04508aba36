"""`score_files`: the rows are those of `score`, and a run that was stopped continues exactly."""

import json
import math
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llama2c_files import tiny_model
from preloaded_python import preloaded_python

from lmhead.analysis import score, score_files
from lmhead.analysis.score import ScoredToken
from lmhead.models import LanguageModel, open_model

TEXTS = {"a": "hello ab 你 cab hello\n" * 12, "b": "ab", "empty": "", "c": "cab hello ab " * 9}
OPTIONS: dict[str, Any] = {"window": 16, "stride": 8, "top_k": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Callable[[], list[str]]]:
    found: dict[str, Callable[[], list[str]]] = {}
    for name, text in TEXTS.items():
        path = tmp_path / f"{name}.txt"
        path.write_text(text)
        found[str(path)] = lambda path=path: [path.read_text()]  # type: ignore[misc]
    return found


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_and_totals_are_those_of_score(
    model: LanguageModel, files: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    found = score_files(model, files, out, **OPTIONS)
    written = rows(out)
    for name, read in files.items():
        tokens: list[ScoredToken] = []
        if "empty" in name:
            assert found[name].tokens == 0
        else:
            assert found[name] == score(model, read(), on_token=tokens.append, **OPTIONS)
        mine = [row for row in written if row["file"] == name]
        assert [row["position"] for row in mine] == list(range(1, len(tokens) + 1))
        for row, token in zip(mine, tokens, strict=True):
            assert (row["id"], row["rank"]) == (token.token.piece.id, token.token.rank)
            assert (row["log_prob"], row["entropy"]) == (token.token.log_prob, token.entropy)
            assert list(zip(row["top_ids"], row["top_log_probs"], strict=True)) == list(token.top)
            assert len(token.top) == 3
            if token.token.rank < 3:
                assert row["top_ids"][token.token.rank] == row["id"]
    assert {path.name for path in tmp_path.iterdir() if "out" in path.name} == {"out.jsonl"}


class Stopped(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("stop", [1, 15, 16, 17, 90, 100, 130, 160])
def test_a_stopped_run_continues(
    stop: int, model: LanguageModel, files: dict[str, Any], tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    want = score_files(model, files, whole, **OPTIONS)
    assert stop < len(rows(whole))
    count = 0

    def stopping(*_: object) -> None:
        nonlocal count
        count += 1
        if count == stop:
            raise Stopped

    with pytest.raises(Stopped):
        score_files(model, files, out, on_token=stopping, **OPTIONS)
    assert not out.exists()
    kept: list[int] = []
    count = -(10**6)
    found = score_files(model, files, out, on_token=stopping, on_resume=kept.append, **OPTIONS)
    assert kept == [stop]
    assert count + 10**6 == len(rows(whole)) - stop, "no token is scored twice"
    assert out.read_bytes() == whole.read_bytes()
    for name, result in want.items():
        assert found[name].tokens == result.tokens
        assert math.isclose(found[name].log_prob, result.log_prob, rel_tol=1e-12, abs_tol=0)
        assert (found[name].bytes, found[name].words) == (result.bytes, result.words)


@pytest.mark.parametrize("lost", [1, 20, 150, 4000, 10**6])
@pytest.mark.parametrize("tail", [b"", b"\0\0\0", b'{"file": 1}\n'])
def test_a_damaged_end_is_cut_off(
    lost: int, tail: bytes, model: LanguageModel, files: dict[str, Any], tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    score_files(model, files, whole, **OPTIONS)
    count = 0

    def stopping(*_: object) -> None:
        nonlocal count
        count += 1
        if count == 140:
            raise Stopped

    with pytest.raises(Stopped):
        score_files(model, files, out, on_token=stopping, **OPTIONS)
    partial = tmp_path / "out.jsonl.partial"
    content = partial.read_bytes()
    partial.write_bytes(content[: max(0, len(content) - lost)] + tail)
    score_files(model, files, out, **OPTIONS)
    assert out.read_bytes() == whole.read_bytes()


def stop_after_one(model: LanguageModel, files: dict[str, Any], out: Path) -> None:
    def stopping(*_: object) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        score_files(model, files, out, on_token=stopping, **OPTIONS)


def test_other_settings_and_changed_files_are_refused(
    model: LanguageModel, files: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    stop_after_one(model, files, out)
    with pytest.raises(ValueError, match="was started with stride 8, not 4"):
        score_files(model, files, out, **{**OPTIONS, "stride": 4})
    with pytest.raises(ValueError, match="was started with other files"):
        score_files(model, dict(list(files.items())[:2]), out, **OPTIONS)
    (tmp_path / "c.txt").write_text("changed text")
    with pytest.raises(ValueError, match=r"c.txt may have changed since"):
        score_files(model, files, out, **OPTIONS)
    score_files(model, files, out, restart=True, **{**OPTIONS, "stride": 4})
    with pytest.raises(FileExistsError):
        score_files(model, files, out, **OPTIONS)


def test_two_at_once_are_refused(
    model: LanguageModel, files: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"

    def again(*_: object) -> None:
        score_files(model, files, out, **OPTIONS)

    with pytest.raises(BlockingIOError, match="another process"):
        score_files(model, files, out, on_token=again, **OPTIONS)


@pytest.mark.parametrize("top_k", [0, 3])
def test_parquet_has_the_same_rows(
    top_k: int, model: LanguageModel, files: dict[str, Any], tmp_path: Path
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    options = {**OPTIONS, "top_k": top_k}
    score_files(model, files, tmp_path / "out.jsonl", **options)
    score_files(model, files, tmp_path / "out.parquet", **options)
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.to_pylist() == rows(tmp_path / "out.jsonl")
    settings = json.loads(table.schema.metadata[b"lmhead"])
    assert (settings["window"], settings["stride"], settings["top_k"]) == (16, 8, top_k)
    assert len(list(tmp_path.glob("out.*"))) == 2


def test_a_killed_command_is_continued(tmp_path: Path) -> None:
    """kill -9 in the middle; the Parquet file is then that of one run."""
    parquet = pytest.importorskip("pyarrow.parquet")
    text, out = tmp_path / "text.txt", tmp_path / "out.parquet"
    text.write_text("The cat sat on the mat, and the dog did not. " * 1500)
    options = ["--window", "64", "--stride", "64"]
    command = [preloaded_python(), "-m", "lmhead", "score", "tiny", str(text), *options, "--out"]
    with subprocess.Popen([*command, str(out)], stdout=subprocess.DEVNULL) as process:
        partial = tmp_path / "out.parquet.partial"
        while process.poll() is None and not (partial.exists() and partial.stat().st_size > 20_000):
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL, "the text is too short"
    assert not out.exists()
    done = subprocess.run([*command, str(out)], capture_output=True, text=True, check=True)
    assert "Continuing after" in done.stderr, done.stderr
    tokens: list[ScoredToken] = []
    score(open_model("tiny"), text.read_text(), window=64, stride=64, on_token=tokens.append)
    table = parquet.read_table(out)
    assert table["position"].to_pylist() == [token.position for token in tokens]
    assert table["id"].to_pylist() == [token.token.piece.id for token in tokens]
    assert table["log_prob"].to_pylist() == [token.token.log_prob for token in tokens]


def test_words_are_counted_across_pieces(model: LanguageModel) -> None:
    text = " hello ab\n\ncab  你 hello "
    pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
    assert score(model, pieces).words == score(model, [*pieces, ""]).words == len(text.split())
