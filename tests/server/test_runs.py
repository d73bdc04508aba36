"""A run that is watched: what the server says of a log that grows, is cut, replaced or absent."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from lmhead.train.train_config import TrainConfig
from lmhead.train.training_log import MAX_BYTES, TrainingLog, follow
from server.serve_tiny import ask, make_app


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder of a run that has not begun."""
    folder = tmp_path / "my run"
    folder.mkdir()
    return folder


@pytest.fixture
def app(page: Path, run: Path) -> Any:
    return make_app(page, models={}, run=run)


def begin(run: Path) -> Path:
    (run / "config.toml").write_text(TrainConfig(steps=500, head="adaptive").to_toml())
    return run / "log.jsonl"


def look(app: Any, last: dict[str, Any] | None = None) -> dict[str, Any]:
    """What is new since an answer."""
    query = {} if last is None else {"after": str(last["end"]), "mark": last["mark"]}
    answer = ask(app, "GET", "/api/run", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def steps(news: dict[str, Any]) -> list[int]:
    return [line["step"] for line in news["lines"]]


def test_without_a_folder_there_is_no_run(page: Path) -> None:
    assert look(make_app(page, models={})) == {"run": None}


def test_a_run_that_has_not_begun(app: Any, run: Path) -> None:
    news = look(app)
    assert news["run"] == {"name": "my run", "steps": None, "task": None, "head": None}
    assert (news["age"], news["lines"], news["end"], news["more"]) == (None, [], 0, False)
    run.rmdir()
    assert look(app, news)["lines"] == []


def test_only_new_lines_are_sent_and_only_whole_ones(app: Any, run: Path) -> None:
    path = begin(run)
    with TrainingLog(path, 0) as log:
        log.write(step=10, loss=4.0, rate=1e-3, norm=2.0, tokens=640, tokens_per_second=9.5)
        log.write(step=20, sample="Es war einmal 你好\n")
        first = look(app)
        assert first["run"] == {"name": "my run", "steps": 500, "task": "text", "head": "adaptive"}
        assert (first["start"], steps(first)) == (0, [10, 20])
        assert first["lines"][1]["sample"] == "Es war einmal 你好\n"
        assert 0 <= first["age"] < 60
        assert steps(look(app, first)) == []
        log.write(step=20, valid={"loss": 3.5, "bleu": 1.0})
        with path.open("a", encoding="utf-8") as half:
            half.write('{"step": 30, "lo')
        second = look(app, first)
        assert second["start"] == first["end"]
        assert second["lines"] == [{"step": 20, "valid": {"loss": 3.5, "bleu": 1.0}}]
    with path.open("a", encoding="utf-8") as rest:
        rest.write('ss": 3.25}\n')
    assert look(app, second)["lines"] == [{"step": 30, "loss": 3.25}]


def test_a_run_that_goes_on_from_a_checkpoint_starts_over(app: Any, run: Path) -> None:
    path = begin(run)
    with TrainingLog(path, 0) as log:
        for step in range(10, 200, 10):
            log.write(step=step, loss=5.0 - step / 100, seconds=step * 1.7)
    news = look(app)
    with TrainingLog(path, 100) as log:
        assert (look(app, news)["start"], steps(look(app, news))[-1]) == (0, 100)
        for step in range(110, 400, 10):  # longer than it was, with other times
            log.write(step=step, loss=5.0 - step / 100, seconds=step * 1.9)
        again = look(app, news)
        assert again["start"] == 0
        assert steps(again) == list(range(10, 400, 10))
    path.write_text("")
    assert (look(app, again)["start"], look(app, again)["lines"]) == (0, [])
    path.unlink()
    gone = look(app, again)
    assert (gone["start"], gone["end"], gone["age"]) == (0, 0, None)


def test_the_same_beginning_is_not_sent_again(app: Any, run: Path) -> None:
    path = begin(run)
    path.write_text('{"step": 1, "loss": 2.5}\n')
    news = look(app)
    path.unlink()
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.25}\n')
    assert (look(app, news)["start"], steps(look(app, news))) == (news["end"], [2])


def test_what_is_no_line_of_a_log_is_passed_over(app: Any, run: Path) -> None:
    odd = [
        b"no json",
        b"[1]",
        b'{"step": "1", "loss": 1.0}',
        b'{"loss": 1.0}',
        b'{"step": 3, "loss": NaN, "rate": true, "norm": "2", "path": "/etc", "tokens": 1e999}',
        b'{"step": 4, "valid": {"loss": Infinity}, "sample": ["x"]}',
        b'{"step": 5, "sample": "\xff", "valid": {"loss": 2.0, "odd": "x"}}',
        b"[" * 5000,
        b'{"step": 6, "tokens": ' + b"9" * 400 + b"}",
    ]
    begin(run).write_bytes(b"\n".join(odd) + b"\n")
    assert look(app)["lines"] == [
        {"step": 3},
        {"step": 4},
        {"step": 5, "valid": {"loss": 2.0}, "sample": "\ufffd"},
        {"step": 6},
    ]


def test_a_long_log_comes_in_pieces(app: Any, run: Path) -> None:
    count = MAX_BYTES // 20
    text = "".join(f'{{"step": {step}, "loss": 2.5}}\n' for step in range(1, count))
    begin(run).write_text(text)
    seen, news = [], None
    for _ in range(10):
        news = look(app, news)
        seen += steps(news)
        if not news["more"]:
            break
    assert seen == list(range(1, count))


def test_a_line_without_end_is_passed_over(run: Path) -> None:
    path = run / "log.jsonl"
    path.write_bytes(b"x" * (2 * MAX_BYTES + 5) + b'\n{"step": 7}\n')
    news, seen = follow(path), []
    for _ in range(4):
        news = follow(path, news.end, news.mark)
        seen += news.lines
    assert seen == [{"step": 7}]


def test_a_pipe_or_a_folder_of_that_name_is_left_alone(app: Any, run: Path) -> None:
    os.mkfifo(run / "log.jsonl")
    began = time.monotonic()
    assert look(app)["age"] is None
    assert time.monotonic() - began < 5
    (run / "log.jsonl").unlink()
    (run / "log.jsonl").mkdir()
    assert look(app)["age"] is None


@pytest.mark.parametrize("after", ["", "-1", "1.5", "x", "9" * 30, "٣"])
def test_a_place_that_is_none_is_refused(app: Any, after: str) -> None:
    answer = ask(app, "GET", "/api/run", params={"after": after})
    assert answer.status_code == 400
    assert "after must be" in answer.json()["error"]["message"]


def test_a_request_names_no_path(app: Any, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 1, "sample": "secret"}) + "\n")
    for query in ("run=..", "path=../", "folder=/", "after=0&name=.."):
        answer = ask(app, "GET", f"/api/run?{query}")
        assert "secret" not in answer.text
        assert str(tmp_path) not in answer.text


def test_settings_that_cannot_be_read_are_unknown(app: Any, run: Path) -> None:
    begin(run).write_text('{"step": 1, "loss": 2.5}\n')
    (run / "config.toml").write_text("steps = [")
    news = look(app)
    assert (news["run"]["steps"], steps(news)) == (None, [1])
