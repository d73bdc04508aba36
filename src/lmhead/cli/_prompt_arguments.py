"""The prompts of `lmhead generate`: texts, or a chat message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click

from lmhead.cli._command_group import as_usage_errors
from lmhead.cli._model_arguments import check_utf8, read_prompt, split_arguments

if TYPE_CHECKING:
    from lmhead.models import LanguageModel
    from lmhead.models.chat import Message


class Prompt(NamedTuple):
    """A prompt."""

    text: str  # as the model reads it
    ids: list[int] | None = None  # token ids, if they are not simply those of the text
    messages: tuple[Message, ...] = ()  # of a chat; only the answer is shown

    @property
    def shown(self) -> str:
        """Text shown before the generated text."""
        return "" if self.messages else self.text

    @property
    def input(self) -> str | list[int]:
        """Text or ids to generate from."""
        return self.text if self.ids is None else self.ids

    def to_json(self) -> dict[str, Any]:
        """Return the fields of docs/json.md."""
        messages = {"messages": list(self.messages)} if self.messages else {}
        return {"prompt": self.text, **messages}


def parse_prompts(
    arguments: tuple[str, ...], options: dict[str, Any]
) -> tuple[str | None, list[str] | tuple[Message, ...]]:
    """Return the model, and prompts or chat messages."""
    if options["chat"] is None:
        if options["system"] is not None:
            raise click.UsageError("--system needs --chat.")
        where, first = split_arguments(arguments, "PROMPT")
        return where, [read_prompt(first), *(check_utf8(p, "--prompt") for p in options["more"])]
    if len(arguments) > 1 or options["more"]:
        raise click.UsageError("--chat replaces PROMPT; give one of them.")
    messages = [{"role": "user", "content": read_prompt(options["chat"])}]
    if options["system"] is not None:
        system = check_utf8(options["system"], "--system")
        messages.insert(0, {"role": "system", "content": system})
    return (arguments[0] if arguments else None), tuple(messages)


def chat_prompt(model: LanguageModel, messages: tuple[Message, ...]) -> Prompt:
    """Return the messages rendered with the model's chat template."""
    if model.chat is None:
        raise click.UsageError(
            f"{model.name} has no chat template. Use a chat model such as smollm2, or a PROMPT."
        )
    with as_usage_errors():
        return Prompt(model.chat.render(messages), model.chat.encode(messages), messages)
