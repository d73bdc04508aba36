"""Parse and validate the bodies of OpenAI's completion requests.

In:  the fields of `/v1/completions` or `/v1/chat/completions`, and the model.
Out: `CompletionRequest`, or a `RequestError` in OpenAI's format that names the field.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from lmhead.models import LanguageModel
from lmhead.sampling import Options, Sampler
from lmhead.sampling.grammar import Grammar
from lmhead.server.api_context import RequestError
from lmhead.server.guard import error_response
from lmhead.server.request_limits import Limits

__all__ = [
    "CompletionRequest",
    "check_ids",
    "encode_chat",
    "encode_prompt",
    "field_error",
    "is_utf8",
    "parse_chat",
    "parse_completion",
]

MOST_LOGPROBS = 20
MOST_CHOICES = 128
# Accepted and without effect: they concern OpenAI's own service.
_IGNORED = {
    "metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier",
    "store", "user",
}  # fmt: skip
_NOT_SUPPORTED = {
    "audio", "function_call", "functions", "modalities", "prediction", "reasoning_effort",
    "suffix", "tool_choice", "tools", "verbosity", "web_search_options",
}  # fmt: skip
_NOTHING: tuple[Any, ...] = ("", [], "none", "auto", ["text"])  # values that ask for nothing
_COMMON = {
    "certified", "echo", "frequency_penalty", "guided_choice", "guided_grammar", "guided_json",
    "guided_regex", "ignore_eos", "kept", "logit_bias", "logprobs", "max_tokens",
    "model", "n", "order", "presence_penalty", "prompt_logprobs", "response_format", "seed",
    "stop", "stream", "stream_options", "temperature", "top_p",
}  # fmt: skip
# Options of `Sampler` that come from the model, or make no sense for a single request.
_NO_OPTION = {"eos_token_id", "guidance_scale"}
_OPTIONS = {f.name for f in fields(Options)} - _NO_OPTION


@dataclass(frozen=True)
class CompletionRequest:
    """A validated request.

    Attributes:
        prompts: texts or ids, one per prompt; a chat is one prompt.
        chat: whether the response has OpenAI's chat format.
        n: choices per prompt.
        max_tokens: of each choice; None for what fits the model's context.
        sampler: with one seed per choice; None for greedy decoding.
        stop: stop strings.
        logprobs: number of top log-probabilities per generated token; None for none at all.
        prompt_logprobs: the same for the tokens of the prompt, as an extension.
        echo: whether the response repeats the prompt.
        ignore_eos: whether to continue after end-of-text tokens, as an extension.
        certified: whether to decode from the quantized copy of the head, as an extension.
        kept: whether to return the tokens that the sampler left, as an extension.
        grammar: what the text must match; None for anything.
        stream: whether to send events as they come.
        include_usage: whether the last event has the token counts.
    """

    prompts: tuple[str | list[int], ...]
    chat: bool
    n: int
    max_tokens: int | None
    sampler: Sampler | None
    stop: tuple[str, ...]
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    ignore_eos: bool
    certified: bool
    kept: bool
    grammar: Grammar | None
    stream: bool
    include_usage: bool


def field_error(
    name: str, message: str, *, status: int = 400, code: str = "invalid_value"
) -> RequestError:
    """Return an error about one field of the request."""
    error = RequestError(status, code, message)
    error.response = error_response(status, code, message, param=name)
    return error


def parse_completion(
    body: Mapping[str, Any], model: LanguageModel, limits: Limits
) -> CompletionRequest:
    """Validate the body of `/v1/completions`."""
    given = _known(body, _COMMON | {"best_of", "prompt"})
    n = _integer(given, "n", 1, MOST_CHOICES, 1)
    if given.get("best_of") not in (None, n):
        raise field_error("best_of", "best_of must be equal to n")
    return _parse(
        given,
        model,
        limits,
        prompts=_prompts(given.get("prompt"), limits.prompts),
        chat=False,
        max_tokens=_integer(given, "max_tokens", 0, limits.new_tokens, 16),
        logprobs=_optional_integer(given, "logprobs", MOST_LOGPROBS),
    )


def parse_chat(body: Mapping[str, Any], model: LanguageModel, limits: Limits) -> CompletionRequest:
    """Validate the body of `/v1/chat/completions`."""
    more = {"max_completion_tokens", "messages", "top_logprobs"}
    given = _known(body, (_COMMON | more) - {"echo"})
    name = "max_tokens" if "max_tokens" in given else "max_completion_tokens"
    wanted = _boolean(given, "logprobs")
    top = _optional_integer(given, "top_logprobs", MOST_LOGPROBS)
    if top is not None and not wanted:
        raise field_error("top_logprobs", "top_logprobs needs logprobs to be true")
    return _parse(
        given,
        model,
        limits,
        prompts=(encode_chat(given.get("messages"), model),),
        chat=True,
        max_tokens=_optional_integer(given, name, limits.new_tokens),
        logprobs=(top or 0) if wanted else None,
    )


def _parse(
    given: Mapping[str, Any],
    model: LanguageModel,
    limits: Limits,
    *,
    prompts: tuple[str | list[int], ...],
    chat: bool,
    max_tokens: int | None,
    logprobs: int | None,
) -> CompletionRequest:
    n = _integer(given, "n", 1, MOST_CHOICES, 1)
    if n * len(prompts) > limits.prompts:
        raise field_error("n", f"at most {limits.prompts} choices in total; got {n * len(prompts)}")
    stream_options = given.get("stream_options", {})
    known = {"include_usage", "include_obfuscation"}  # the latter without effect
    if not isinstance(stream_options, Mapping) or set(stream_options) - known:
        raise field_error("stream_options", "stream_options must have only include_usage")
    stream = _boolean(given, "stream")
    if stream_options and not stream:
        raise field_error("stream_options", "stream_options needs stream to be true")
    vocab = model.head.vocab_size
    return CompletionRequest(
        prompts=prompts,
        chat=chat,
        n=n,
        max_tokens=max_tokens,
        sampler=_sampler(given, model, n, len(prompts)),
        stop=_stop(given.get("stop")),
        logprobs=None if logprobs is None else min(logprobs, vocab),
        prompt_logprobs=_optional_integer(given, "prompt_logprobs", min(MOST_LOGPROBS, vocab)),
        echo=_boolean(given, "echo"),
        ignore_eos=_boolean(given, "ignore_eos"),
        certified=_boolean(given, "certified"),
        kept=_boolean(given, "kept"),
        grammar=_grammar(given, model),
        stream=stream,
        include_usage=_boolean(stream_options, "include_usage"),
    )


def _known(body: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Return the fields that are not null, without ignored ones; refuse unknown ones."""
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name in _NOT_SUPPORTED and given[name] not in _NOTHING:
            raise field_error(name[:80], f"{name} is not supported", code="unsupported_parameter")
        if name not in known | _OPTIONS | _IGNORED | _NOT_SUPPORTED:
            message = f"unrecognized request argument supplied: {name[:80]}"
            raise field_error(name[:80], message, code="unknown_parameter")
    return {name: value for name, value in given.items() if name in known | _OPTIONS}


