"""JSON output: one document per command, with a schema version. See docs/json.md."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import click

from lmhead import __version__

SCHEMA = 1

# Legal in JSON, but a terminal would interpret them.
_CONTROLS = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def head(command: str) -> dict[str, Any]:
    """Return the fields that every document starts with."""
    return {"command": command, "schema": SCHEMA, "lmhead": __version__}


def to_text(value: Any, *, lines: int = 2) -> str:
    r"""Return JSON that is safe to print: control characters are escaped, NaN is refused.

    The outer `lines` levels have one line per entry; deeper levels are on one line.

    >>> print(to_text({"text": "é\x9b2J", "bytes": [27]}, lines=0))
    {"text": "é\u009b2J", "bytes": [27]}
    """
    return _CONTROLS.sub(lambda c: f"\\u{ord(c[0]):04x}", _dump(value, lines, "\n"))


def _dump(value: Any, lines: int, newline: str) -> str:
    inner = newline + "  "
    if lines and value and isinstance(value, dict):
        parts = [f"{_plain(k)}: {_dump(v, lines - 1, inner)}" for k, v in value.items()]
        return "{" + inner + f",{inner}".join(parts) + newline + "}"
    if lines and isinstance(value, list) and value and isinstance(value[0], dict | list):
        parts = [_dump(v, lines - 1, inner) for v in value]
        return "[" + inner + f",{inner}".join(parts) + newline + "]"
    return _plain(value)


def _plain(value: Any) -> str:
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    is_unicode = encoding.replace("-", "").startswith("utf")
    return json.dumps(value, ensure_ascii=not is_unicode, allow_nan=False)


def write(command: str, *, lines: int = 2, **document: Any) -> None:
    """Print a document; the outer `lines` levels have one line per entry."""
    click.echo(to_text({**head(command), **document}, lines=lines))


class Stream:
    """A document with one long list that is written entry by entry, in bounded memory.

    Used as: stream = Stream("score", "tokens", model=...); stream.add(token) ...; stream.close(...)
    """

    def __init__(self, command: str, name: str, **before: Any) -> None:
        begin = to_text({**head(command), **before})
        assert begin.endswith("\n}")
        click.echo(f"{begin[:-2]},\n  {json.dumps(name)}: [", nl=False)
        self._first = True

    def add(self, entry: Any) -> None:
        """Write one more entry of the list."""
        click.echo(f"{'' if self._first else ','}\n    {to_text(entry, lines=0)}", nl=False)
        self._first = False

    def close(self, **after: Any) -> None:
        """Write the end of the list and the remaining fields."""
        end = "]" if self._first else "\n  ]"
        fields = to_text(after)
        click.echo(f"{end},{fields[1:]}" if after else f"{end}\n}}")


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON; see docs/json.md.")
