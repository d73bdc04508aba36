"""`lmhead serve`, asked with OpenAI's own client: the library's tokens in OpenAI's formats."""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from models import hf_folders
from openai import OpenAI
from tiny_models import tiny

from lmhead.cli.cmd_serve import screened_model
from lmhead.models import LanguageModel, open_model
from lmhead.sampling import Sampler, generate
from lmhead.server.app import API_LIMITS, create_api_app
from lmhead.server.metrics import Metrics
from lmhead.server.worker import Worker
from server.serve_tiny import HOST, ask, finish, listening, make_app

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and m.content == 'no' %}"
    "{{ raise_exception('not so') }}{% endif %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)
KEY = "secret-key"
PROMPT = "hello ab"
IDS = [1, 262, 98]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    folder = tmp_path_factory.mktemp("chat")
    hf_folders.write(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return {"tiny": tiny(tmp_path_factory.mktemp("tiny")), "chat": open_model(str(folder))}


@pytest.fixture(scope="module")
def port(models: dict[str, LanguageModel]) -> Iterator[int]:
    with listening(lambda hosts: create_api_app(models, hosts=hosts, key=KEY)) as found:
        yield found


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0) as found:
        yield found


@pytest.fixture
def model(models: dict[str, LanguageModel]) -> LanguageModel:
    return models["tiny"]


def log_probs(model: LanguageModel, ids: list[int]) -> torch.Tensor:
    """Log-probabilities (T, V) from dense float64 logits."""
    with torch.no_grad():
        hidden = model.hidden(torch.tensor([ids]))[0][0]
    return (hidden.double() @ model.head.weight.double().T).log_softmax(-1)


# --- models ---------------------------------------------------------------------------------------


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "chat"]
    assert client.models.retrieve("chat").id == "chat"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("none")
    assert error.value.code == "model_not_found"
    assert error.value.param == "model"
    assert error.value.type == "invalid_request_error"


# --- completions ----------------------------------------------------------------------------------


def test_greedy(client: OpenAI, model: LanguageModel) -> None:
    want = generate(model, PROMPT, max_new_tokens=12)
    for prompt in (PROMPT, list(want.prompt_ids)):
        found = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
        (choice,) = found.choices
        assert (choice.text, choice.finish_reason) == (want.text, "length")
        assert choice.logprobs is None
        assert found.usage is not None
        assert found.usage.completion_tokens == 12
        assert found.usage.prompt_tokens == len(want.prompt_ids)
        assert found.usage.total_tokens == 12 + len(want.prompt_ids)
        assert (found.object, found.model) == ("text_completion", "tiny")


def test_a_seed_gives_the_librarys_tokens(client: OpenAI, model: LanguageModel) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5}
    want = [
        generate(
            model,
            PROMPT,
            Sampler(**options, order="vllm", seed=seed, eos_token_id=list(model.eos_token_ids)),
            max_new_tokens=10,
        ).text
        for seed in (7, 8, 9)
    ]
    assert len(set(want)) == 3
    arguments: dict[str, Any] = {"model": "tiny", "max_tokens": 10, "seed": 7, **options}
    found = client.completions.create(prompt=PROMPT, n=3, **arguments)
    assert [choice.text for choice in found.choices] == want
    several = client.completions.create(prompt=["cab", PROMPT], n=2, **arguments)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in several.choices[2:]] == want[:2]


def test_without_a_seed_texts_differ(client: OpenAI) -> None:
    texts = {
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=10).choices[0].text
        for _ in range(4)
    }
    assert len(texts) > 1


def test_every_sampler_option_is_a_field(client: OpenAI, model: LanguageModel) -> None:
    sampler = Sampler(min_p=0.2, typical_p=0.9, top_k=5, order="llama.cpp", seed=3)
    want = generate(model, PROMPT, sampler, max_new_tokens=8).text
    extra = {"min_p": 0.2, "typical_p": 0.9, "top_k": 5, "order": "llama.cpp"}
    found = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=8, seed=3, extra_body=extra
    )
    assert found.choices[0].text == want


