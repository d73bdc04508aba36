"""Responses in lines: the parts make the document, and a client that leaves ends the work."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from llama2c_files import tiny_model

from lmhead.models import LanguageModel
from lmhead.server import Limits
from server.serve_tiny import ask, make_app, running, write_page

TEXT = "hello ab cab hello lo " * 12  # more than one window of 64 tokens
SAMPLERS = {"sampler_a": {"temperature": 0.5}, "sampler_b": {}}
REQUESTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "score": ("/api/score", {"model": "tiny", "text": TEXT}, 4),
    "lens": ("/api/lens", {"model": "tiny", "prompt": "hello"}, 4),
    "paths": ("/api/paths", {"model": "tiny", "prompt": "hello", "tokens": 5, "beams": 3}, 16),
    "models": ("/api/compare", {"a": "tiny", "b": "other", "text": TEXT}, 2),
    "samplers": ("/api/compare", {"a": "tiny", **SAMPLERS, "text": TEXT}, 2),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    folder = tmp_path_factory.mktemp("model")
    return {name: tiny_model(folder) for name in ("tiny", "other")}


@pytest.fixture(scope="module")
def app(models: dict[str, LanguageModel], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_app(write_page(tmp_path_factory.mktemp("site") / "page"), models=models)


@pytest.mark.parametrize("name", REQUESTS)
def test_the_lines_make_the_document(app: Any, name: str) -> None:
    path, fields, least = REQUESTS[name]
    whole = ask(app, "POST", path, json=fields)
    assert whole.status_code == 200, whole.text
    answer = ask(app, "POST", path, json={**fields, "stream": True})
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert len(lines) >= least
    document: dict[str, Any] = {}
    done = []
    for line in lines:
        progress = line.pop("progress", None)
        done += [progress] if progress else []
        for field, value in line.items():
            rows = isinstance(value, list) and all(isinstance(row, dict) for row in value)
            more = rows and field in document
            document[field] = document[field] + value if more else value
    assert document == whole.json()
    assert [now for now, _ in done] == sorted(now for now, _ in done)
    assert done[-1][0] == done[-1][1]


@pytest.mark.parametrize("name", REQUESTS)
def test_an_error_before_the_first_line_has_a_status(app: Any, name: str) -> None:
    path, fields, _ = REQUESTS[name]
    wrong = {"text": ""} if "text" in fields else {"prompt": 3}
    answer = ask(app, "POST", path, json={**fields, **wrong, "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("wrong_length", "wrong_value")
    other = ask(app, "POST", path, json={**fields, "stream": "yes"})
    assert "stream must be true or false" in other.json()["error"]["message"]


class Slow:
    """A model that waits in every window, and counts them."""

    def __init__(self, model: LanguageModel, seconds: float) -> None:
        self.head, self.tokenizer, self.eos_token_ids = model.head, model.tokenizer, ()
        self.max_length, self.name, self.body = 16, "slow", None
        self.model, self.seconds, self.windows = model, seconds, 0
        self.go = threading.Event()
        self.go.set()

    def hidden(self, ids: torch.Tensor, **_options: bool) -> Any:
        self.go.wait(20)
        time.sleep(self.seconds)
        self.windows += 1
        return self.model.hidden(ids)


def test_every_part_has_the_time_of_a_whole_response(
    models: dict[str, LanguageModel], page: Path
) -> None:
    """Windows of 0.25 s with a limit of 2 s: they come in lines, and not as one document."""
    slow: Any = Slow(models["tiny"], 0.25)
    app = make_app(page, models={"slow": slow}, limits=Limits(seconds=2.0))
    fields = {"model": "slow", "text": TEXT}
    lines = ask(app, "POST", "/api/score", json={**fields, "stream": True}).text.splitlines()
    assert "error" not in json.loads(lines[-1])
    assert len(lines) > 10
    answer = ask(app, "POST", "/api/score", json=fields)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_long")


def test_an_error_after_the_first_line_is_the_last_line(
    models: dict[str, LanguageModel], page: Path
) -> None:
    slow: Any = Slow(models["tiny"], 0.0)
    app = make_app(page, models={"slow": slow}, limits=Limits(seconds=0.3))
    slow.go.clear()
    threading.Timer(1.0, slow.go.set).start()
    asked = {"model": "slow", "text": TEXT[:100], "stream": True}
    first, last = map(json.loads, ask(app, "POST", "/api/score", json=asked).text.splitlines())
    assert first["tokens"] == []
    assert last["error"]["code"] == "too_long"


def test_a_client_that_leaves_ends_the_work(models: dict[str, LanguageModel], page: Path) -> None:
    slow: Any = Slow(models["tiny"], 0.05)
    with running(page, models={"slow": slow}) as port:
        asked = {"model": "slow", "text": TEXT, "stream": True}
        address = f"http://127.0.0.1:{port}/api/score"
        with httpx.stream("POST", address, json=asked) as answer:
            lines = answer.iter_lines()
            next(lines)
            next(lines)
        seen, ended = -1, time.monotonic() + 10
        while seen != slow.windows and time.monotonic() < ended:
            seen = slow.windows
            time.sleep(0.5)
        whole = ask(
            make_app(page, models={"slow": slow}),
            "POST",
            "/api/score",
            json={**asked, "stream": False},
        )
        assert whole.status_code == 200
        assert seen < slow.windows - seen  # far fewer windows than a whole text takes
