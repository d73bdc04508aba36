"""Structured output: every text is valid, and the tokens are those of dense decoding."""

import json
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny

from lmhead.cli.cmd_serve import screened_model
from lmhead.models import LanguageModel
from lmhead.sampling import Grammar, Sampler, generate
from lmhead.sampling.grammar import _vocabulary

SCHEMAS = int(os.environ.get("LMHEAD_SCHEMAS", "40"))  # 200 in the slow variant
jsonschema: Any = pytest.importorskip("jsonschema")
llguidance: Any = pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return replace(tiny(tmp_path_factory.mktemp("tiny")), max_length=None)


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose texts are short: a random model would fill any space that it is given."""
    kinds = ["string", "integer", "boolean", "null", "enum", "const", "pattern"]
    kinds += ["object", "array", "anyOf"] * (depth > 0)
    kind = rng.choice(kinds)
    if kind == "string":
        low = rng.randrange(3)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(4)}
    if kind == "integer":
        low = rng.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)}
    if kind == "enum":
        return {"enum": rng.sample(["red", "é", 'a"b', 1, 2.5, None, True, "蓝"], 3)}
    if kind == "const":
        return {"const": rng.choice(["x", 7, [1, 2], {"k": "v"}])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-c]{2}$", "^x[0-9]+y$", "^(no|yes)$"])}
    if kind == "object":
        names = rng.sample(["a", "bc", "d e", "é"], rng.randrange(1, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": rng.sample(names, rng.randrange(len(names) + 1)),
            "additionalProperties": False,
        }
    if kind == "array":
        low = rng.randrange(2)
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    return {"type": kind}


@torch.no_grad()
def dense_tokens(
    model: LanguageModel, ids: list[int], grammar: Grammar, sampler: Sampler | None, most: int
) -> list[int]:
    """The tokens by full logits, on which llguidance's own mask is put."""
    matcher = llguidance.LLMatcher(_vocabulary(model), grammar._compiled)
    read, cache = model.hidden(torch.tensor([ids]))
    made: list[int] = []
    while len(made) < most:
        z = (read[0, -1].double() @ model.head.weight.double().T)[None]
        bias = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)
        z[0, bias[: z.shape[1]] == 0] = -torch.inf
        if sampler is None:
            token = int(z.argmax())
        else:
            token = int(sampler(z, [ids + made], prompt_length=len(ids)).token)
        made.append(token)
        if token in model.eos_token_ids or not matcher.consume_token(token) or matcher.is_stopped():
            return made
        read, cache = model.hidden(torch.tensor([[token]]), cache)
    return made


def test_random_schemas(model: LanguageModel) -> None:
    """Greedy and sampled, plain and screened: valid JSON, and the tokens of dense decoding."""
    screened = screened_model(model)
    lengths = []
    for number in range(SCHEMAS):
        rng = random.Random(number)
        schema = random_schema(rng)
        grammar = Grammar.json_schema(schema)
        ids = [1, *(rng.randrange(35, 128) for _ in range(rng.randrange(1, 8)))]  # ASCII
        options: Any = rng.choice([None, {}, {"top_p": 0.9}, {"top_k": 5, "temperature": 1.5}])
        sampler = None if options is None else Sampler(seed=number, **options)
        decoder = model
        if number % 3 == 0:
            decoder, sampler = screened, sampler or Sampler(do_sample=False)
        made = generate(decoder, ids, sampler, max_new_tokens=400, grammar=grammar)
        assert made.finish_reason in ("stop", "eos"), schema
        jsonschema.validate(json.loads(made.text), schema)
        greedy = None if sampler is None or sampler.is_greedy else sampler
        assert made.tokens == dense_tokens(model, ids, grammar, greedy, 400), schema
        lengths.append(len(made.tokens))
    assert max(lengths) > 20


def test_forbidden_tokens_are_never_scored(model: LanguageModel) -> None:
    """A screened head reads no weight of a token that the grammar forbids."""
    screened = screened_model(model)
    weight = screened.head.weight.data  # changes of .data are not noticed
    kept = weight.clone()
    digits = [id for id in range(300) if model_bytes(model, id).isdigit()]
    try:
        weight.fill_(torch.nan)
        used = [*digits, 1, 262]  # as embeddings, too
        weight[used] = kept[used]
        for sampler in (Sampler(do_sample=False), Sampler(seed=1), Sampler(seed=1, top_p=0.9)):
            made = generate(
                screened, [1, 262], sampler, max_new_tokens=9, grammar=Grammar.regex("[0-9]{9}")
            )
            assert re.fullmatch("[0-9]{9}", made.text)
    finally:
        weight.copy_(kept)


