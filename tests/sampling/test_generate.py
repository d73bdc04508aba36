"""Generation: the tokens of the plain loop, alone or in a batch; when it stops; what it says."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare import assert_close
from llama2c_files import tiny_model
from shared_data import STORIES, needs
from torch import Tensor
from torch_watch import no_tensor_of

from lmhead import LMHead
from lmhead.models import LanguageModel, load_llama2c
from lmhead.nn import LlamaBody, LlamaConfig
from lmhead.sampling.events import TokenEvent
from lmhead.sampling.generation import generate, stream_generate

with_stories = needs(STORIES)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Random weights, 300 tokens, sees 64 tokens; never says that it is done."""
    return replace(tiny_model(tmp_path_factory.mktemp("tiny")), eos_token_ids=())


def plain_loop(model: LanguageModel, ids: list[int], count: int) -> list[int]:
    """Every step reads the whole text again and builds all logits."""
    ids = list(ids)
    for _ in range(count):
        mask = torch.ones(1, len(ids), dtype=torch.bool)
        hidden, _ = model.body(torch.tensor([ids]), None, mask)
        ids.append(int((hidden[0, -1] @ model.head.weight.T).argmax()))
    return ids[-count:]


# --- tokens ---------------------------------------------------------------------------------------

PROMPTS = [[1], [5, 200, 31], [1, 270, 4, 4, 299, 17, 88], [7, 7]]


def test_greedy_is_the_plain_loop(tiny: LanguageModel) -> None:
    for prompt in PROMPTS:
        made = generate(tiny, prompt, max_new_tokens=20)
        assert made.tokens == plain_loop(tiny, prompt, 20)
        assert (made.finish_reason, made.prompt_ids) == ("length", tuple(prompt))


def test_a_row_says_the_same_alone_and_in_a_batch(tiny: LanguageModel) -> None:
    together = generate(tiny, PROMPTS, max_new_tokens=20)
    for prompt, made in zip(PROMPTS, together, strict=True):
        alone = generate(tiny, prompt, max_new_tokens=20)
        assert (made.tokens, made.text) == (alone.tokens, alone.text)
        assert_close(torch.tensor(made.log_probs), torch.tensor(alone.log_probs), atol=1e-4)


def test_rows_finish_one_by_one(tiny: LanguageModel) -> None:
    """Each row has its own stop, and the others go on as if nothing had happened."""
    free = generate(tiny, PROMPTS, max_new_tokens=20)
    stops = [made.tokens[3 + 2 * row] for row, made in enumerate(free)]
    for prompt, made in zip(
        PROMPTS, generate(tiny, PROMPTS, max_new_tokens=20, stop=stops), strict=True
    ):
        alone = generate(tiny, prompt, max_new_tokens=20, stop=stops)
        assert (made.tokens, made.finish_reason) == (alone.tokens, "stop")
        assert made.stopped_by == made.tokens[-1]
        assert made.stopped_by in stops
        assert not set(made.tokens[:-1]) & set(stops)


def test_finished_rows_cost_nothing(tiny: LanguageModel) -> None:
    sizes: list[tuple[int, ...]] = []

    def watched(ids: Tensor, cache: Any, mask: Tensor) -> Any:
        sizes.append(tuple(ids.shape))
        return tiny.body(ids, cache, mask)

    model = replace(tiny, body=watched)
    stop = generate(tiny, PROMPTS[1], max_new_tokens=3).tokens[2]
    first, second = generate(model, [PROMPTS[1], PROMPTS[2]], max_new_tokens=6, stop=stop)
    assert (len(first.tokens), len(second.tokens)) == (3, 6)
    assert sizes == [(2, 7), (2, 1), (2, 1), (1, 1), (1, 1), (1, 1)]


def test_text_is_that_of_the_tokens(tiny: LanguageModel) -> None:
    made = generate(tiny, "hello", max_new_tokens=40)
    assert tiny.tokenizer is not None
    pieces = b"".join(tiny.tokenizer.token_bytes(token) for token in made.tokens)
    assert made.text == pieces.decode("utf-8", "replace")
    assert list(made.prompt_ids) == tiny.tokenizer.encode("hello")


def test_prompts_of_every_kind(tiny: LanguageModel) -> None:
    def tokens(prompt: Any) -> Any:
        made = generate(tiny, prompt, max_new_tokens=4)
        return [row.tokens for row in made] if isinstance(made, list) else made.tokens

    assert tiny.tokenizer is not None
    ids = tiny.tokenizer.encode("hello")
    expected = tokens(ids)
    for same in ("hello", tuple(ids), torch.tensor(ids)):
        assert tokens(same) == expected
    for batch in (["hello"], [ids], (torch.tensor(ids),), torch.tensor([ids])):
        assert tokens(batch) == [expected]
    assert tokens(["hello", [1]]) == [expected, tokens([1])]


