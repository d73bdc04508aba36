"""Continuous batching: requests share steps, and none can tell."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import hf_folders
from tiny_models import tiny

from lmhead.cli.cmd_serve import screened_model
from lmhead.models import LanguageModel, open_model
from lmhead.sampling import Grammar, Sampler, TokenEvent
from lmhead.sampling.generation_loop import GenerationTask
from lmhead.server.batch_engine import BatchEngine

Stream = Iterator[list[TokenEvent]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return tiny(tmp_path_factory.mktemp("tiny"))


def task(
    model: LanguageModel,
    prompts: list[list[int]],
    sampler: Sampler | None = None,
    *,
    count: int = 12,
    grammar: Grammar | None = None,
    logprobs: int = 0,
) -> GenerationTask:
    return GenerationTask(model, prompts, sampler, count, None, logprobs, (), grammar)


def finish(stream: Stream) -> list[TokenEvent]:
    return [event for events in stream for event in events]


def shown(event: TokenEvent) -> tuple[Any, ...]:
    ids = [id for id, _ in event.top]
    return event.row, event.token, event.text, event.finish_reason, event.stopped_by, ids


def random_tasks(model: LanguageModel, screened: LanguageModel) -> list[GenerationTask]:
    """Requests of all kinds: greedy, sampled, constrained, certified, with n > 1."""
    rng = random.Random(3)
    options: list[dict[str, Any]] = [
        {}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_p": 0.5, "temperature": 1.5},
        {"top_k": 3}, {"min_p": 0.1}, {"mirostat": 2}, {"frequency_penalty": 0.5},
        {"logit_bias": {40: 5.0}}, {"temperature": 0.0}, {"repetition_penalty": 1.3, "top_p": 0.8},
    ]  # fmt: skip
    made = []
    for seed in range(24):
        n = rng.choice([1, 1, 2])
        prompt = [1, *(rng.randrange(35, 128) for _ in range(rng.randrange(1, 20)))]
        given = rng.choice([None, *options])
        sampler = None
        if given is not None:
            sampler = Sampler(order="vllm", seed=[seed * 10 + i for i in range(n)], **given)
        decoder = model
        if sampler is not None and rng.random() < 0.3 and "mirostat" not in (given or {}):
            decoder = screened
        grammar = Grammar.regex("[a-f]{3,30}") if rng.random() < 0.3 else None
        count = rng.randrange(1, 30)
        logprobs = rng.choice([0, 2])
        made.append(
            task(decoder, [prompt] * n, sampler, count=count, grammar=grammar, logprobs=logprobs)
        )
    return made


def test_company_changes_no_token(model: LanguageModel) -> None:
    """Each request alone, and all of them joining and leaving at random: the same tokens."""
    screened = screened_model(model)
    want = [finish(BatchEngine(model).stream(one)) for one in random_tasks(model, screened)]
    rng = random.Random(4)
    engine = BatchEngine(model)
    waiting = list(enumerate(random_tasks(model, screened)))
    running: list[tuple[int, Stream]] = []
    found: dict[int, list[TokenEvent]] = {}
    largest = 0
    while waiting or running:
        if waiting and rng.random() < 0.4:
            number, one = waiting.pop(rng.randrange(len(waiting)))
            running.append((number, engine.stream(one)))
        rng.shuffle(running)
        for entry in list(running):
            number, stream = entry
            events = next(stream, None)
            if events is None:
                running.remove(entry)
            else:
                found.setdefault(number, []).extend(events)
        largest = max(largest, len(engine.rows))
    assert largest > 8
    for number, events in enumerate(want):
        assert [shown(event) for event in found[number]] == [shown(event) for event in events]
        ours, theirs = ([e.log_prob for e in some] for some in (found[number], events))
        error = max(event.log_prob_error for event in events)
        assert ours == pytest.approx(theirs, abs=1e-5 + 2 * error)
    assert not engine.rows


def test_requests_share_steps(model: LanguageModel) -> None:
    engine = BatchEngine(model)
    streams = [engine.stream(task(model, [[1, 40 + i]])) for i in range(10)]
    for _ in range(13):
        for stream in streams:
            next(stream)
    assert engine.steps == 12, "twelve tokens each, ten requests"


def test_a_long_prompt_does_not_hold_up_others(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is processed in parts; between two parts the others make a step, and no token changes."""
    monkeypatch.setattr("lmhead.nn.batch_decode.PART", 4)
    ids = [1, *range(40, 58)]  # five parts
    want = finish(BatchEngine(model).stream(task(model, [ids])))
    engine = BatchEngine(model)
    other = engine.stream(task(model, [[1, 40]], count=30))
    next(other)
    long = engine.stream(task(model, [ids]))
    for steps in range(1, 5):
        assert next(long) == []
        assert next(other)
        assert engine.steps == steps
    assert [event.token for event in finish(long)] == [event.token for event in want]
    assert len(finish(other)) == 30 - 4