def _sampler(
    given: Mapping[str, Any], model: LanguageModel, n: int, prompts: int
) -> Sampler | None:
    """Return the sampler; None if it would only take the most probable token."""
    options = {name: value for name, value in given.items() if name in _OPTIONS}
    if "logit_bias" in options:
        options["logit_bias"] = _logit_bias(options["logit_bias"], model.head.vocab_size)
    if "sequence_bias" in options:
        options["sequence_bias"] = _sequence_bias(options["sequence_bias"], model.head.vocab_size)
    for sequence in _list("bad_words_ids", options.get("bad_words_ids", [])):
        check_ids("bad_words_ids", sequence, model.head.vocab_size)
    for name in ("allowed_token_ids", "suppress_tokens", "begin_suppress_tokens"):
        check_ids(name, options.get(name, ()), model.head.vocab_size)
    temperature = options.get("temperature", 1.0)
    if (
        not isinstance(temperature, int | float)
        or isinstance(temperature, bool)
        or not 0 <= temperature <= 100
    ):
        raise field_error("temperature", "temperature must be a number from 0 to 100")
    seed = given.get("seed", random.getrandbits(62))
    if type(seed) is not int or not -(2**63) <= seed < 2**63:
        raise field_error("seed", "seed must be an integer of 64 bits")
    if set(options) <= {"temperature", "top_p"} and temperature == 0:
        return None
    # Choices of one prompt differ in their seeds; the first one has the seed of the request.
    seeds = [_signed(seed + choice) for _ in range(prompts) for choice in range(n)]
    try:
        return Sampler(
            eos_token_id=list(model.eos_token_ids) or None,
            order=given.get("order", "vllm"),
            seed=seeds,
            **options,
        )
    except (ValueError, TypeError, OverflowError) as error:
        name = str(error).split(" ", 1)[0]
        raise field_error(name if name in _OPTIONS else "order", str(error)) from None


def _signed(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def _logit_bias(given: object, vocab: int) -> dict[int, float]:
    if not isinstance(given, Mapping):
        raise field_error("logit_bias", "logit_bias must be an object of token ids and numbers")
    found = {}
    for name, bias in given.items():
        valid = isinstance(name, str) and name.isascii() and name.isdigit() and int(name) < vocab
        if not valid:
            message = (
                f"logit_bias must have token ids from 0 to {vocab - 1}; got {str(name)[:40]!r}"
            )
            raise field_error("logit_bias", message)
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise field_error("logit_bias", "logit_bias must have numbers from -100 to 100")
        found[int(name)] = -math.inf if bias == -100 else float(bias)
    return found


def _sequence_bias(given: object, vocab: int) -> dict[tuple[int, ...], float]:
    """Return {ids: bias} of a list of pairs, [[ids, bias], ...]: JSON has no ids as keys."""
    message = "sequence_bias must be a list of pairs, token ids and a number"
    found = {}
    for pair in _list("sequence_bias", given):
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[1]) not in (int, float):
            raise field_error("sequence_bias", message)
        check_ids("sequence_bias", pair[0], vocab)
        if not pair[0]:
            raise field_error("sequence_bias", message)
        found[tuple(pair[0])] = float(pair[1])
    return found


