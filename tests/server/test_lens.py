"""POST /api/lens: the library's own numbers and bounds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llama2c_files import tiny_model

from lmhead.analysis import logit_lens
from lmhead.models import LanguageModel
from lmhead.server import Limits
from server.serve_tiny import ask, make_app, write_page


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def app(model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    page = write_page(tmp_path_factory.mktemp("site") / "page")
    return make_app(page, models={"tiny": model}, limits=Limits(lens_tokens=20))


def test_the_numbers_are_the_library_s(app: Any, model: LanguageModel) -> None:
    answer = ask(app, "POST", "/api/lens", json={"model": "tiny", "prompt": "hello 你", "top": 3})
    assert answer.status_code == 200, answer.text
    assert answer.json() == logit_lens(model, "hello 你", top=3).to_json()


def test_ids_and_a_target_of_ones_own(app: Any, model: LanguageModel) -> None:
    asked = {"model": "tiny", "ids": [260, 261], "target": 7}
    found = ask(app, "POST", "/api/lens", json=asked).json()
    assert found == logit_lens(model, [260, 261], top=8, target=7).to_json()
    assert {target["id"] for target in found["targets"]} == {7}


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        ({"model": "other", "prompt": "a"}, 404, "no model"),
        ({"model": "tiny"}, 400, "prompt or ids"),
        ({"model": "tiny", "ids": []}, 400, "from 1 to"),
        ({"model": "tiny", "ids": [5] * 21}, 400, "from 1 to 20 tokens; got 21"),
        (
            {"model": "tiny", "prompt": "a", "top": 0},
            400,
            "top must be an integer from 1 to 20",
        ),
        ({"model": "tiny", "prompt": "a", "top": 21}, 400, "top must be"),
        ({"model": "tiny", "prompt": "a", "top": True}, 400, "top must be"),
        ({"model": "tiny", "prompt": "a", "target": 300}, 400, "target must be"),
        ({"model": "tiny", "prompt": "a", "target": "a"}, 400, "target must be"),
        ({"model": "tiny", "prompt": "a", "file": "x"}, 400, "'file'"),
    ],
)
def test_a_malformed_request_names_the_field(
    app: Any, asked: dict[str, Any], status: int, message: str
) -> None:
    answer = ask(app, "POST", "/api/lens", json=asked)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True)


JSON = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers())


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["model", "prompt", "ids", "target", "top", "x"]), st.just("tiny") | JSON
    )
)
def test_no_json_breaks_it(app: Any, asked: dict[str, Any]) -> None:
    headers = {"content-type": "application/json"}
    answer = ask(app, "POST", "/api/lens", content=json.dumps(asked).encode(), headers=headers)
    assert answer.status_code in (200, 400, 404)


def test_a_model_without_layers_says_so(page: Path, model: LanguageModel) -> None:
    class Closed:
        name, eos_token_ids, tokenizer = "closed", (), model.tokenizer
        max_length, head, body = model.max_length, model.head, None

        def layers(self, _: torch.Tensor) -> list[torch.Tensor]:
            raise TypeError("the body of closed must have layers(ids), to be looked into")

    app = make_app(page, models={"closed": Closed()})  # type: ignore[dict-item]
    answer = ask(app, "POST", "/api/lens", json={"model": "closed", "prompt": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "no_layers"
