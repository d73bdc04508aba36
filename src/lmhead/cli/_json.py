"""JSON for programs: one document per call, with the version of its form. See docs/json.md."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import click

from lmhead import __version__

SCHEMA = 1

# JSON may hold these as they are, but a terminal would obey them.
_CONTROLS = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def head(command: str) -> dict[str, Any]:
    """What every document begins with."""
    return {"command": command, "schema": SCHEMA, "lmhead": __version__}


def to_text(value: Any, *, lines: int = 2) -> str:
    r"""JSON that any terminal can show: control characters are escaped, NaN is refused.

    The outer `lines` levels have a line for each entry; what is inside stands in one line.

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
    knows_all = encoding.replace("-", "").startswith("utf")
    return json.dumps(value, ensure_ascii=not knows_all, allow_nan=False)


def write(command: str, *, lines: int = 2, **document: Any) -> None:
    """Print a document; `lines` is how many levels have a line for each entry."""
    click.echo(to_text({**head(command), **document}, lines=lines))


class Stream:
    """A document with one long list that is written as it comes, so that nothing is held.

    Used as: stream = Stream("score", "tokens", model=...); stream.add(token) ...; stream.close(...)
    """

    def __init__(self, command: str, name: str, **before: Any) -> None:
        begin = to_text({**head(command), **before})
        assert begin.endswith("\n}")
        click.echo(f"{begin[:-2]},\n  {json.dumps(name)}: [", nl=False)
        self._first = True

    def add(self, entry: Any) -> None:
        """One more entry of the list."""
        click.echo(f"{'' if self._first else ','}\n    {to_text(entry, lines=0)}", nl=False)
        self._first = False

    def close(self, **after: Any) -> None:
        """The end of the list, and what is known only then."""
        end = "]" if self._first else "\n  ]"
        rest = to_text(after)
        click.echo(f"{end},{rest[1:]}" if after else f"{end}\n}}")


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON; see docs/json.md.")
