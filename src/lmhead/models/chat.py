"""A conversation as the text that a model was trained to answer: its chat template.

In:  the template of a folder (`chat_template.jinja`, or in `tokenizer_config.json`), and messages.
Out: the text, ready for the model's reply, and its ids.

A template is a program that comes with a model. It runs in Jinja's sandbox, where it sees the
messages and the names of the model's marks, and reaches nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from lmhead.errors import ModelError
from lmhead.models.folder import read_json
from lmhead.models.json_tokenizer import JsonTokenizer

Message = Mapping[str, str]
"""{"role": "system", "user" or "assistant", "content": text}."""


class Chat:
    """A chat template with the tokenizer of its model.

    Args:
        template: in Jinja.
        tokenizer: of the model.
        names: what the template may call by name, e.g. {"bos_token": "<s>"}.
        where: the file of the template, for errors.

    Example::

        model = open_model("smollm2")
        ids = model.chat.encode([{"role": "user", "content": "What is the capital of France?"}])
        generate(model, ids, max_new_tokens=20).text
    """

    def __init__(
        self, template: str, tokenizer: JsonTokenizer, names: Mapping[str, str], where: Path
    ) -> None:
        self.template, self.names, self.where = template, dict(names), where
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a conversation, up to where the model's reply begins.

        Raises:
            ModelError: the template is damaged, or does what is not allowed.
            ValueError: it does not take these messages, e.g. none of the system.
        """
        from jinja2 import TemplateError

        try:
            made: str = _compiled(self.template).render(
                **self.names,
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
            )
        except _Refused as refused:
            raise ValueError(f"the model does not take this conversation: {refused}") from None
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise ModelError(
                f"the chat template in {self.where} cannot be used: {error}. Fetch it again from "
                "where the model comes from, or give the model a prompt as it is"
            ) from error
        return made

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation; the template itself says where marks stand."""
        return self._tokenizer.encode(self.render(messages), bos=False)


def read_chat(folder: Path, tokenizer: JsonTokenizer) -> Chat | None:
    """The chat template of a folder; None where there is none.

    Raises:
        ModelError: a file cannot be read, or has something else where the template should be.
    """
    config_file, own_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = read_json(config_file) if config_file.is_file() else {}
    template: Any
    if own_file.is_file():
        where = own_file
        try:
            template = own_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{own_file} cannot be read: {error}") from error
    else:
        where, template = config_file, config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    if template is None:
        return None
    if not isinstance(template, str):
        raise ModelError(f"{where}: chat_template must be a text; got {type(template).__name__}")
    return Chat(template, tokenizer, _names(config, tokenizer), where)


def _names(config: dict[str, Any], tokenizer: JsonTokenizer) -> dict[str, str]:
    """What templates call marks by: `bos_token`, `eos_token` and the like."""
    marks = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    names = {name: tokenizer.token_name(id) for name, id in marks.items() if id is not None}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            names[name] = text
    return names


class _Refused(Exception):  # noqa: N818 - it ends no program
    """What a template says of messages that it does not take."""


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _compiled(template: str) -> Any:
    """A template as it is compiled by those who write them: the settings of transformers."""
    if find_spec("jinja2") is None:
        raise ModelError("chat templates are written in Jinja: pip install jinja2")
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what a model is trained to say; it changes nothing here."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as it is; Jinja's own filter would escape what matters in HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