def test_logit_bias_and_stop(client: OpenAI, model: LanguageModel) -> None:
    want = generate(model, PROMPT, max_new_tokens=12)
    first = want.tokens[0]
    banned = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1, temperature=0, logprobs=1,
        logit_bias={str(first): -100},
    )  # fmt: skip
    assert banned.choices[0].text != want.text[:1]
    stop = want.text[3:5]
    found = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, stop=[stop, "never"]
    )
    assert found.choices[0].text == want.text[: want.text.index(stop)]
    assert (found.choices[0].model_extra or {})["stop_reason"] == stop
    assert found.choices[0].finish_reason == "stop"


def test_log_probabilities(client: OpenAI, model: LanguageModel) -> None:
    want = generate(model, IDS, max_new_tokens=5)
    found = client.completions.create(
        model="tiny", prompt=IDS, max_tokens=5, temperature=0, logprobs=3
    )
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    truth = log_probs(model, [*IDS, *want.tokens])[len(IDS) - 1 : -1]
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs == pytest.approx(
        truth.gather(1, torch.tensor(want.tokens)[:, None])[:, 0].tolist(), abs=1e-4
    )
    for row, top in enumerate(logprobs.top_logprobs):
        assert sorted(top.values(), reverse=True) == pytest.approx(
            truth[row].topk(3).values.tolist(), abs=1e-4
        )
        assert logprobs.tokens is not None
        assert logprobs.tokens[row] == max(top, key=lambda token: top[token])


def test_echo_scores_the_prompt(client: OpenAI, model: LanguageModel) -> None:
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("hello ab 你 cab")
    ids += generate(model, ids, max_new_tokens=3).tokens
    truth = log_probs(model, ids)[:-1]
    for count in (0, 1):
        found = client.completions.create(
            model="tiny", prompt=ids, max_tokens=count, temperature=0, logprobs=1, echo=True
        )
        (choice,) = found.choices
        assert choice.text.startswith("hello ab 你 cab")
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.top_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == len(ids) + count
        assert choice.logprobs.token_logprobs[:1] == [None]
        want = truth.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        assert choice.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(want, abs=1e-4)
        best = [max(top.values()) for top in choice.logprobs.top_logprobs[1 : len(ids)]]
        assert best == pytest.approx(truth.max(-1).values.tolist(), abs=1e-4)
        # As lm-evaluation-harness tells whether a continuation is the greedy one.
        greedy = [a == b for a, b in zip(choice.logprobs.token_logprobs[1:], best, strict=False)]
        assert greedy == (truth.argmax(-1) == torch.tensor(ids[1:])).tolist()
        assert choice.finish_reason == "length"
        assert found.usage is not None
        assert found.usage.completion_tokens == count


def test_the_token_that_ends_a_text_has_a_log_probability(
    client: OpenAI, model: LanguageModel
) -> None:
    """One entry per token: harnesses score a prompt as all entries but the one generated."""
    end = model.eos_token_ids[0]
    found = client.completions.create(
        model="tiny", prompt=IDS, max_tokens=5, logprobs=1, echo=True, seed=1,
        extra_body={"allowed_token_ids": [end]},
    )  # fmt: skip
    (choice,) = found.choices
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert len(choice.logprobs.token_logprobs) == len(IDS) + 1
    truth = float(log_probs(model, IDS)[-1, end])
    assert choice.logprobs.token_logprobs[-1] == pytest.approx(truth, abs=1e-4)


