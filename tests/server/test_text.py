"""A text's score over HTTP: the library's numbers and bounds."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama2c_files import tiny_model

from lmhead.analysis import score
from lmhead.models import LanguageModel
from lmhead.server import Limits
from server.serve_tiny import ask, make_app, write_page


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def app(model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    page = write_page(tmp_path_factory.mktemp("site") / "page")
    return make_app(page, models={"tiny": model}, limits=Limits(text_tokens=400))


def scored(app: Any, **asked: Any) -> Any:
    return ask(app, "POST", "/api/score", json={"model": "tiny", **asked})


@pytest.mark.parametrize("text", ["hello 你 ab", "ab hello\r\n" * 30])
def test_the_numbers_are_the_library_s(app: Any, model: LanguageModel, text: str) -> None:
    document = scored(app, text=text).json()
    tokens: list[dict[str, Any]] = []
    want = score(model, text, on_token=lambda token: tokens.append(token.to_json()))
    assert want.tokens == len(tokens) >= 5
    assert document.pop("tokens") == tokens
    assert document.pop("first") == {"id": 1, "text": "<bos>", "bytes": []}
    assert document == want.to_json()


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        ({}, 400, "text must be text"),
        ({"text": 3}, 400, "text must be text"),
        ({"text": ["a"]}, 400, "text must be text"),
        ({"text": ""}, 400, "from 2 to 400 tokens; got 1"),
        ({"text": "ab" * 401}, 400, "from 2 to 400 tokens; got 403"),
        ({"text": "a", "path": "/etc/passwd"}, 400, "'path'"),
        ({"text": "a", "model": "other"}, 404, "no model"),
    ],
)
def test_what_cannot_be_scored_is_an_error(
    app: Any, asked: dict[str, Any], status: int, message: str
) -> None:
    answer = scored(app, **asked)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


def test_lone_surrogates_are_refused(app: Any) -> None:
    answer = ask(
        app,
        "POST",
        "/api/score",
        content=b'{"model": "tiny", "text": "\\ud800"}',
        headers={"content-type": "application/json"},
    )
    assert (answer.status_code, "UTF-8" in answer.text) == (400, True)


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_no_text_breaks_it(app: Any, text: str) -> None:
    answer = scored(app, text=text)
    assert answer.status_code in (200, 400)
    if answer.status_code == 200:
        document = answer.json()
        bytes_ = [b for token in document["tokens"] for b in token["bytes"]]
        assert bytes(bytes_).removeprefix(b" ").decode() == text.removeprefix(" ")


def test_a_model_without_a_tokenizer_is_refused(model: LanguageModel, page: Path) -> None:
    class Mute:
        head, max_length, eos_token_ids, name, tokenizer = model.head, None, (), "mute", None
        hidden, body = model.hidden, None

    app = make_app(page, models={"mute": Mute()})  # type: ignore[dict-item]
    answer = ask(app, "POST", "/api/score", json={"model": "mute", "text": "a"})
    assert (answer.status_code, "tokenizer" in answer.text) == (400, True)