def _list(name: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise field_error(name, f"{name} must be a list")
    return value


def check_ids(name: str, ids: object, vocab: int) -> None:
    """Refuse what is not a list of token ids."""
    if not isinstance(ids, Sequence) or not all(type(id) is int and 0 <= id < vocab for id in ids):
        raise field_error(name, f"{name} must be a list of token ids from 0 to {vocab - 1}")


def _grammar(given: Mapping[str, Any], model: LanguageModel) -> Grammar | None:
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
        grammar = _GUIDED.get(name, _json_grammar)(value)
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


def _text_of(make: Callable[[str], Grammar]) -> Callable[[Any], Grammar]:
    def checked(value: Any) -> Grammar:
        if not isinstance(value, str) or not is_utf8(value):
            raise ValueError("must be text")
        return make(value)

    return checked


def _json_grammar(value: Any) -> Grammar:
    if not isinstance(value, str | Mapping):
        raise ValueError("must be a JSON schema")
    return Grammar.json_schema(value)


def _choice_grammar(value: Any) -> Grammar:
    if not isinstance(value, list):
        raise ValueError("must be a list of texts")
    return Grammar.choice(value)


_GUIDED: dict[str, Callable[[Any], Grammar]] = {
    "guided_json": _json_grammar,
    "guided_regex": _text_of(Grammar.regex),
    "guided_choice": _choice_grammar,
    "guided_grammar": _text_of(Grammar.lark),
}


def _prompts(prompt: object, most: int) -> tuple[str | list[int], ...]:
    message = "prompt must be a text, a list of texts, a list of token ids, or a list of such lists"
    parts: list[Any]
    if isinstance(prompt, str):
        parts = [prompt]
    elif isinstance(prompt, list) and prompt:
        parts = [prompt] if type(prompt[0]) is int else prompt
    else:
        raise field_error("prompt", message)
    for part in parts:
        if not isinstance(part, str):
            if not isinstance(part, list) or not all(type(id) is int for id in part):
                raise field_error("prompt", message)
        elif not is_utf8(part):
            raise field_error("prompt", "prompt must be text in UTF-8")
    if len(parts) > most:
        raise field_error("prompt", f"at most {most} prompts in one request; got {len(parts)}")
    return tuple(parts)


def encode_chat(messages: object, model: LanguageModel) -> list[int]:
    """Return the ids of a conversation, by the model's chat template. Runs in the worker."""
    if model.chat is None:
        message = f"the model {model.name!r} has no chat template; use /v1/completions"
        raise field_error("messages", message, code="no_chat_template")
    if not isinstance(messages, list) or not messages:
        raise field_error("messages", "messages must be a list of at least one message")
    found = []
    for number, message in enumerate(messages):
        name = f"messages[{number}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise field_error(name, f"{name} must be an object with role and content")
        content = message.get("content")
        if isinstance(content, list):  # parts, of which only texts are supported
            texts = [p.get("text") if isinstance(p, Mapping) else None for p in content]
            content = "".join(map(str, texts)) if _all_text(texts) else None
        if not isinstance(content, str) or not is_utf8(content):
            raise field_error(name, f"{name}.content must be text")
        found.append({"role": message["role"], "content": content})
    try:
        return model.chat.encode(found)
    except ValueError as error:
        raise field_error("messages", str(error)) from None


def _all_text(parts: list[Any]) -> bool:
    return all(isinstance(part, str) for part in parts)


def is_utf8(text: str) -> bool:
    """Return whether a text has no lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _stop(stop: object) -> tuple[str, ...]:
    parts = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(parts, list) or len(parts) > 16 or not _all_text(parts) or not all(parts):
        raise field_error("stop", "stop must be a text that is not empty, or a list of up to 16")
    return tuple(parts)


def _integer(given: Mapping[str, Any], name: str, low: int, high: int, default: int) -> int:
    value = given.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise field_error(name, f"{name} must be an integer from {low} to {high}")
    return value


def _optional_integer(given: Mapping[str, Any], name: str, high: int) -> int | None:
    return _integer(given, name, 0, high, 0) if name in given else None


def _boolean(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise field_error(name, f"{name} must be true or false")
    return value


def encode_prompt(model: LanguageModel, prompt: str | list[int], limits: Limits) -> list[int]:
    """Return the ids of a prompt, within the vocabulary and the limits. Runs in the worker."""
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise field_error("prompt", "prompt must be token ids: the model has no tokenizer")
        ids = list(model.tokenizer.encode(prompt))
        if not ids and model.tokenizer.bos_token_id is not None:
            ids = [model.tokenizer.bos_token_id]
    else:
        ids = prompt
        check_ids("prompt", ids, model.head.vocab_size)
    most = min(limits.prompt_tokens, model.max_length or limits.prompt_tokens)
    if len(ids) > most:
        message = f"the model's maximum context length is {most} tokens; prompt has {len(ids)}"
        raise field_error("prompt", message, code="context_length_exceeded")
    if not ids:
        raise field_error("prompt", "prompt must have at least one token")
    return ids