def test_certified_decode_gives_the_same_tokens(models: dict[str, LanguageModel]) -> None:
    model = models["tiny"]
    screened = {"tiny": screened_model(model)}
    assert model.head.screened is None
    calls: list[int] = []
    copy: Any = screened["tiny"].head.screened
    with (
        listening(lambda hosts: create_api_app(models, hosts=hosts, screened=screened)) as port,
        OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
    ):
        for options in ({"temperature": 0}, {"seed": 4, "top_p": 0.8}):
            texts = []
            for certified in (False, True):
                found = client.completions.create(
                    model="tiny", prompt=PROMPT, max_tokens=9, **options,
                    extra_body={"certified": certified},
                )  # fmt: skip
                texts.append(found.choices[0].text)
                calls.append(copy.report.choices)
            assert texts[0] == texts[1]
        assert calls == [0, 9, 9, 18]
        with pytest.raises(openai.BadRequestError, match="started with --screen"):
            client.completions.create(model="chat", prompt="a", extra_body={"certified": True})


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {"seed": 4, "top_p": 0.8}, {"seed": 4, "guided_regex": "[a-f]{12}"}],
)
def test_certified_log_probabilities_are_the_dense_ones(
    models: dict[str, LanguageModel], options: dict[str, Any], top: int
) -> None:
    screened = {"tiny": screened_model(models["tiny"])}
    asked = {"prompt": IDS, "model": "tiny", "max_tokens": 9, "logprobs": top, **options}
    app = create_api_app(models, hosts={HOST}, screened=screened)
    dense, certified = (
        ask(app, "POST", "/v1/completions", json={**asked, "certified": c}).json()["choices"][0]
        for c in (False, True)
    )
    assert certified["text"] == dense["text"]
    ours, theirs = certified["logprobs"], dense["logprobs"]
    assert ours["tokens"] == theirs["tokens"]
    assert ours["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-5)
    tops = zip(ours["top_logprobs"] or [], theirs["top_logprobs"] or [], strict=True)
    assert [a == pytest.approx(b, abs=1e-5) for a, b in tops] == [True] * (9 if top else 0)
    report = screened["tiny"].head.screened.report  # type: ignore[union-attr]
    assert report.choices == 9, "the tokens come from the copy"


def test_prompt_logprobs(client: OpenAI, model: LanguageModel) -> None:
    found = client.completions.create(
        model="tiny", prompt=IDS, max_tokens=1, extra_body={"prompt_logprobs": 2}
    )
    extra = found.choices[0].model_extra
    assert extra is not None
    first, *rest = extra["prompt_logprobs"]
    assert first is None
    truth = log_probs(model, IDS)
    for row, (id, entry) in enumerate(zip(IDS[1:], rest, strict=True)):
        rank = int((truth[row] > truth[row, id]).sum()) + 1
        assert entry[str(id)]["rank"] == rank
        assert entry[str(id)]["logprob"] == pytest.approx(float(truth[row, id]), abs=1e-4)
        assert len(entry) == 2 + (rank > 2)


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_logprobs_of_a_chat(client: OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": "chat", "messages": [{"role": "user", "content": "what"}], "max_tokens": 1, "n": 2,
        "extra_body": {"prompt_logprobs": 1},
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    found = (whole.model_extra or {})["prompt_logprobs"]
    assert whole.usage is not None
    assert len(found) == whole.usage.prompt_tokens
    if stream:
        chunks = list(client.chat.completions.create(**asked, stream=True))
        assert [(c.model_extra or {}).get("prompt_logprobs") for c in chunks[:2]] == [found, None]


def test_echo_and_prompt_logprobs_have_their_own_numbers(client: OpenAI) -> None:
    for top, other in ((1, 3), (3, 1)):
        found = client.completions.create(
            model="tiny", prompt=IDS, max_tokens=0, echo=True, logprobs=top,
            extra_body={"prompt_logprobs": other},
        )  # fmt: skip
        (choice,) = found.choices
        assert choice.logprobs is not None
        assert choice.logprobs.top_logprobs is not None
        for shown in choice.logprobs.top_logprobs[1:]:
            assert top <= len(shown) <= top + 1
        for entry in (choice.model_extra or {})["prompt_logprobs"][1:]:
            assert other <= len(entry) <= other + 1


def test_streaming_gives_the_same(client: OpenAI) -> None:
    arguments: dict[str, Any] = {
        "model": "tiny", "prompt": [PROMPT, "cab"], "max_tokens": 9, "seed": 5, "n": 2,
        "logprobs": 2, "echo": True, "stop": "z",
    }  # fmt: skip
    whole = client.completions.create(**arguments)
    texts, tokens, offsets = [""] * 4, [[] for _ in range(4)], [[] for _ in range(4)]  # type: ignore[var-annotated]
    reasons: dict[int, str] = {}
    usage = None
    for chunk in client.completions.create(
        **arguments, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for part in chunk.choices:
            texts[part.index] += part.text
            assert part.logprobs is not None
            tokens[part.index] += list(part.logprobs.tokens or [])
            offsets[part.index] += list(part.logprobs.text_offset or [])
            if part.finish_reason:
                reasons[part.index] = part.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices if choice.logprobs]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices if choice.logprobs]
    assert [reasons[i] for i in range(4)] == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_the_stream_ends_with_done(port: int) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "stream": True, "model": "tiny"}
    headers = {"authorization": f"Bearer {KEY}"}
    response = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, headers=headers)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.text.endswith("data: [DONE]\n\n")
    assert all(line.startswith("data: ") for line in response.text.strip().split("\n\n"))


