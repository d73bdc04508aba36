"""The fields of a request, and the errors about them: of the page's API, and in OpenAI's format."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from lmhead.server.guard import error_response

_T = TypeVar("_T")


class RequestError(Exception):
    """A request that cannot be answered, with the response that says why."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, **facts: float
    ) -> None:
        super().__init__(message)
        self.response = error_response(status, code, message, facts, param=param)


def wrong_value(message: str) -> RequestError:
    """Return the error of the page's API for a field that is not what it must be."""
    return RequestError(400, "wrong_value", message)


def field_error(
    name: str, message: str, *, status: int = 400, code: str = "invalid_value"
) -> RequestError:
    """Return the error of OpenAI's API about one field."""
    return RequestError(status, code, message, param=name)


class Fields(dict[str, Any]):
    """The fields of a request to the page's API, and their validation."""

    def error(self, name: str, message: str) -> RequestError:  # noqa: ARG002
        """Return the error for a field that is not what it must be."""
        return wrong_value(message)

    def integer(self, name: str, low: int, high: int, default: _T) -> int | _T:
        """Return an integer from low to high."""
        if name not in self:
            return default
        value = self[name]
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, f"{name} must be an integer from {low} to {high}")
        return value

    def flag(self, name: str) -> bool:
        """Return a boolean; False if it is missing."""
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.error(name, f"{name} must be true or false")
        return value

    def text(self, name: str) -> str:
        """Return a text."""
        text = self.get(name)
        if not isinstance(text, str):
            raise self.error(name, f"{name} must be text")
        if not is_utf8(text):
            raise self.error(name, f"{name} must be text in UTF-8")
        return text

    def ids(self, name: str = "ids") -> list[int]:
        """Return a list of ids, not yet checked against a vocabulary."""
        ids = self.get(name)
        if not isinstance(ids, list) or not all(type(id) is int for id in ids):
            raise self.error(name, f"{name} must be a list of integers")
        if not all(0 <= id < 2**31 for id in ids):
            raise self.error(name, f"{name} must be token ids of the model")
        return ids


class OpenAIFields(Fields):
    """The fields of a request to OpenAI's API."""

    def error(self, name: str, message: str) -> RequestError:
        """Return the error, in OpenAI's format."""
        return field_error(name, message)

    def refuse_others(self, known: Collection[str]) -> None:
        """Refuse a field that is not known."""
        for name in self:
            if name not in known:
                message = f"unrecognized request argument supplied: {name[:80]}"
                raise field_error(name[:80], message, code="unknown_parameter")


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