def test_a_model_without_a_tokenizer_speaks_in_ids(tiny: LanguageModel) -> None:
    made = generate(replace(tiny, tokenizer=None), [1], max_new_tokens=4)
    assert (made.text, made.tokens) == ("", generate(tiny, [1], max_new_tokens=4).tokens)


def test_a_dense_head_gives_the_same(tiny: LanguageModel) -> None:
    dense: Any = SimpleNamespace(
        body=tiny.body,
        head=lambda hidden: hidden @ tiny.head.weight.T,
        eos_token_ids=(),
        tokenizer=tiny.tokenizer,
    )
    ours, theirs = (generate(m, PROMPTS[2], max_new_tokens=12, logprobs=3) for m in (tiny, dense))
    assert (ours.tokens, ours.text) == (theirs.tokens, theirs.text)
    for a, b in zip(ours.events, theirs.events, strict=True):
        assert [id for id, _ in a.top] == [id for id, _ in b.top]
        assert_close(torch.tensor(a.top), torch.tensor(b.top), atol=1e-5)
        assert_close(a.log_prob, b.log_prob, atol=1e-5)


def test_log_probs_of_half_types_are_not_rounded_to_them(tiny: LanguageModel) -> None:
    body = LlamaBody(tiny.body.config).bfloat16()  # type: ignore[attr-defined]
    body.load_state_dict(tiny.body.state_dict())  # type: ignore[attr-defined]
    head = LMHead.tied(body.embedding)
    model = replace(tiny, body=body, head=head)
    made = generate(model, PROMPTS[2], max_new_tokens=1, logprobs=3).events[0]
    ids = torch.tensor(PROMPTS[2:3])
    hidden, _ = body(ids)
    truth = (hidden[0, -1].double() @ head.weight.double().T).log_softmax(-1)
    assert_close(made.log_prob, truth.max(), atol=1e-4)
    assert_close(torch.tensor([value for _, value in made.top]), truth.topk(3).values, atol=1e-4)


def test_no_logits_are_built() -> None:
    torch.manual_seed(0)
    vocab = 20_000
    body = LlamaBody(LlamaConfig(vocab, 16, 24, 1, 2, 2))
    model: Any = SimpleNamespace(
        body=body, head=LMHead.tied(body.embedding), eos_token_ids=(), tokenizer=None
    )
    model.head.max_bytes = 2**20
    prompts = [[i] * (i + 1) for i in range(16)]
    with no_tensor_of(16, vocab):
        generate(model, prompts, max_new_tokens=3, logprobs=4)


def test_gradients_are_left_alone(tiny: LanguageModel) -> None:
    """Neither is a graph built, nor is the caller's mode changed between two tokens."""
    body = LlamaBody(LlamaConfig(50, 16, 24, 1, 2, 2))
    model: Any = replace(tiny, body=body, head=LMHead.tied(body.embedding), tokenizer=None)
    for _ in stream_generate(model, [1], max_new_tokens=3):
        assert torch.is_grad_enabled()


# --- log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 5, 300])
def test_log_probs_are_those_of_the_model(tiny: LanguageModel, k: int) -> None:
    made = generate(tiny, [1, 5], max_new_tokens=6, logprobs=k)
    ids = torch.tensor([[1, 5, *made.tokens[:-1]]])
    hidden, _ = tiny.body(ids, None, torch.ones_like(ids, dtype=torch.bool))
    truth = (hidden[0, 1:].double() @ tiny.head.weight.double().T).log_softmax(-1)
    expected = truth.gather(-1, torch.tensor(made.tokens)[:, None])[:, 0]
    assert_close(torch.tensor(made.log_probs), expected, atol=1e-5)
    for event, row in zip(made.events, truth, strict=True):
        assert len(event.top) == k
        if k:
            assert event.top[0] == (event.token, event.log_prob)
            assert [id for id, _ in event.top] == row.topk(k).indices.tolist()
            values = torch.tensor([log_prob for _, log_prob in event.top])
            assert_close(values, row.topk(k).values, atol=1e-4)


# --- how far, and how ---------------------------------------------------------------------------


def test_the_model_can_see_only_so_much(tiny: LanguageModel) -> None:
    short, long = generate(tiny, [[1], [1] * 62], max_new_tokens=1000, eos_token_ids=())
    assert (len(short.tokens), len(long.tokens)) == (63, 2)
    assert short.finish_reason == long.finish_reason == "length"
    full = generate(tiny, [1] * 64, max_new_tokens=5)
    assert (full.tokens, full.finish_reason) == ([], "length")
    with pytest.raises(ValueError, match=r"prompt must have at most 64 tokens.*got 65"):
        generate(tiny, [[1], [1] * 65], max_new_tokens=5)