# --- chat -----------------------------------------------------------------------------------------


def test_chat(client: OpenAI, models: dict[str, LanguageModel]) -> None:
    model = models["chat"]
    assert model.chat is not None
    messages: list[Any] = [{"role": "user", "content": "what a thing"}]
    want = generate(model, model.chat.encode(messages), max_new_tokens=6)
    arguments: dict[str, Any] = {"model": "chat", "max_tokens": 6, "temperature": 0}
    found = client.chat.completions.create(messages=messages, **arguments)
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content) == ("assistant", want.text)
    assert (found.object, choice.logprobs) == ("chat.completion", None)
    parts = [{"role": "user", "content": [{"type": "text", "text": "what a thing"}]}]
    again = client.chat.completions.create(messages=parts, **arguments)  # type: ignore[arg-type]
    assert again.choices[0].message == choice.message


def test_a_developer_message_is_a_system_message(
    client: OpenAI, models: dict[str, LanguageModel]
) -> None:
    """For templates that do not know the newer name."""
    assert models["chat"].chat is not None
    assert "developer" not in models["chat"].chat.template
    rest: Any = {"model": "chat", "max_tokens": 6, "temperature": 0}
    found = [
        client.chat.completions.create(
            messages=[{"role": role, "content": "be a"}, {"role": "user", "content": "what"}],  # type: ignore[list-item, misc]
            **rest,
        )
        for role in ("system", "developer")
    ]
    first, second = found
    assert first.usage == second.usage
    assert first.choices[0].message == second.choices[0].message


