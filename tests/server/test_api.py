"""Answers about models, and what malformed questions get."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from llama2c_files import tiny_model

import lmhead
from lmhead.analysis.token_text import hidden_states
from lmhead.models import LanguageModel, open_model
from lmhead.server import Limits
from server.serve_tiny import ask, make_app, write_page


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def app(model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    page = write_page(tmp_path_factory.mktemp("site") / "page")
    return make_app(page, models={"tiny": model}, limits=Limits(prompt_tokens=40))


def next_row(app: Any, **asked: Any) -> tuple[dict[str, Any], np.ndarray]:
    answer = ask(app, "POST", "/api/next", json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/octet-stream"
    (size,) = struct.unpack("<I", answer.content[:4])
    assert size % 4 == 0
    return json.loads(answer.content[4 : 4 + size]), np.frombuffer(
        answer.content[4 + size :], "<f4"
    )


def test_models_are_listed_without_paths(app: Any) -> None:
    sizes: dict[str, Any] = {"vocab_size": 300, "hidden_size": 16, "max_length": 64}
    sizes |= {"parameters": 8720, "engine": "core"}
    speech = {"eos_token_ids": [1, 2], "text": True, "languages": ["en"]}
    assert ask(app, "GET", "/api/models").json() == {
        "lmhead": lmhead.__version__,
        "models": [{"name": "tiny", "given": "tiny", **sizes, **speech}],
    }


def test_the_languages_are_those_that_a_model_has_tokens_for(page: Path) -> None:
    app = make_app(page, models={"tiny": open_model("tiny")})
    (model,) = ask(app, "GET", "/api/models").json()["models"]
    assert model["languages"] == ["en", "zh"]


def test_the_row_is_the_model_s_own(app: Any, model: LanguageModel) -> None:
    document, row = next_row(app, model="tiny", prompt="hello 你")
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("hello 你")
    assert [token["id"] for token in document["prompt"]] == ids
    want = (hidden_states(model, ids)[-1] @ model.head.weight.T).detach()
    assert_close(torch.from_numpy(row.copy()), want, atol=1e-6)
    again, same = next_row(app, model="tiny", ids=ids)
    assert again == document
    assert (same == row).all()
    third, last = next_row(app, model="tiny", ids=ids[:-2], more=ids[-2:])
    assert third == document
    assert (last == row).all()


def test_the_vocabulary_has_a_text_for_every_id(app: Any) -> None:
    texts = ask(app, "GET", "/api/vocabulary?model=tiny").json()
    assert len(texts) == 300
    assert texts[259:263] == [" ", "a", "b", "c"]
    assert texts[2] == ["<eos>", []]  # a mark has a name, and no bytes
    assert texts[3 + 0x41] == "A"
    assert texts[3 + 0xE4] == ["\ufffd", [0xE4]]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "must be JSON"),
        (b"{", 400, "must be JSON"),
        (b"\xff", 400, "must be JSON"),
        (b'{"model": NaN}', 400, "must be JSON"),
        (b"[" * 100_000, 400, "must be JSON"),
        (b"[]", 400, "JSON object"),
        (b'{"model": "tiny", "prompt": "a", "path": "/etc/passwd"}', 400, "'path'"),
        (b'{"model": "/etc/passwd", "prompt": "a"}', 404, "no model"),
        (b'{"model": ["tiny"], "prompt": "a"}', 404, "no model"),
        (b'{"model": "tiny"}', 400, "prompt or ids"),
        (b'{"model": "tiny", "prompt": "a", "ids": [1]}', 400, "prompt or ids"),
        (b'{"model": "tiny", "prompt": 3}', 400, "must be text"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', 400, "UTF-8"),
        (b'{"model": "tiny", "ids": []}', 400, "from 1 to 40 tokens; got 0"),
        (b'{"model": "tiny", "ids": [300]}', 400, "300"),
        (b'{"model": "tiny", "ids": [-1]}', 400, "ids of the model"),
        (b'{"model": "tiny", "ids": [99999999999999999999]}', 400, "ids of the model"),
        (b'{"model": "tiny", "ids": [true]}', 400, "integers"),
        (b'{"model": "tiny", "ids": [1.0]}', 400, "integers"),
        (b'{"model": "tiny", "prompt": "a", "more": 3}', 400, "more must be a list"),
        (b'{"model": "tiny", "prompt": "a", "more": [300]}', 400, "300"),
    ],
)
def test_a_malformed_request_names_the_field(
    app: Any, body: bytes, status: int, message: str
) -> None:
    answer = ask(
        app, "POST", "/api/next", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


def test_a_long_prompt_is_refused(app: Any) -> None:
    answer = ask(app, "POST", "/api/next", json={"model": "tiny", "ids": [5] * 41})
    assert answer.status_code == 400
    message = "ids must have from 1 to 40 tokens; got 41"
    error = {"message": message, "type": "invalid_request_error", "param": None}
    facts = {"code": "wrong_length", "least": 1, "most": 40, "got": 41}
    assert answer.json() == {"error": error | facts}


def test_no_such_model(app: Any) -> None:
    assert ask(app, "GET", "/api/vocabulary").status_code == 404
    assert ask(app, "GET", "/api/vocabulary?model=..%2F..").status_code == 404


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["model", "prompt", "ids", "more", "x"]), st.just("tiny") | JSON, max_size=4
    )
    | JSON,
)
def test_no_json_breaks_it(app: Any, asked: Any) -> None:
    body = json.dumps(asked).encode()
    answer = ask(
        app, "POST", "/api/next", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code in (200, 400, 404)


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_break_it(app: Any, body: bytes) -> None:
    answer = ask(
        app, "POST", "/api/next", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code in (400, 404)


def test_a_mistake_of_ours_tells_nothing(page: Path, model: LanguageModel) -> None:
    class Broken:
        max_length, tokenizer, eos_token_ids, name = None, None, (), "secret name"
        head, body = model.head, model.body

        def hidden(self, _: torch.Tensor, **_options: bool) -> None:
            raise RuntimeError("secret reason")

    app = make_app(page, models={"broken": Broken()})  # type: ignore[dict-item]
    answer = ask(app, "POST", "/api/next", json={"model": "broken", "ids": [1]})
    assert answer.status_code == 500
    assert "secret" not in answer.text


def test_products_add_up_to_the_logits(app: Any) -> None:
    ids = [1, 5, 9, 12]
    _, logits = next_row(app, model="tiny", ids=ids)
    asked = {"model": "tiny", "ids": ids, "tokens": [3, 299]}
    found = ask(app, "POST", "/api/products", json=asked).json()
    assert found["bias"] is None
    assert (found["scale"], found["softcap"]) == (1.0, None)
    sums = np.array(found["weights"]) @ np.array(found["hidden"])
    np.testing.assert_allclose(sums, logits[[3, 299]], rtol=1e-5, atol=1e-5)
    del asked["ids"]
    weights = ask(app, "POST", "/api/products", json=asked).json()
    assert weights == found | {"hidden": None}


@pytest.mark.parametrize("tokens", [[], [300], [-1], ["a"], list(range(17)), None])
def test_products_of_tokens_that_there_are_not(app: Any, tokens: Any) -> None:
    asked = {"model": "tiny", "ids": [1], "tokens": tokens}
    assert ask(app, "POST", "/api/products", json=asked).status_code == 400


def test_an_unknown_address_is_a_page_for_browsers_and_json_for_programs(app: Any) -> None:
    page = ask(app, "GET", "/nowhere", headers={"accept": "text/html,*/*"})
    assert (page.status_code, page.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert ask(app, "GET", "/nowhere").json()["error"]["code"] == "not_found"
    file = ask(app, "GET", "/assets/no.js", headers={"accept": "text/html,*/*"})
    assert file.json()["error"]["code"] == "not_found"
