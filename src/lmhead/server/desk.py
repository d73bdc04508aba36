"""Where questions are taken: the body is read, the model found, the work handed to the worker.

In:  a request. Out: an answer, or a `Refused` that says what was wrong with the question.

An endpoint is a method that reads, works and answers; `answering` turns what it refuses into the
response that says so.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from lmhead.analysis.reading import prompt_ids
from lmhead.models import LanguageModel
from lmhead.server.guard import refusal
from lmhead.server.limits import Limits
from lmhead.server.stopping import asking_before_layers
from lmhead.server.work import Busy, Gone, Ticket, Worker

__all__ = ["Desk", "Endpoint", "Refused", "answering", "check_length", "encoded"]

_T = TypeVar("_T")
Endpoint = Callable[[Request], Awaitable[Response]]


class Refused(Exception):  # noqa: N818
    """A question that cannot be answered, with the answer that says so."""

    def __init__(self, status: int, code: str, message: str, **facts: float) -> None:
        super().__init__(message)
        self.response = refusal(status, code, message, facts)


def answering(endpoint: Endpoint) -> Endpoint:
    """The endpoint, with what it refuses as a response."""

    @wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Refused as refused:
            return refused.response

    return answer


class Desk:
    """The models, how each was given, the folder of a run, the worker; how a question is read."""

    def __init__(
        self,
        models: Mapping[str, LanguageModel],
        worker: Worker,
        limits: Limits,
        run: Path | None = None,
        given: Mapping[str, str] | None = None,
    ) -> None:
        self.models, self.worker, self.limits, self.run = dict(models), worker, limits, run
        self.given = dict(given or {})

    async def read(self, request: Request, known: set[str]) -> dict[str, Any]:
        """The body: a JSON object with these fields and no others."""
        return _object(await request.body(), known)

    def model(self, name: object) -> tuple[str, LanguageModel]:
        """A model given at launch, by its name."""
        if not isinstance(name, str) or name not in self.models:
            raise Refused(404, "no_model", "there is no model of that name; see /api/models")
        return name, self.models[name]

    def prompt(self, asked: Mapping[str, Any], name: str = "prompt") -> str | list[int]:
        """The text under `name`, or the list under "ids"."""
        if (name in asked) == ("ids" in asked):
            raise Refused(400, "wrong_value", f"give {name} or ids, one of them")
        return self.text(asked, name) if name in asked else self.ids(asked["ids"])

    def more(self, asked: Mapping[str, Any]) -> list[int]:
        """The ids behind the prompt, under "more"; none if it is not there."""
        return self.ids(asked.get("more", []), "more")

    def text(self, asked: Mapping[str, Any], name: str) -> str:
        """The text under `name`."""
        text = asked.get(name)
        if not isinstance(text, str):
            raise Refused(400, "wrong_value", f"{name} must be text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise Refused(400, "wrong_value", f"{name} must be text in UTF-8") from None
        return text

    def ids(self, ids: object, name: str = "ids") -> list[int]:
        """Ids as they came; whether the model has them, `tokens` finds out."""
        if not isinstance(ids, list) or not all(type(id) is int for id in ids):
            raise Refused(400, "wrong_value", f"{name} must be a list of whole numbers")
        if not all(0 <= id < 2**31 for id in ids):
            raise Refused(400, "wrong_value", f"{name} must be ids of the model's tokens")
        return ids

    def whole(self, asked: Mapping[str, Any], name: str, low: int, high: int, default: int) -> int:
        """The whole number under `name`."""
        value = asked.get(name, default)
        if type(value) is not int or not low <= value <= high:
            raise Refused(400, "wrong_value", f"{name} must be a whole number from {low} to {high}")
        return value

    def tokens(
        self, model: LanguageModel, prompt: str | list[int], name: str = "prompt"
    ) -> list[int]:
        """The prompt as ids of this model, no more than the limit. For the worker's thread."""
        if isinstance(prompt, str):
            ids = encoded(model, prompt, name)
        else:
            name, ids = "ids", prompt
        most = self.limits.prompt_tokens
        check_length(name, len(ids), 1, min(most, model.max_length or most))
        try:
            return prompt_ids(model, ids, name)
        except (ValueError, TypeError) as error:
            raise Refused(400, "wrong_value", str(error)) from None

    async def work(self, request: Request, job: Callable[[Ticket], _T]) -> _T:
        """The job's result, unless the client leaves first.

        The models ask the job's ticket before each of their layers: a job that nobody waits for
        ends in the middle of a text, though it may not ask itself.
        """

        def stoppable(ticket: Ticket) -> _T:
            with asking_before_layers(self.models.values(), ticket.check):
                return job(ticket)

        job_done = asyncio.ensure_future(self.worker.run(stoppable))
        client_left = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({job_done, client_left}, return_when=asyncio.FIRST_COMPLETED)
            if not job_done.done():
                raise Gone
            return job_done.result()
        except Busy as busy:
            refused = Refused(429, "busy", str(busy), seconds=busy.seconds)
            refused.response.headers["retry-after"] = str(busy.seconds)
            raise refused from None
        except TimeoutError:
            message = f"no answer within {self.limits.seconds:g} s"
            raise Refused(503, "too_long", message, seconds=self.limits.seconds) from None
        except Gone:
            raise Refused(499, "gone", "the client has left") from None
        finally:
            job_done.cancel()
            client_left.cancel()


def encoded(model: LanguageModel, text: str, name: str) -> list[int]:
    """A text as ids of this model. For the worker's thread."""
    if model.tokenizer is None:
        message = f"{name} needs a tokenizer, which this model does not have"
        raise Refused(400, "no_tokenizer", message)
    return list(model.tokenizer.encode(text))


def check_length(name: str, got: int, least: int, most: int) -> None:
    """Refuse a text of too many or too few tokens."""
    if not least <= got <= most:
        message = f"{name} must have from {least} to {most:,} tokens here; got {got:,}"
        raise Refused(400, "wrong_length", message, least=least, most=most, got=got)


async def _left(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _object(body: bytes, known: set[str]) -> dict[str, Any]:
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise Refused(400, "wrong_json", "the body must be JSON in UTF-8") from None
    if not isinstance(found, dict):
        raise Refused(400, "wrong_json", "the body must be a JSON object")
    if unknown := sorted(set(found) - known):
        names = ", ".join(sorted(known))
        raise Refused(400, "wrong_value", f"the fields are {names}; got {unknown[0][:40]!r}")
    return found


def _no_number(name: str) -> float:
    raise ValueError(name)