def test_chat_streaming_and_log_probabilities(client: OpenAI) -> None:
    arguments: dict[str, Any] = {
        "model": "chat",
        "messages": [{"role": "user", "content": "what"}],
        "max_completion_tokens": 5,
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**arguments).choices[0]
    assert whole.logprobs is not None
    entries = whole.logprobs.content
    assert entries
    for entry in entries:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert entry.top_logprobs[0].logprob >= entry.logprob - 1e-9
    text, role = "", None
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**arguments, stream=True):
        (part,) = chunk.choices
        role = role or part.delta.role
        text += part.delta.content or ""
        streamed += (part.logprobs.content or []) if part.logprobs else []
    assert (text, role) == (whole.message.content, "assistant")
    assert streamed == entries


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 100, "prompt": ["a", "b"]}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt"),
        ({"prompt": [1, 300]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": [5] * 65}, "prompt"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"seed": 1.5}, "seed"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"x": 1}}, "stream_options"),
        ({"suffix": "end"}, "suffix"),
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_grammar": "start: x"}, "guided_grammar"),
        ({"guided_json": {"type": "nothing"}}, "guided_json"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"kept": 1}, "kept"),
        ({"prompt": [[]]}, "prompt"),
        ({"stream_options": {"x": True}}, "stream_options"),
        ({"nonsense": 1}, "nonsense"),
        ({"min_p": 2}, "min_p"),
        ({"order": "other"}, "order"),
        ({"suppress_tokens": [300]}, "suppress_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_named(body: dict[str, Any], param: str, stream: bool, port: int) -> None:
    asked = {"model": "tiny", "prompt": "a", "stream": stream, **body}
    response = httpx.post(
        f"http://127.0.0.1:{port}/v1/completions",
        content=json.dumps(asked),
        headers={"authorization": f"Bearer {KEY}", "content-type": "application/json"},
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


def test_stream_options_need_a_stream(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="needs stream"):
        client.completions.create(model="tiny", prompt="a", stream_options={"include_usage": True})


def test_new_tokens_must_fit_the_context(client: OpenAI) -> None:
    given: dict[str, Any] = {"model": "tiny", "extra_body": {"ignore_eos": True}}
    fits = client.completions.create(prompt=[5] * 60, max_tokens=4, **given)
    assert fits.usage is not None
    assert fits.usage.completion_tokens == 4
    with pytest.raises(openai.BadRequestError, match="prompt has 60, and max_tokens asks") as error:
        client.completions.create(prompt=[5] * 60, max_tokens=5, **given)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "max_tokens")
    # The harness asks for one token after a prompt of any length, and drops it.
    full = client.completions.create(prompt=[5] * 64, max_tokens=1, echo=True, logprobs=1, **given)
    assert full.choices[0].logprobs is not None
    assert len(full.choices[0].logprobs.token_logprobs or ()) == 64


def test_a_prompt_can_be_truncated(client: OpenAI) -> None:
    ids = [5 + i % 40 for i in range(90)]

    def asked(prompt: list[int], **more: int) -> Any:
        found = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=4, temperature=0, extra_body=more
        )
        return found.choices[0].text, found.usage

    assert asked(ids, truncate_prompt_tokens=7) == asked(ids[-7:])
    assert asked(ids, truncate_prompt_tokens=-1) == asked(ids[-60:])
    for wrong in (0, -2):
        with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens must be"):
            asked(ids, truncate_prompt_tokens=wrong)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 64"):
        asked(ids, truncate_prompt_tokens=80)


def test_errors_are_the_clients_exceptions(client: OpenAI, port: int) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 64") as error:
        client.completions.create(model="tiny", prompt=[5] * 65)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.BadRequestError, match="not so"):
        client.chat.completions.create(model="chat", messages=[{"role": "system", "content": "no"}])
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="none", prompt="a")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="a")
    stranger = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError), stranger:
        stranger.models.list()


@pytest.mark.parametrize(
    ("role", "got"), [("pirate", "'pirate'"), ("User", "'User'"), (1, "'1'"), (["user"], None)]
)
def test_the_role_of_a_message(client: OpenAI, role: object, got: str | None) -> None:
    messages: Any = [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="chat", messages=messages)
    allowed = "system, developer, user, assistant or tool"
    got = got or repr(str(role))
    assert f"messages[1].role must be {allowed}; got {got}" in str(error.value)
    assert error.value.param == "messages[1].role"
    for known in ("user", "assistant", "tool", "system"):
        messages[1]["role"] = known
        client.chat.completions.create(model="chat", messages=messages, max_tokens=1)


def test_fields_that_ask_for_nothing(client: OpenAI) -> None:
    """Frameworks send them with every request."""
    extra = {"tools": [], "tool_choice": "none", "modalities": ["text"], "suffix": ""}
    found = client.completions.create(model="tiny", prompt="a", max_tokens=1, extra_body=extra)
    assert found.choices
    for name, value in (("tools", [{"type": "function"}]), ("reasoning_effort", "low")):
        with pytest.raises(openai.BadRequestError, match=f"{name} is not supported") as error:
            client.completions.create(model="tiny", prompt="a", extra_body={name: value})
        assert error.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
def test_a_wrong_method(port: int, method: str, path: str, allow: str) -> None:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    response = httpx.request(method, f"http://127.0.0.1:{port}{path}", headers=headers)
    assert (response.status_code, response.headers["allow"]) == (405, allow)
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_other_pages_cannot_ask(port: int) -> None:
    url, body = f"http://127.0.0.1:{port}/v1/completions", {"prompt": "a"}
    for headers in (
        {"origin": "http://evil.example"},
        {"host": "evil.example"},
        {"sec-fetch-site": "cross-site"},
    ):
        headers = {"authorization": f"Bearer {KEY}", **headers}
        assert httpx.post(url, json=body, headers=headers).status_code in (403, 421)


ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
VALUES: list[Any] = [
    None, True, 0, -1, 3, 1.5, 1e308, 2**80, "", "a", "\u0000", "é" * 50, [], [1], [[1, 2]], ["a"],
    {}, {"a": 1}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}},
    [{"role": "user", "content": "a"}], [{"role": 1}], {"5": 3}, "[a-", 'start: "a"',
]  # fmt: skip