def test_a_new_request_does_not_wait(model: LanguageModel) -> None:
    engine = BatchEngine(model)
    long = engine.stream(task(model, [[1, 40]], count=40))
    for _ in range(6):
        next(long)
    short = engine.stream(task(model, [[1, 41]], count=1))
    assert next(short) == []
    assert next(short)[0].finish_reason == "length"
    assert next(short, None) is None
    assert len(list(long)) == 35


def test_a_request_that_is_dropped_leaves(model: LanguageModel) -> None:
    engine = BatchEngine(model)
    one, other = (engine.stream(task(model, [[1, 40 + i]], count=40)) for i in range(2))
    next(one), next(other)
    assert len(engine.rows) == 2
    next(other)
    one.close()  # type: ignore[attr-defined]
    assert len(engine.rows) == 1
    assert len(list(other)) == 39


def test_an_error_ends_only_its_own_request(model: LanguageModel) -> None:
    """All tokens forbidden in one request, which shares its sweep with others."""

    class Broken(torch.nn.Module):
        vocab_size = model.head.vocab_size

        def forward(self, hidden: torch.Tensor) -> Any:
            return model.head(hidden) * torch.nan

    engine = BatchEngine(model)
    bad = engine.stream(task(replace(model, head=Broken()), [[1, 40]]))  # type: ignore[arg-type]
    good = engine.stream(task(model, [[1, 41]]))
    next(good), next(good)
    with pytest.raises(ValueError, match="finite"):
        list(bad)
    assert len(list(good)) == 11


def test_choices_of_one_prompt_share_its_processing(model: LanguageModel) -> None:
    calls: list[int] = []
    body: Any = model.body
    hook = body.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[1]))
    try:
        found = finish(BatchEngine(model).stream(task(model, [[1, 40, 41]] * 4, count=3)))
    finally:
        hook.remove()
    assert calls == [3]
    assert len({event.token for event in found if event.row == 0}) >= 1
    assert [e.token for e in found if e.row == 0] == [e.token for e in found if e.row == 3]


def test_bodies_of_transformers_take_turns(tmp_path: Path) -> None:
    """Their arithmetic depends on the batch: every row is generated in a batch of one."""
    hf_folders.write(tmp_path, "gpt2")
    model = open_model(tmp_path)
    engine = BatchEngine(model)
    assert engine.decoder is None
    prompts = [[1, 40], [1, 50, 60, 70]]
    both = finish(engine.stream(task(model, prompts, Sampler(seed=[1, 2]))))
    for row, prompt in enumerate(prompts):
        alone = finish(engine.stream(task(model, [prompt], Sampler(seed=row + 1))))
        assert [replace(e, row=row) for e in alone] == [e for e in both if e.row == row]


def test_kept_tokens(model: LanguageModel) -> None:
    sampler = Sampler(seed=[1], top_k=4)
    found = finish(BatchEngine(model).stream(task(model, [[1, 40]], sampler), kept=True))
    for event in found:
        assert event.kept is not None
        assert len(event.kept) == 4
        assert event.token in event.kept
