"""Render a chat template in a process with limited time, memory and output.

In:  {"template": ..., "variables": {...}} as JSON on standard input.
Out: {"text": ...}, {"refused": ...} if the template rejects the messages, or {"error": ...}.

A loop without end or a string that doubles forever then ends this process, not the caller.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

SECONDS = 2  # of processor time
_BYTES = 2**29  # of memory
_CHARACTERS = 2**24  # of output


class _RefusedError(Exception):
    """The template rejects the messages."""


def _refuse(message: str) -> NoReturn:
    raise _RefusedError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Return plain JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def render(template: str, variables: dict[str, Any]) -> str:
    """Return the text of a template, compiled with the settings of transformers."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Ignore {% generation %}, which labels the text that a model is trained on."""

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
    return environment.from_string(template).render(**variables)


def _limit() -> None:
    try:
        import resource
    except ImportError:  # Windows: the caller's timeout alone
        return
    for kind, limit in (
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, _BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):  # some systems do not limit the address space
            resource.setrlimit(kind, (limit, limit))


def main() -> None:
    """Read a job from standard input and write its result to standard output."""
    job = json.load(sys.stdin.buffer)
    _limit()
    try:
        text = render(job["template"], job["variables"])
        if len(text) > _CHARACTERS:
            raise ValueError(f"its output exceeds {_CHARACTERS:,} characters")
        result = {"text": text}
    except _RefusedError as refused:
        result = {"refused": str(refused)[:1000]}
    except MemoryError:
        result = {"error": "it exceeds the limit of memory"}
    except Exception as error:
        result = {"error": " ".join((str(error) or type(error).__name__).split())[:300]}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