def test_stream_is_given_every_event(tiny: LanguageModel) -> None:
    given: list[TokenEvent] = []
    options: dict[str, Any] = {"max_new_tokens": 6, "logprobs": 2}
    made = generate(tiny, PROMPTS, stream=given.append, **options)
    events = list(stream_generate(tiny, PROMPTS, **options))
    assert given == events
    assert [event.row for event in events] == [0, 1, 2, 3] * 6
    for number, row in enumerate(made):
        assert row.events == tuple(event for event in events if event.row == number)
        assert row.text == "".join(event.text for event in row.events)


def test_nothing_is_computed_ahead(tiny: LanguageModel) -> None:
    calls = 0

    def counted(ids: Tensor, cache: Any, mask: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return tiny.body(ids, cache, mask)

    events = stream_generate(replace(tiny, body=counted), [1], max_new_tokens=50)
    assert calls == 0
    taken = list(itertools.islice(events, 3))
    assert calls == 3
    events.close()  # type: ignore[attr-defined]
    assert list(events) == []
    assert [event.token for event in taken] == plain_loop(tiny, [1], 3)


def test_other_errors_are_not_swallowed(tiny: LanguageModel) -> None:
    def fail(event: TokenEvent) -> None:
        raise RuntimeError(str(event.token))

    with pytest.raises(RuntimeError):
        generate(tiny, [1], max_new_tokens=3, stream=fail)


# --- samplers -------------------------------------------------------------------------------------


@dataclass
class Sampled:
    token: Tensor
    log_prob: Tensor
    raw_log_prob: Tensor
    state: Any


class Stub:
    """Draws by noise that belongs to (position, id), and checks its arguments."""

    def __init__(self, prompts: list[list[int]], seeds: Sequence[int] = (0, 0, 0, 0)) -> None:
        self.prompts, self.seeds = prompts, list(seeds)
        self.calls: list[int] = []

    def select(self, rows: Tensor) -> "Stub":
        keep = rows.tolist()
        chosen = Stub([self.prompts[i] for i in keep], [self.seeds[i] for i in keep])
        chosen.calls = self.calls
        return chosen

    def __call__(
        self,
        logits: Any,
        context: Tensor,
        position: Tensor,
        *,
        prompt_length: Tensor,
        context_mask: Tensor,
        state: Any,
    ) -> Sampled:
        self.calls.append(len(context))
        assert len(self.prompts) == len(context) == len(context_mask)
        lengths = torch.tensor([len(prompt) for prompt in self.prompts])
        assert torch.equal(prompt_length, lengths)
        assert torch.equal(position, context_mask.sum(-1))
        new = int(position[0] - prompt_length[0])
        scores = logits.gather(-1, _all(logits))
        for row, prompt in enumerate(self.prompts):
            ids_so_far = context[row][context_mask[row]].tolist()
            assert ids_so_far[: len(prompt)] == prompt
            noise = torch.Generator().manual_seed(1000 * self.seeds[row] + int(position[row]))
            scores[row] -= torch.rand(300, generator=noise).log().neg().log()
        token = scores.argmax(-1)
        counts = torch.zeros(len(context)) if state is None else state[0]
        assert counts.tolist() == [new] * len(context)  # every row's own, also when some have left
        raw = logits.log_softmax(-1).gather(-1, token[:, None])[:, 0]
        return Sampled(token, raw + 1, raw, (counts + 1, [None]))


def _all(logits: Any) -> Tensor:
    return torch.arange(logits.shape[-1]).expand(len(logits), -1)


@pytest.mark.parametrize("seeds", [(0, 0, 0, 0), (4, 3, 2, 1)])
def test_a_sampler_gets_context_and_position(tiny: LanguageModel, seeds: tuple[int, ...]) -> None:
    sampler = Stub(PROMPTS, seeds)
    options: dict[str, Any] = {"max_new_tokens": 12, "stop": list(range(0, 300, 9))}
    together = generate(tiny, PROMPTS, sampler, logprobs=2, **options)
    assert len(set(sampler.calls)) > 1, "some row should have left before the others"
    for prompt, seed, made in zip(PROMPTS, seeds, together, strict=True):
        alone = generate(tiny, prompt, Stub([prompt], [seed]), **options)
        assert (made.tokens, made.text) == (alone.tokens, alone.text)
        for event in made.events:
            assert event.sampler_log_prob is not None
            assert event.sampler_log_prob == pytest.approx(event.log_prob + 1, abs=1e-5)
            known = dict(event.top)
            assert event.log_prob == pytest.approx(known.get(event.token, event.log_prob), abs=1e-5)
            assert len(event.top) == 2
    assert generate(tiny, PROMPTS[0], max_new_tokens=1).events[0].sampler_log_prob is None


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompt": []}, ValueError, r"prompt must have at least one token.*got \[\]"),
        ({"prompt": [[1], []]}, ValueError, "prompt must have at least one token"),
        ({"prompt": 5}, TypeError, "prompt must be text, a list of ids.*got int"),
        ({"prompt": [1, -2]}, ValueError, "an id of prompt must be at least 0; got -2"),
        ({"prompt": [1, 2.0]}, TypeError, "an id of prompt must be an integer; got float"),
        ({"prompt": [1, "a"]}, TypeError, "an id of prompt must be an integer; got str"),
        ({"prompt": ["a", 1]}, TypeError, "prompt must be a list of ids; got int"),
        ({"prompt": torch.zeros(0, 3)}, ValueError, r"not empty; got \(0, 3\)"),
        ({"prompt": torch.ones(3)}, TypeError, "prompt must be integers"),
        ({"prompt": [300]}, ValueError, r"ids must be in \[0, 300\); got 300"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens must be at least 0; got -1"),
        ({"max_new_tokens": 2.0}, TypeError, "max_new_tokens must be an integer"),
        ({"logprobs": -1}, ValueError, "logprobs must be at least 0; got -1"),
        ({"logprobs": 301}, ValueError, "logprobs must be at most 300, .*got 301"),
        ({"stop": ""}, ValueError, "stop must hold no empty string"),
        ({"stop": ["a", ""]}, ValueError, "stop must hold no empty string"),
        ({"stop": 1.5}, TypeError, "stop must be a string, an id, or a list of both; got float"),
        ({"stop": [-1]}, ValueError, "an id of stop must be at least 0; got -1"),
        ({"eos_token_ids": 2}, TypeError, "eos_token_ids must be a list of ids; got int"),
        ({"sampler": "greedy"}, TypeError, "sampler must be callable or None; got str"),
    ],
)
def test_wrong_arguments(
    tiny: LanguageModel, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    whole: dict[str, Any] = {"prompt": [1], "max_new_tokens": 2} | options
    with pytest.raises(error, match=message):
        generate(tiny, **whole)


def test_arguments_are_checked_before_the_first_token(tiny: LanguageModel) -> None:
    with pytest.raises(ValueError, match="stop must hold no empty string"):
        stream_generate(tiny, [1], max_new_tokens=3, stop="")


def test_text_needs_a_tokenizer(tiny: LanguageModel) -> None:
    model = replace(tiny, tokenizer=None)
    with pytest.raises(ValueError, match="prompt must be ids for a model without a tokenizer"):
        generate(model, "hello", max_new_tokens=3)
    with pytest.raises(ValueError, match="stop must be ids for a model without a tokenizer"):
        generate(model, [1], max_new_tokens=3, stop=["end"])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dense", [True, False])
def test_logits_without_a_largest_one_are_an_error(
    tiny: LanguageModel, value: float, dense: bool
) -> None:
    bias = torch.full((300,), value)
    head = LMHead(16, 300, bias=True)
    head.bias = torch.nn.Parameter(bias)
    model: Any = SimpleNamespace(
        body=tiny.body,
        head=(lambda hidden: bias.expand(len(hidden), -1)) if dense else head,
        eos_token_ids=(),
        tokenizer=None,
    )
    with pytest.raises(ValueError, match=r"logits must have a finite maximum.*after \[1, 5\]"):
        generate(model, [1, 5], max_new_tokens=2)


# --- a real model ---------------------------------------------------------------------------------

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball. She wanted to play with it, but it was too high."
)


@with_stories
def test_a_story() -> None:
    model = load_llama2c(STORIES)
    made = generate(model, [1], max_new_tokens=120)
    assert made.text.startswith(STORY)
    assert made.tokens == plain_loop(model, [1], 120)
    assert generate(model, "", max_new_tokens=120).tokens == made.tokens


@with_stories
def test_stories_together_and_alone() -> None:
    model = load_llama2c(STORIES)
    prompts = ["Once upon a time", "", "Tom and his dog went to the big", "Lily"]
    options: dict[str, Any] = {"max_new_tokens": 60, "stop": [" sad", "happy"]}
    together = generate(model, prompts, **options)
    for prompt, made in zip(prompts, together, strict=True):
        alone = generate(model, prompt, **options)
        assert (made.tokens, made.text) == (alone.tokens, alone.text)
        assert " sad" not in made.text
        assert "happy" not in made.text


@with_stories
def test_a_sentence_of_a_story() -> None:
    model = load_llama2c(STORIES)
    made = generate(model, "Once upon a time", max_new_tokens=60, stop=".")
    assert made.text == ", there was a little girl named Lily"
    assert made.stopped_by == "."
