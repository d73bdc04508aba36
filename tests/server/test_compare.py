"""POST /api/compare and GET /api/comparable: the library's numbers; errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny, write_model

from lmhead import Sampler
from lmhead.analysis import compare_models, compare_samplers
from lmhead.models import LanguageModel, open_model
from lmhead.server import Limits
from server.serve_tiny import ask, make_app, write_page

TEXT = "hello ab cab 你 hello lo"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    folder = tmp_path_factory.mktemp("models")
    other = open_model(write_model(folder / "c", tokens=["x", "y"]))
    return {"a": tiny(folder / "a"), "b": tiny(folder / "b", seed=1), "other": other}


@pytest.fixture(scope="module")
def app(models: dict[str, LanguageModel], tmp_path_factory: pytest.TempPathFactory) -> Any:
    page = write_page(tmp_path_factory.mktemp("site") / "page")
    return make_app(page, models=models, limits=Limits(compare_tokens=40))


def post(app: Any, **asked: Any) -> Any:
    answer = ask(app, "POST", "/api/compare", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_same(found: dict[str, Any], want: dict[str, Any]) -> None:
    """The command's document, its differences in the order of the text and without `before`."""
    places = sorted(want.pop("differences"), key=lambda place: place["position"])
    for place in places:
        del place["before"]
    assert found.pop("comparable") is True
    first = found.pop("first")
    assert first["id"] == 1  # the mark of the beginning
    assert found.pop("places") == places
    assert found == want


def test_two_models(app: Any, models: dict[str, LanguageModel]) -> None:
    found = post(app, a="a", b="b", text=TEXT)
    assert [place["position"] for place in found["places"]] == list(
        range(1, found["positions"] + 1)
    )
    check_same(found, compare_models(models["a"], models["b"], TEXT, worst=99).to_json())


def test_two_samplers(app: Any, models: dict[str, LanguageModel]) -> None:
    a, b = {"temperature": 0.7, "top_k": 9}, {"top_p": 0.6, "order": "llama.cpp"}
    found = post(app, a="a", sampler_a=a, sampler_b=b, text=TEXT)
    one, two = Sampler(temperature=0.7, top_k=9), Sampler(top_p=0.6, order="llama.cpp")
    check_same(found, compare_samplers(models["a"], one, two, TEXT, worst=99).to_json())


def test_different_tokens_are_an_answer_and_no_mistake(app: Any) -> None:
    expected = {"comparable": False, "reason": "token", "place": 259, "a": " ", "b": "x"}
    assert post(app, a="a", b="other", text=TEXT) == expected
    for _ in range(2):  # asked, then known
        assert ask(app, "GET", "/api/comparable?a=a&b=other").json() == expected
    assert ask(app, "GET", "/api/comparable?a=a&b=b").json() == {"comparable": True}


def test_different_sizes(page: Path, models: dict[str, LanguageModel]) -> None:
    class Wide:
        tokenizer, body = models["a"].tokenizer, None

        class head:  # noqa: N801
            vocab_size = 400

    app = make_app(page, models={"a": models["a"], "b": Wide()})  # type: ignore[dict-item]
    answer = ask(app, "GET", "/api/comparable?a=a&b=b").json()
    assert answer == {"comparable": False, "reason": "sizes", "place": None, "a": 300, "b": 400}


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        ({"a": "c", "b": "a", "text": "ab"}, 404, "no model"),
        ({"a": "a", "b": "c", "text": "ab"}, 404, "no model"),
        ({"a": "a", "b": "b"}, 400, "text must be text"),
        ({"a": "a", "b": "b", "text": ""}, 400, "from 2 to 40 tokens; got"),
        ({"a": "a", "b": "b", "text": "b" * 60}, 400, "from 2 to 40 tokens"),
        ({"a": "a", "b": "b", "sampler_a": {}, "text": "ab"}, 400, "give b, or"),
        ({"a": "a", "text": "ab"}, 400, "sampler_a must be an object"),
        ({"a": "a", "sampler_a": {}, "text": "ab"}, 400, "sampler_b must be an object"),
        ({"a": "a", "sampler_a": {"x": 1}, "sampler_b": {}, "text": "ab"}, 400, "got 'x'"),
        (
            {"a": "a", "sampler_a": {"top_p": "1"}, "sampler_b": {}, "text": "ab"},
            400,
            "sampler_a.top_p must be a number",
        ),
        (
            {"a": "a", "sampler_a": {"top_p": 2}, "sampler_b": {}, "text": "ab"},
            400,
            "sampler_a: top_p must be",
        ),
        (
            {"a": "a", "sampler_a": {"top_k": 10**400}, "sampler_b": {}, "text": "ab"},
            400,
            "sampler_a.top_k must be a number",
        ),
        (
            {"a": "a", "sampler_a": {}, "sampler_b": {"order": "mine"}, "text": "ab"},
            400,
            "sampler_b.order must be one of",
        ),
    ],
)
def test_a_malformed_request_names_the_field(
    app: Any, asked: dict[str, Any], status: int, message: str
) -> None:
    answer = ask(app, "POST", "/api/compare", json=asked)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


def test_no_such_pair(app: Any) -> None:
    assert ask(app, "GET", "/api/comparable?a=a").status_code == 404


JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
SAMPLER = st.dictionaries(st.sampled_from(["temperature", "top_k", "top_p", "order"]), JSON)


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "sampler_a", "sampler_b", "text"]),
        st.sampled_from(["a", "b", "ab ab"]) | SAMPLER | JSON,
    )
)
def test_no_json_breaks_it(app: Any, asked: dict[str, Any]) -> None:
    headers = {"content-type": "application/json"}
    answer = ask(app, "POST", "/api/compare", content=json.dumps(asked).encode(), headers=headers)
    assert answer.status_code in (200, 400, 404)
