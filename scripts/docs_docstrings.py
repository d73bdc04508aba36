"""A griffe extension for the API reference: docstrings of this package as Markdown.

Doctests become fenced blocks, and the definition (`Equivalent to: ...`) a block of its own.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^( *)>>>.*(?:\n(?! *$).*)*", re.MULTILINE)
_DEFINITION = re.compile(r"^Equivalent to: ((?:.+\n?)+)", re.MULTILINE)


def as_markdown(text: str) -> str:
    """Return a docstring with its doctests and its definition fenced."""
    text = _DEFINITION.sub(lambda m: f"Equivalent to:\n\n```text\n{m[1].rstrip()}\n```\n", text)
    return _DOCTEST.sub(lambda m: f"{m[1]}```pycon\n{m[0]}\n{m[1]}```", text)


class Docstrings(griffe.Extension):
    """Rewrite every docstring when it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:  # noqa: ARG002
        """Rewrite the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
