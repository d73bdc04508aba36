"""What `lmhead generate` goes on from: prompts, or a message to be answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click

from lmhead.cli._frame import options_checked
from lmhead.cli._model import checked_text, read_prompt, split

if TYPE_CHECKING:
    from lmhead.models import LanguageModel
    from lmhead.models.chat import Message


class Prompt(NamedTuple):
    """What a model goes on from.

    Attributes:
        text: as the model reads it.
        ids: where they are not simply the text's.
        messages: of a conversation; only the answer to them is shown.
    """

    text: str
    ids: list[int] | None = None
    messages: tuple[Message, ...] = ()

    @property
    def shown(self) -> str:
        """What is shown before the model's own words."""
        return "" if self.messages else self.text

    @property
    def to_read(self) -> str | list[int]:
        """What the model is given."""
        return self.text if self.ids is None else self.ids

    def to_json(self) -> dict[str, Any]:
        """For docs/json.md."""
        messages = {"messages": list(self.messages)} if self.messages else {}
        return {"prompt": self.text, **messages}


def asked_for(
    arguments: tuple[str, ...], options: dict[str, Any]
) -> tuple[str | None, list[str] | tuple[Message, ...]]:
    """The model, and prompts or a conversation."""
    if options["chat"] is None:
        if options["system"] is not None:
            raise click.UsageError("--system needs --chat.")
        where, first = split(arguments, "PROMPT")
        return where, [read_prompt(first), *(checked_text(p, "--prompt") for p in options["more"])]
    if len(arguments) > 1 or options["more"]:
        raise click.UsageError("--chat takes the place of PROMPT: there can be no other.")
    messages = [{"role": "user", "content": read_prompt(options["chat"])}]
    if options["system"] is not None:
        system = checked_text(options["system"], "--system")
        messages.insert(0, {"role": "system", "content": system})
    return (arguments[0] if arguments else None), tuple(messages)


def from_chat(model: LanguageModel, messages: tuple[Message, ...]) -> Prompt:
    """The messages as the model's own template has them."""
    if model.chat is None:
        raise click.UsageError(
            f"{model.name} has no chat template: it was not trained to answer. Take a model that "
            "was (smollm2 is one), or give it a PROMPT to go on from."
        )
    with options_checked():
        return Prompt(model.chat.render(messages), model.chat.encode(messages), messages)
