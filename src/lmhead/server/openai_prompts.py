"""Prompts and conversations of OpenAI's requests as token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmhead.models import LanguageModel
from lmhead.server.request_fields import all_text, check_ids, field_error, is_utf8
from lmhead.server.request_limits import Limits

_ROLES = ("system", "developer", "user", "assistant", "tool")


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
    model: LanguageModel,
    prompt: str | list[int],
    limits: Limits,
    *,
    new: int,
    last: int | None = None,
    echo: bool = False,
) -> list[int]:
    """Return the ids of a prompt, within the vocabulary and the context. Runs in the worker.

    Prompt and `new` tokens must fit into the context; with `echo` the prompt alone may fill it.
    `last` tokens of the prompt are kept; -1 for as many as fit, None for all.
    """
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
    if context is not None and len(ids) + new > context and not echo:
        message = (
            f"the model's maximum context length is {context} tokens; {counted}, "
            f"and max_tokens asks for {new} more"
        )
        raise field_error("max_tokens", message, code="context_length_exceeded")
    return ids
