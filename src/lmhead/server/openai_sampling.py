"""Sampler and grammar of OpenAI's requests."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lmhead.models import LanguageModel
from lmhead.sampling import Options, Sampler
from lmhead.sampling.grammar import Grammar
from lmhead.server.request_fields import check_ids, field_error, is_utf8, list_field

# Options of `Sampler` that come from the model, or make no sense for a single request.
_NO_OPTION = {"eos_token_id", "guidance_scale"}
SAMPLER_OPTIONS = {f.name for f in fields(Options)} - _NO_OPTION


def make_sampler(
    fields: Mapping[str, Any], model: LanguageModel, n: int, prompts: int
) -> Sampler | None:
    """Return the sampler; None if it would only take the most probable token."""
    options = {name: value for name, value in fields.items() if name in SAMPLER_OPTIONS}
    if "logit_bias" in options:
        options["logit_bias"] = _logit_bias(options["logit_bias"], model.head.vocab_size)
    if "sequence_bias" in options:
        options["sequence_bias"] = _sequence_bias(options["sequence_bias"], model.head.vocab_size)
    for sequence in list_field("bad_words_ids", options.get("bad_words_ids", [])):
        check_ids("bad_words_ids", sequence, model.head.vocab_size)
    for name in ("allowed_token_ids", "suppress_tokens", "begin_suppress_tokens"):
        check_ids(name, options.get(name, ()), model.head.vocab_size)
    temperature = options.get("temperature", 1.0)
    if type(temperature) not in (int, float) or not 0 <= temperature <= 100:
        raise field_error("temperature", "temperature must be a number from 0 to 100")
    seed = fields.get("seed", random.getrandbits(62))
    if type(seed) is not int or not -(2**63) <= seed < 2**63:
        raise field_error("seed", "seed must be an integer of 64 bits")
    if set(options) <= {"temperature", "top_p"} and temperature == 0:
        return None
    # Choices of one prompt differ in their seeds; the first one has the seed of the request.
    # A sum beyond 64 bits wraps around.
    seeds = [(seed + i + 2**63) % 2**64 - 2**63 for _ in range(prompts) for i in range(n)]
    try:
        return Sampler(
            eos_token_id=list(model.eos_token_ids) or None,
            order=fields.get("order", "vllm"),
            seed=seeds,
            **options,
        )
    except (ValueError, TypeError, OverflowError) as error:
        name = str(error).split(" ", 1)[0]
        raise field_error(name if name in SAMPLER_OPTIONS else "order", str(error)) from None


def _logit_bias(given: object, vocab: int) -> dict[int, float]:
    if not isinstance(given, Mapping):
        raise field_error("logit_bias", "logit_bias must be an object of token ids and numbers")
    biases = {}
    for name, bias in given.items():
        valid = isinstance(name, str) and name.isascii() and name.isdigit() and int(name) < vocab
        if not valid:
            message = (
                f"logit_bias must have token ids from 0 to {vocab - 1}; got {str(name)[:40]!r}"
            )
            raise field_error("logit_bias", message)
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise field_error("logit_bias", "logit_bias must have numbers from -100 to 100")
        biases[int(name)] = -math.inf if bias == -100 else float(bias)
    return biases


def _sequence_bias(given: object, vocab: int) -> dict[tuple[int, ...], float]:
    """Return {ids: bias} of a list of pairs, [[ids, bias], ...]: JSON has no ids as keys."""
    message = "sequence_bias must be a list of pairs, token ids and a number"
    biases = {}
    for pair in list_field("sequence_bias", given):
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[1]) not in (int, float):
            raise field_error("sequence_bias", message)
        check_ids("sequence_bias", pair[0], vocab)
        if not pair[0]:
            raise field_error("sequence_bias", message)
        biases[tuple(pair[0])] = float(pair[1])
    return biases


def make_grammar(given: Mapping[str, Any], model: LanguageModel) -> Grammar | None:
    """Return what the text must match, by `response_format` or one of vLLM's `guided_` fields."""
    names = [name for name in ("response_format", *_GUIDED) if name in given]
    if "response_format" in names and given["response_format"] == {"type": "text"}:
        names.remove("response_format")
    if not names:
        return None
    if len(names) > 1:
        raise field_error(names[1], f"{names[0]} and {names[1]} cannot be combined")
    name = names[0]
    value = _schema(given[name]) if name == "response_format" else given[name]
    try:
        kind, wanted, make = _GUIDED.get(name, _GUIDED["guided_json"])
        if not isinstance(value, kind) or (isinstance(value, str) and not is_utf8(value)):
            raise ValueError(f"must be {wanted}")
        grammar: Grammar = make(value)
        grammar.matcher(model)  # it may not fit the model's tokens
        return grammar
    except ModuleNotFoundError as error:
        raise field_error(name, str(error), code="unsupported_parameter") from None
    except (ValueError, TypeError) as error:
        raise field_error(name, f"{name}: {error}") from None


def _schema(form: object) -> Any:
    """Return the JSON schema of a `response_format`."""
    kinds = "text, json_object or json_schema"
    if not isinstance(form, Mapping) or form.get("type") not in ("json_object", "json_schema"):
        raise field_error("response_format", f"response_format must have a type: {kinds}")
    if form["type"] == "json_object":
        return {"type": "object"}
    described = form.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise field_error("response_format", "response_format.json_schema must have a schema")
    return schema


# Field -> its type, what it must be, and what makes the grammar.
_GUIDED: dict[str, tuple[Any, str, Any]] = {
    "guided_json": ((str, Mapping), "a JSON schema", Grammar.json_schema),
    "guided_regex": (str, "text", Grammar.regex),
    "guided_choice": (list, "a list of texts", Grammar.choice),
    "guided_grammar": (str, "text", Grammar.lark),
}