def test_no_body_breaks_the_server(port: int) -> None:
    """Random fields with random values: an answer or a refusal in OpenAI's format, never a 5xx."""
    rng = random.Random(5)
    fields = [
        "prompt", "messages", "tokens", "max_tokens", "n", "stop", "seed", "stream", "echo", "kept",
        "logprobs", "top_logprobs", "temperature", "top_p", "top_k", "min_p", "logit_bias", "order",
        "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "certified", "prompt_logprobs", "add_special_tokens", "mirostat", "dry_multiplier",
        "allowed_token_ids", "bad_words_ids", "sequence_bias", "forced_bos_token_id", "best_of",
    ]  # fmt: skip
    statuses: Counter[int] = Counter()
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
        for _ in range(400):
            route = rng.choice([ROUTES[0], *ROUTES])
            body: dict[str, Any] = {"model": rng.choice(["tiny", "tiny", "chat"])}
            if rng.random() < 0.8:
                body |= {"prompt": "ab", "max_tokens": 3} if route == ROUTES[0] else {}
            for name in rng.sample(fields, rng.randrange(4)):
                body[name] = rng.choice(VALUES)
            response = client.post(route, content=json.dumps(body))
            statuses[response.status_code] += 1
            assert response.status_code in (200, 400, 404), (body, response.text)
            if response.status_code != 200:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert client.get("/health").status_code == 200
    assert statuses[200] > 20
    assert statuses[400] > 100


# --- many at once, and clients that leave ---------------------------------------------------------


def test_fifty_streams_at_once_are_those_of_one(port: int, model: LanguageModel) -> None:
    want = [
        generate(
            model, PROMPT, Sampler(order="vllm", seed=seed, eos_token_id=[2]), max_new_tokens=12
        ).text
        for seed in range(50)
    ]
    first: dict[int, float] = {}
    last: dict[int, float] = {}

    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        text = ""
        stream = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=12, seed=seed, stream=True
        )
        async for chunk in stream:
            first.setdefault(seed, time.monotonic())
            last[seed] = time.monotonic()
            text += chunk.choices[0].text
        return text

    async def main() -> list[str]:
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(50)))

    assert finish(main()) == want
    assert max(first.values()) < max(last.values()), "a stream starts before all others have ended"


class SlowBody:
    """A body that waits in every call, and counts them."""

    def __init__(self, model: LanguageModel, seconds: float) -> None:
        self.model, self.seconds, self.calls = model, seconds, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        time.sleep(self.seconds)
        return self.model.body(*args)


def test_a_client_that_leaves_ends_the_work(model: LanguageModel) -> None:
    slow = SlowBody(model, 0.02)
    slowed = replace(model, body=slow, max_length=10_000, eos_token_ids=())  # it goes on and on
    with listening(lambda hosts: create_api_app({"slow": slowed}, hosts=hosts)) as port:
        url = f"http://127.0.0.1:{port}/v1"
        with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asked: dict[str, Any] = {"model": "slow", "prompt": PROMPT, "max_tokens": 5000}
            with client.completions.create(**asked, stream=True) as stream:
                assert next(stream).choices[0].finish_reason is None
            with pytest.raises(openai.APITimeoutError):
                client.completions.create(**asked, timeout=0.3)
            time.sleep(0.3)
            calls = slow.calls
            time.sleep(0.3)
            assert slow.calls == calls, "no work goes on"
            assert client.completions.create(**(asked | {"max_tokens": 1})).choices


