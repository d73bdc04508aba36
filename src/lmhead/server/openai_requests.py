"""Parse and validate the bodies of OpenAI's completion requests; their prompts as token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmhead.models import LanguageModel
from lmhead.sampling import Sampler
from lmhead.sampling.grammar import Grammar
from lmhead.server.openai_sampling import SAMPLER_OPTIONS, make_grammar, make_sampler
from lmhead.server.request_fields import OpenAIFields, all_text, check_ids, field_error, is_utf8
from lmhead.server.request_limits import Limits

_ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_LOGPROBS = 20
MAX_CHOICES = 128
# Accepted and without effect: they concern OpenAI's own service.
_IGNORED = {
    "metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier",
    "store", "user",
}  # fmt: skip
_NOT_SUPPORTED = {
    "audio", "function_call", "functions", "modalities", "prediction", "reasoning_effort",
    "suffix", "tool_choice", "tools", "verbosity", "web_search_options",
}  # fmt: skip
_DEFAULTS: tuple[Any, ...] = ("", [], "none", "auto", ["text"])  # values without effect
_COMMON = {
    "certified", "echo", "frequency_penalty", "guided_choice", "guided_grammar", "guided_json",
    "guided_regex", "ignore_eos", "kept", "logit_bias", "logprobs", "max_tokens",
    "model", "n", "order", "presence_penalty", "prompt_logprobs", "response_format", "seed",
    "stop", "stream", "stream_options", "temperature", "top_p", "truncate_prompt_tokens",
}  # fmt: skip


@dataclass(frozen=True)
class CompletionRequest:
    """A validated request."""

    prompts: tuple[str | list[int], ...]  # texts or ids, one per prompt; a chat is one prompt
    chat: bool  # whether the response has OpenAI's chat format
    n: int  # choices per prompt
    # number of tokens of a prompt to keep, from its end, as an extension; -1 for those that fit;
    # None for all
    last: int | None
    max_tokens: int | None  # of each choice; None for what fits the model's context
    sampler: Sampler | None  # with one seed per choice; None for greedy decoding
    stop: tuple[str, ...]  # stop strings
    # number of top log-probabilities per generated token; None for none at all
    logprobs: int | None
    prompt_logprobs: int | None  # the same for the tokens of the prompt, as an extension
    echo: bool  # whether the response repeats the prompt
    ignore_eos: bool  # whether to continue after end-of-text tokens, as an extension
    certified: bool  # whether to decode from the quantized copy of the head, as an extension
    kept: bool  # whether to return the tokens that the sampler kept, as an extension
    grammar: Grammar | None  # that the text must match; None for any text
    stream: bool  # whether to send events as they come
    include_usage: bool  # whether the last event has the token counts


def parse_completion(
    body: Mapping[str, Any], model: LanguageModel, limits: Limits
) -> CompletionRequest:
    """Validate the body of `/v1/completions`."""
    fields = _known(body, _COMMON | {"best_of", "prompt"})
    n = fields.integer("n", 1, MAX_CHOICES, 1)
    if fields.get("best_of") not in (None, n):
        raise field_error("best_of", "best_of must be equal to n")
    return _parse(
        fields,
        model,
        limits,
        prompts=parse_prompts(fields.get("prompt"), limits.prompts),
        chat=False,
        max_tokens=fields.integer("max_tokens", 0, limits.new_tokens, 16),
        logprobs=fields.integer("logprobs", 0, MAX_LOGPROBS, None),
    )


def parse_chat(body: Mapping[str, Any], model: LanguageModel, limits: Limits) -> CompletionRequest:
    """Validate the body of `/v1/chat/completions`."""
    chat_fields = {"max_completion_tokens", "messages", "top_logprobs"}
    fields = _known(body, (_COMMON | chat_fields) - {"echo"})
    name = "max_tokens" if "max_tokens" in fields else "max_completion_tokens"
    with_logprobs = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS, None)
    if top is not None and not with_logprobs:
        raise field_error("top_logprobs", "top_logprobs needs logprobs to be true")
    return _parse(
        fields,
        model,
        limits,
        prompts=(encode_chat(fields.get("messages"), model),),
        chat=True,
        max_tokens=fields.integer(name, 0, limits.new_tokens, None),
        logprobs=(top or 0) if with_logprobs else None,
    )


def _parse(
    fields: OpenAIFields,
    model: LanguageModel,
    limits: Limits,
    *,
    prompts: tuple[str | list[int], ...],
    chat: bool,
    max_tokens: int | None,
    logprobs: int | None,
) -> CompletionRequest:
    n = fields.integer("n", 1, MAX_CHOICES, 1)
    if n * len(prompts) > limits.prompts:
        raise field_error("n", f"at most {limits.prompts} choices in total; got {n * len(prompts)}")
    stream_options = fields.get("stream_options", {})
    known = {"include_usage", "include_obfuscation"}  # the latter without effect
    if not isinstance(stream_options, Mapping) or set(stream_options) - known:
        raise field_error("stream_options", "stream_options must have only include_usage")
    stream = fields.flag("stream")
    if stream_options and not stream:
        raise field_error("stream_options", "stream_options needs stream to be true")
    vocab = model.head.vocab_size
    return CompletionRequest(
        prompts=prompts,
        chat=chat,
        n=n,
        last=_kept_prompt_tokens(fields),
        max_tokens=max_tokens,
        sampler=make_sampler(fields, model, n, len(prompts)),
        stop=_stop(fields.get("stop")),
        logprobs=None if logprobs is None else min(logprobs, vocab),
        prompt_logprobs=fields.integer("prompt_logprobs", 0, min(MAX_LOGPROBS, vocab), None),
        echo=fields.flag("echo"),
        ignore_eos=fields.flag("ignore_eos"),
        certified=fields.flag("certified"),
        kept=fields.flag("kept"),
        grammar=make_grammar(fields, model),
        stream=stream,
        include_usage=OpenAIFields(stream_options).flag("include_usage"),
    )


def _known(body: Mapping[str, Any], known: set[str]) -> OpenAIFields:
    """Return the fields that are not null, without ignored ones; refuse unknown ones."""
    present = OpenAIFields({name: value for name, value in body.items() if value is not None})
    for name, value in present.items():
        if name in _NOT_SUPPORTED and value not in _DEFAULTS:
            raise field_error(name, f"{name} is not supported", code="unsupported_parameter")
    known = known | SAMPLER_OPTIONS
    present.refuse_others(known | _IGNORED | _NOT_SUPPORTED)
    return OpenAIFields({name: value for name, value in present.items() if name in known})


def _stop(stop: object) -> tuple[str, ...]:
    parts = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(parts, list) or len(parts) > 16 or not all_text(parts) or not all(parts):
        raise field_error("stop", "stop must be a text that is not empty, or a list of up to 16")
    return tuple(parts)


def _kept_prompt_tokens(fields: Mapping[str, Any]) -> int | None:
    name = "truncate_prompt_tokens"
    value = fields.get(name)
    if value is not None and (type(value) is not int or not (value == -1 or value > 0)):
        raise field_error(name, f"{name} must be a positive integer, or -1 for what fits")
    return value


# --- prompts --------------------------------------------------------------------------------------


def parse_prompts(prompt: object, limit: int) -> tuple[str | list[int], ...]:
    """Return texts or ids, one per prompt, at most `limit`."""
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
    if len(parts) > limit:
        raise field_error("prompt", f"at most {limit} prompts in one request; got {len(parts)}")
    return tuple(parts)


def encode_chat(messages: object, model: LanguageModel) -> list[int]:
    """Return the ids of a conversation, by the model's chat template. Runs in the worker."""
    if model.chat is None:
        message = f"the model {model.name!r} has no chat template; use /v1/completions"
        raise field_error("messages", message, code="no_chat_template")
    if not isinstance(messages, list) or not messages:
        raise field_error("messages", "messages must be a list of at least one message")
    conversation = []
    for number, message in enumerate(messages):
        name = f"messages[{number}]"
        if not isinstance(message, Mapping) or "role" not in message:
            raise field_error(name, f"{name} must be an object with role and content")
        role = message["role"]
        if role not in _ROLES:
            got = f"{', '.join(_ROLES[:-1])} or {_ROLES[-1]}; got {str(role)[:40]!r}"
            raise field_error(f"{name}.role", f"{name}.role must be {got}")
        content = message.get("content")
        if isinstance(content, list):  # parts, of which only texts are supported
            texts = [p.get("text") if isinstance(p, Mapping) else None for p in content]
            content = "".join(map(str, texts)) if all_text(texts) else None
        if not isinstance(content, str) or not is_utf8(content):
            raise field_error(name, f"{name}.content must be text")
        if role == "developer" and "developer" not in model.chat.template:
            role = "system"  # its newer name; templates that do not know it would write it out
        conversation.append({"role": role, "content": content})
    try:
        return model.chat.encode(conversation)
    except ValueError as error:
        raise field_error("messages", str(error)) from None


