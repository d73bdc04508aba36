"""How each way of choosing goes on: the library's own tokens and figures, within limits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llama2c_files import tiny_model

from lmhead import Sampler, beam_search, generate
from lmhead.models import LanguageModel
from lmhead.sampling import Temperature, TopP, stream_generate
from lmhead.server import Limits
from server.serve_tiny import ask, make_app, write_page

PROMPT = [263, 264, 265]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def app(model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    page = write_page(tmp_path_factory.mktemp("site") / "page")
    return make_app(page, models={"tiny": model}, limits=Limits(new_tokens=30, beams=4))


def paths(app: Any, **asked: Any) -> dict[str, dict[str, Any]]:
    answer = ask(app, "POST", "/api/paths", json={"model": "tiny", **asked})
    assert answer.status_code == 200, answer.text
    found: dict[str, dict[str, Any]] = answer.json()
    assert {name: path["name"] for name, path in found.items()} == {
        name: name for name in ("greedy", "sampler", "beam")
    }
    return found


def ids(path: dict[str, Any]) -> list[int]:
    return [token["id"] for token in path["tokens"]]


def test_they_are_the_library_s(app: Any, model: LanguageModel) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "seed": 5, "order": "llama.cpp"}
    found = paths(app, ids=PROMPT, tokens=12, beams=3, sampler=options)
    greedy = generate(model, PROMPT, max_new_tokens=12)
    assert ids(found["greedy"]) == greedy.tokens
    assert found["greedy"]["log_prob"] == pytest.approx(sum(greedy.log_probs), abs=1e-4)
    drawn = generate(model, PROMPT, Sampler(**options), max_new_tokens=12)
    assert ids(found["sampler"]) == drawn.tokens != greedy.tokens
    want = [event.sampler_log_prob for event in drawn.events]
    assert [t["sampler_log_prob"] for t in found["sampler"]["tokens"]] == pytest.approx(want)
    beams = beam_search(model, [PROMPT], num_beams=3, max_new_tokens=12)
    assert ids(found["beam"]) == beams.best[0]
    total = beams.scores[0][0] * len(beams.best[0])
    assert found["beam"]["log_prob"] == pytest.approx(total, abs=1e-4)
    assert found["beam"]["log_prob"] > found["greedy"]["log_prob"]
    each = [token["log_prob"] for token in found["beam"]["tokens"]]
    assert sum(each) == pytest.approx(found["beam"]["log_prob"], abs=1e-9)


def test_penalties_know_where_the_prompt_ended(app: Any, model: LanguageModel) -> None:
    options: dict[str, Any] = {"frequency_penalty": -9.0, "temperature": 0.05, "seed": 1}
    more = ids(paths(app, ids=PROMPT, tokens=4)["greedy"])
    found = paths(app, ids=PROMPT, more=more, tokens=6, sampler=options)
    sampler, context = Sampler(**options), [*PROMPT, *more]
    for token in ids(found["sampler"]):
        hidden, _ = model.hidden(torch.tensor([context]))
        logits = (hidden[:, -1] @ model.head.weight.T).detach()
        assert token == int(sampler(logits, [context], prompt_length=len(PROMPT)).token)
        context.append(token)
    assert ids(found["sampler"])[0] in more  # which is favoured, not penalised
    as_prompt = paths(app, ids=[*PROMPT, *more], tokens=6, sampler=options)
    assert ids(as_prompt["sampler"]) != ids(found["sampler"])


def test_a_text_that_ends_says_so(app: Any, model: LanguageModel, page: Path) -> None:
    eos = paths(app, ids=PROMPT, tokens=8)["greedy"]["tokens"][3]["id"]
    ending = LanguageModel(model.body, model.head, (eos,), model.tokenizer, model.max_length)
    found = paths(make_app(page, models={"tiny": ending}), ids=PROMPT, tokens=8)
    assert found["greedy"]["ended"] is True
    assert ids(found["greedy"])[-1] == eos


def test_there_is_no_more_than_the_model_can_see(app: Any) -> None:
    found = paths(app, ids=[5] * 60, tokens=30)
    assert {len(path["tokens"]) for path in found.values()} == {4}
    full = ask(app, "POST", "/api/paths", json={"model": "tiny", "ids": [5] * 64})
    assert (full.status_code, "from 1 to 63 tokens" in full.text) == (400, True)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tokens": 31}, "tokens must be an integer from 1 to 30"),
        ({"tokens": True}, "tokens must be"),
        ({"beams": 5}, "beams must be an integer from 1 to 4"),
        ({"beams": 0}, "beams must be"),
        ({"sampler": []}, "object of options"),
        ({"sampler": {"temperature": -1}}, "sampler: temperature must be a number from 0"),
        ({"sampler": {"temperature": [1.0]}}, "sampler.temperature"),
        ({"sampler": {"top_k": 1.5}}, "sampler: top_k must be an integer"),
        ({"sampler": {"seed": 1.5}}, "sampler: seed must be an integer"),
        ({"sampler": {"order": ["hf"]}}, "sampler.order must be"),
        ({"sampler": {"logit_bias": {}}}, "'logit_bias'"),
        ({"more": [300]}, "300"),
        ({"prompt": "a"}, "prompt or ids"),
    ],
)
def test_an_invalid_request_names_the_field(app: Any, asked: dict[str, Any], message: str) -> None:
    answer = ask(app, "POST", "/api/paths", json={"model": "tiny", "ids": PROMPT, **asked})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


NUMBER = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["tokens", "beams", "more", "sampler", "x"]), NUMBER),
    st.dictionaries(
        st.sampled_from(["temperature", "top_k", "top_p", "min_p", "typical_p", "order", "seed"])
        | st.sampled_from(["repetition_penalty", "frequency_penalty", "presence_penalty"]),
        NUMBER | st.floats(0, 1) | st.sampled_from(["hf", "vllm"]),
    ),
)
def test_no_settings_break_it(app: Any, asked: dict[str, Any], sampler: dict[str, Any]) -> None:
    body = json.dumps({"tokens": 2, "sampler": sampler, **asked, "model": "tiny", "ids": PROMPT})
    headers = {"content-type": "application/json"}
    answer = ask(app, "POST", "/api/paths", content=body.encode(), headers=headers)
    assert answer.status_code in (200, 400), answer.text


def test_the_stages_of_a_sampler_can_come_in_any_order(app: Any, model: LanguageModel) -> None:
    options = {"temperature": 0.5, "top_p": 0.7, "seed": 3}
    stages = ["top_p", "temperature"]
    asked = {"model": "tiny", "ids": [1, 5], "tokens": 8, "sampler": {**options, "stages": stages}}
    found = ask(app, "POST", "/api/paths", json=asked).json()["sampler"]
    sampler = Sampler(stages=[TopP(0.7), Temperature(0.5)], seed=3)
    want = [event.token for event in stream_generate(model, [1, 5], sampler, max_new_tokens=8)]
    assert [token["id"] for token in found["tokens"]] == want


@pytest.mark.parametrize(
    "sampler",
    [
        {"top_p": 0.5, "stages": []},
        {"top_p": 0.5, "stages": ["top_k"]},
        {"stages": "top_p"},
        {"mirostat": 2, "top_k": 5},
        {"dry_base": 0.5},
    ],
)
def test_a_chain_that_makes_no_sense_is_refused(app: Any, sampler: dict[str, Any]) -> None:
    asked = {"model": "tiny", "ids": [1, 5], "sampler": sampler}
    assert ask(app, "POST", "/api/paths", json=asked).status_code == 400