def test_too_many_requests(model: LanguageModel) -> None:
    slowed = replace(model, body=SlowBody(model, 0.05), max_length=10_000, eos_token_ids=())
    limits = replace(API_LIMITS, waiting=1)
    with listening(lambda hosts: create_api_app({"m": slowed}, hosts=hosts, limits=limits)) as port:
        url = f"http://127.0.0.1:{port}/v1"
        with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="m", prompt=PROMPT, max_tokens=500, stream=True
            )
            with pytest.raises(openai.RateLimitError) as error:
                client.completions.create(model="m", prompt=PROMPT)
            assert int(error.value.response.headers["retry-after"]) >= 1
            stream.close()


def test_a_deadline_ends_a_stream_with_an_error(model: LanguageModel) -> None:
    slowed = replace(model, body=SlowBody(model, 0.05), max_length=10_000, eos_token_ids=())
    limits = replace(API_LIMITS, seconds=0.4)
    with listening(lambda hosts: create_api_app({"m": slowed}, hosts=hosts, limits=limits)) as port:
        url = f"http://127.0.0.1:{port}/v1"
        with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asked: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 500}
            stream = client.completions.create(**asked, stream=True)
            with pytest.raises(openai.APIError, match="no answer within"):
                list(stream)


def test_the_page_and_the_api_share_one_worker(
    models: dict[str, LanguageModel], page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lmhead explore` answers both; their jobs run in one thread, so models are safe."""
    from lmhead.server import app as app_module

    jobs: list[Worker] = []

    class Counted(Worker):
        def stream(self, *args: Any, **options: Any) -> Any:
            jobs.append(self)
            return super().stream(*args, **options)

    monkeypatch.setattr(app_module, "Worker", Counted)
    app = make_app(page, models=models)
    asked = {"model": "tiny", "prompt": PROMPT}
    assert ask(app, "POST", "/api/next", json=asked).status_code == 200
    found = ask(app, "POST", "/v1/completions", json={**asked, "max_tokens": 5, "temperature": 0})
    assert (
        found.json()["choices"][0]["text"]
        == generate(models["tiny"], PROMPT, max_new_tokens=5).text
    )
    assert ask(app, "GET", "/v1/models").json()["data"][0]["id"] == "tiny"
    assert len(jobs) == 2
    assert jobs[0] is jobs[1]


# --- tokenizer, health, metrics -------------------------------------------------------------------


def test_tokenizer_and_metrics(port: int, model: LanguageModel) -> None:
    assert model.tokenizer is not None
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers) as client:
        found = client.post("/tokenize", json={"model": "tiny", "prompt": PROMPT}).json()
        ids = model.tokenizer.encode(PROMPT)
        assert found == {"tokens": ids, "count": len(ids), "max_model_len": 64}
        text = client.post("/detokenize", json={"model": "tiny", "tokens": ids}).json()
        assert text == {"prompt": model.tokenizer.decode(ids)}
        messages = [{"role": "user", "content": "what"}]
        chat = client.post("/tokenize", json={"model": "chat", "messages": messages}).json()
        asked = {"model": "chat", "messages": messages, "max_tokens": 0}
        usage = client.post("/v1/chat/completions", json=asked).json()["usage"]
        assert chat["count"] == len(chat["tokens"]) == usage["prompt_tokens"]
        for path, body, param in (
            ("/tokenize", {"prompt": 1}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
            ("/tokenize", {"prompt": "a", "text": "a"}, "text"),
            ("/detokenize", {"tokens": [300]}, "tokens"),
            ("/detokenize", {}, "tokens"),
        ):
            refused = client.post(path, json={"model": "tiny", **body})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        info = client.get("/tokenizer_info?model=chat").json()
        assert info["chat_template"] == TEMPLATE
        assert client.get("/health").json()["status"] == "ok"
        lines = client.get("/metrics").text.splitlines()
        again = client.get("/metrics").text.splitlines()
        assert client.get("/nothing").status_code == 404

    def value(lines: list[str], name: str) -> float:
        return float(next(line for line in lines if line.startswith(name)).split()[-1])

    assert value(lines, 'lmhead_requests_total{path="/health",status="200"}') >= 1
    scraped = 'lmhead_requests_total{path="/metrics",status="200"}'
    assert value(again, scraped) >= 1
    assert value(lines, "lmhead_prompt_tokens_total") >= 0
    assert value(lines, "lmhead_requests_running") >= 0


def test_metrics_have_a_bounded_number_of_lines() -> None:
    from lmhead.server.guard import RequestRecord

    metrics = Metrics()
    metrics.paths = frozenset({"/health"})
    for path in ("/health", "/a", "/b"):
        metrics.add(RequestRecord("-", "GET", path, 404, 0.5))
    text = metrics.text(running=0)
    assert 'lmhead_requests_total{path="other",status="404"} 2' in text
    assert "lmhead_request_seconds_total 1.5" in text


def test_threads_end_with_the_server(models: dict[str, LanguageModel]) -> None:
    before = threading.active_count()
    with listening(lambda hosts: create_api_app(models, hosts=hosts)) as port:
        httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"model": "tiny", "prompt": "a"})
    time.sleep(0.2)
    assert threading.active_count() <= before


# --- structured output ----------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def long_client(models: dict[str, LanguageModel]) -> Iterator[OpenAI]:
    """The same models without a bound on their length, for JSON spelt in bytes."""
    longer = {name: replace(model, max_length=None) for name, model in models.items()}
    screened = {name: screened_model(model) for name, model in longer.items()}
    with (
        listening(lambda hosts: create_api_app(longer, hosts=hosts, screened=screened)) as port,
        OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as found,
    ):
        yield found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("certified", [False, True])
def test_json_schema(long_client: OpenAI, stream: bool, certified: bool) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    for seed in range(3):
        asked: dict[str, Any] = {
            "model": "chat", "messages": [{"role": "user", "content": "who"}], "seed": seed,
            "max_tokens": 200, "response_format": form, "extra_body": {"certified": certified},
        }  # fmt: skip
        if stream:
            chunks = long_client.chat.completions.create(**asked, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            choice = long_client.chat.completions.create(**asked).choices[0]
            assert choice.finish_reason == "stop"
            text = choice.message.content or ""
        found = json.loads(text)
        assert found["name"] in ("Ann", "Bo")
        assert found["age"] <= 99


def test_guided_fields(long_client: OpenAI) -> None:
    def text(**extra: Any) -> str:
        found = long_client.completions.create(
            model="tiny", prompt="hello", max_tokens=100, seed=1, extra_body=extra
        )
        return found.choices[0].text

    assert text(guided_regex="[0-9]{2}-[0-9]") == pytest.approx(text(guided_regex="[0-9]{2}-[0-9]"))
    assert len(text(guided_regex="[0-9]{2}-[0-9]")) == 4
    assert text(guided_choice=["one", "two"]) in ("one", "two")
    assert text(guided_grammar='start: "a" "b"+ "c"').startswith("ab")
    assert json.loads(text(guided_json=PERSON))["name"] in ("Ann", "Bo")
    assert text(response_format={"type": "text"}) == text()


def test_a_json_object(long_client: OpenAI) -> None:
    found = long_client.completions.create(
        model="tiny", prompt="hello", max_tokens=30, temperature=0,
        extra_body={"response_format": {"type": "json_object"}},
    )  # fmt: skip
    assert found.choices[0].text.startswith("{")


@pytest.mark.parametrize("stream", [False, True])
def test_kept(client: OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "prompt": PROMPT, "max_tokens": 6, "seed": 1,
        "extra_body": {"top_k": 3, "kept": True}, "logprobs": 0,
    }  # fmt: skip
    if stream:
        chunks = list(client.completions.create(**asked, stream=True))
        kept = [entry for c in chunks for entry in (c.choices[0].model_extra or {})["kept"]]
    else:
        kept = (client.completions.create(**asked).choices[0].model_extra or {})["kept"]
    assert [entry["count"] for entry in kept] == [3] * 6
    assert all(len(entry["ids"]) == 3 for entry in kept)
    asked["extra_body"] = {"kept": True}
    free = (client.completions.create(**asked).choices[0].model_extra or {})["kept"]
    assert free[0] == {"count": 300, "ids": None}