def encode_prompt(
    model: LanguageModel, prompt: str | list[int], limits: Limits, request: CompletionRequest
) -> list[int]:
    """Return the ids of a prompt, within the vocabulary and the context. Runs in the worker.

    Prompt and new tokens must fit into the context; with `echo` the prompt alone may fill it.
    """
    new, last = request.max_tokens or 0, request.last
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise field_error("prompt", "prompt must be token ids: the model has no tokenizer")
        ids = list(model.tokenizer.encode(prompt))
        if not ids and model.tokenizer.bos_token_id is not None:
            ids = [model.tokenizer.bos_token_id]
    else:
        ids = prompt
        check_ids("prompt", ids, model.head.vocab_size)
    context = model.max_length
    limit = limits.prompt_tokens if context is None else min(limits.prompt_tokens, context)
    if last is not None:
        capacity = limit if context is None else min(limit, context - new)
        ids = ids[-max(capacity if last == -1 else last, 1) :]
    if not ids:
        raise field_error("prompt", "prompt must have at least one token")
    counted = f"the prompt has {len(ids)}"
    if len(ids) > limit:
        message = f"the model's maximum context length is {limit} tokens; {counted}"
        raise field_error("prompt", message, code="context_length_exceeded")
    if context is not None and len(ids) + new > context and not request.echo:
        message = (
            f"the model's maximum context length is {context} tokens; {counted}, "
            f"and max_tokens asks for {new} more"
        )
        raise field_error("max_tokens", message, code="context_length_exceeded")
    return ids
