"""Chat templates: messages to the text that a model was trained to answer.

In:  the template of a folder (`chat_template.jinja`, or in `tokenizer_config.json`), and messages.
Out: the text up to where the model's reply begins, and its ids.

A template is a program that comes with a model. It runs in Jinja's sandbox, where it sees the
messages and the names of special tokens, in a process of its own with limited time, memory and
output: see `chat_worker`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lmhead.errors import ModelError
from lmhead.models.chat_worker import SECONDS
from lmhead.models.json_tokenizer import JsonTokenizer
from lmhead.models.model_files import Fields, exists, read_json, read_text

_WALL_SECONDS = 60  # wall time; the worker limits its own processor time

Message = Mapping[str, str]
"""{"role": "system", "user" or "assistant", "content": text}."""


class Chat:
    """A chat template in Jinja with the tokenizer of its model, and variables of the template.

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

    def render(self, messages: Sequence[Message], *, continue_last: bool = False) -> str:
        """Return the text of a conversation, up to where the model's reply begins.

        With `continue_last` the last message is the beginning of the reply, and the text ends with
        it.

        Raises:
            ModelError: the template is damaged, not allowed, or exceeds its limits.
            ValueError: it does not accept these messages, e.g. no system message.
        """
        if find_spec("jinja2") is None:
            raise ModelError("chat templates are written in Jinja: pip install jinja2")
        variables = {
            **self.names,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": not continue_last,
            "tools": None,
            "documents": None,
        }
        try:
            run = subprocess.run(
                [sys.executable, "-m", "lmhead.models.chat_worker"],
                input=json.dumps({"template": self.template, "variables": variables}).encode(),
                capture_output=True,
                timeout=_WALL_SECONDS,
                check=False,
            )
            result: dict[str, str] = json.loads(run.stdout)
        except OSError as error:
            result = {"error": f"{sys.executable} cannot be started: {error}"}
        except (subprocess.TimeoutExpired, ValueError):  # killed: no JSON was written
            result = {"error": f"it exceeds {SECONDS} seconds or the limits of memory or output"}
        if "refused" in result:
            raise ValueError(f"the model does not accept this conversation: {result['refused']}")
        if "error" in result:
            raise ModelError(
                f"the chat template in {self.where} cannot be used: {result['error']}. Download it "
                "again from the source of the model, or use a plain prompt"
            )
        text = result["text"]
        if not continue_last:
            return text
        last = messages[-1]["content"]
        end = last if last in text else last.strip()
        if end not in text:
            raise ValueError("the chat template must contain the last message as it is")
        return text[: text.rindex(end) + len(end)]

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation; the template itself adds the special tokens."""
        return self._tokenizer.encode(self.render(messages), bos=False)


def read_chat(folder: Path, tokenizer: JsonTokenizer) -> Chat | None:
    """Return the chat template of a folder; None if there is none."""
    config_file, own_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = read_json(config_file) if exists(config_file) else Fields(config_file, {})
    names = _names(config, tokenizer)
    if exists(own_file):
        return Chat(read_text(own_file), tokenizer, names, own_file)
    template = config.values.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = [Fields(config_file, t, "chat_template.") for t in template if isinstance(t, dict)]
        if len(named) < len(template):
            raise config.error("chat_template", "a string or a list of objects")
        default = [t for t in named if t.values.get("name") == "default"]
        template = default[0].text("template") if default else None
    elif template is not None:
        template = config.text("chat_template")
    return None if template is None else Chat(template, tokenizer, names, config_file)


def _names(config: Fields, tokenizer: JsonTokenizer) -> dict[str, str]:
    """Return the special tokens by the names that templates use: `bos_token`, `eos_token` etc."""
    ids = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    names = {name: tokenizer.token_name(id) for name, id in ids.items() if id is not None}
    for name, value in config.values.items():
        text: Any = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            names[name] = text
    return names