def model_bytes(model: LanguageModel, id: int) -> bytes:
    assert model.tokenizer is not None
    return model.tokenizer.token_bytes(id)


def test_kinds_of_grammars(model: LanguageModel) -> None:
    def text(grammar: Grammar, **options: Any) -> str:
        made = generate(
            model, [1, 262], Sampler(seed=5), max_new_tokens=200, grammar=grammar, **options
        )
        return made.text

    assert re.fullmatch(r"\d{3}-\d{4}", text(Grammar.regex(r"\d{3}-\d{4}")))
    assert text(Grammar.choice(["yes", 'n"o', "maybe\n"])) in ("yes", 'n"o', "maybe\n")
    assert re.fullmatch(r"(ab){2}c", text(Grammar.lark('start: "ab" "ab" "c"')))
    assert re.fullmatch(r"[xy]z", text(Grammar.lark('root ::= ("x" | "y") "z"')))
    assert json.loads(text(Grammar.json_schema({"enum": [{"a": 1}]}))) == {"a": 1}
    assert Grammar.json_object().name == "json_schema"


def test_log_probabilities_are_the_models(model: LanguageModel) -> None:
    """Not those among the allowed tokens."""
    grammar = Grammar.choice(["yes", "no"])
    for sampler in (None, Sampler(seed=1)):
        made = generate(model, [1, 262], sampler, max_new_tokens=9, grammar=grammar, logprobs=2)
        plain = generate(model, [1, 262], max_new_tokens=1, logprobs=2)
        assert made.events[0].top == plain.events[0].top
        with torch.no_grad():
            hidden = model.hidden(torch.tensor([[1, 262]]))[0][0, -1].double()
        truth = (hidden @ model.head.weight.double().T).log_softmax(-1)
        assert made.log_probs[0] == pytest.approx(float(truth[made.tokens[0]]), abs=1e-5)


def test_rows_of_a_batch_have_their_own_state(model: LanguageModel) -> None:
    grammar = Grammar.regex("a[0-9]{1,5}b")
    prompts = [[1, 262], [1, 98, 99], [1]]
    sampler = Sampler(seed=[1, 2, 3])
    made = generate(model, prompts, sampler, max_new_tokens=20, grammar=grammar)
    for number, (prompt, one) in enumerate(zip(prompts, made, strict=True)):
        alone = generate(
            model, prompt, Sampler(seed=number + 1), max_new_tokens=20, grammar=grammar
        )
        assert one.tokens == alone.tokens
        assert re.fullmatch("a[0-9]{1,5}b", one.text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.regex("("), "regex must be valid"),
        (lambda: Grammar.json_schema({"type": "nothing"}), "json_schema must be valid"),
        (lambda: Grammar.json_schema("{"), "json_schema must be valid"),
        (lambda: Grammar.lark("start: missing"), "lark must be valid"),
        (lambda: Grammar.choice([]), "choice must have at least one text"),
    ],
)
def test_a_wrong_grammar(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_models_that_cannot(model: LanguageModel) -> None:
    grammar = Grammar.regex("a")
    for other, message in (
        (replace(model, tokenizer=None), "tokenizer"),
        (replace(model, eos_token_ids=()), "end-of-text"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(other, [1], max_new_tokens=1, grammar=grammar)
    with pytest.raises(TypeError, match="grammar must be"):
        generate(model, [1], max_new_tokens=1, grammar="a")  # type: ignore[call-overload]


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmhead.sampling.grammar.find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"lmhead\[grammar\]"):
        Grammar.regex("a")


def test_the_command(tmp_path: Path) -> None:
    from click.testing import CliRunner
    from tiny_models import write_model

    from lmhead.cli import main

    file = tmp_path / "schema.json"
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
    file.write_text(json.dumps(schema))
    call = ["generate", str(write_model(tmp_path / "model")), "hello", "--json"]
    for value in (str(file), json.dumps(schema)):
        done = CliRunner().invoke(main, [*call, "--json-schema", value, "--seed", "1"])
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)["generations"][0]["text"]
        jsonschema.validate(json.loads(found), schema)
    done = CliRunner().invoke(main, [*call, "--regex", "[ab]{4}", "--screen"])
    assert re.fullmatch("[ab]{4}", json.loads(done.stdout)["generations"][0]["text"])
    for wrong, message in (
        (["--regex", "("], "regex must be valid"),
        (["--regex", "a", "--json-schema", "{}"], "cannot be combined"),
        (["--regex", "a", "--beams", "2"], "cannot be combined"),
    ):
        done = CliRunner().invoke(main, [*call, *wrong])
        assert done.exit_code == 2, done.output
        assert message in done.output
