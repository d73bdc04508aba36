"""Validation of single fields of a request in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmhead.server.api_context import RequestError
from lmhead.server.guard import error_response


def field_error(
    name: str, message: str, *, status: int = 400, code: str = "invalid_value"
) -> RequestError:
    """Return an error about one field of the request."""
    error = RequestError(status, code, message)
    error.response = error_response(status, code, message, param=name)
    return error


def integer_field(given: Mapping[str, Any], name: str, low: int, high: int, default: int) -> int:
    """Return an integer from low to high."""
    value = given.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise field_error(name, f"{name} must be an integer from {low} to {high}")
    return value


def optional_integer(given: Mapping[str, Any], name: str, high: int) -> int | None:
    """Return an integer from 0 to high, or None if it is not given."""
    return integer_field(given, name, 0, high, 0) if name in given else None


def boolean_field(given: Mapping[str, Any], name: str) -> bool:
    """Return a boolean, false if it is not given."""
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise field_error(name, f"{name} must be true or false")
    return value


def list_field(name: str, value: object) -> list[Any]:
    """Return a list."""
    if not isinstance(value, list):
        raise field_error(name, f"{name} must be a list")
    return value


def check_ids(name: str, ids: object, vocab: int) -> None:
    """Refuse what is not a list of token ids."""
    if not isinstance(ids, Sequence) or not all(type(id) is int and 0 <= id < vocab for id in ids):
        raise field_error(name, f"{name} must be a list of token ids from 0 to {vocab - 1}")


def is_utf8(text: str) -> bool:
    """Return whether a text has no lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def all_text(parts: list[Any]) -> bool:
    """Return whether all parts are texts."""
    return all(isinstance(part, str) for part in parts)
