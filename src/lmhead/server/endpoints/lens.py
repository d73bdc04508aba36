"""The logit lens of a prompt.

POST /api/lens    {"model": NAME, "prompt": text or "ids": [...], "target": id or null, "top": 8}

The answer is that of `lmhead lens --json`: `prompt`, `targets`, and `layers` with their cells.
Between two layers the work is given up if the client has left.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lmhead.analysis import logit_lens
from lmhead.models import LanguageModel
from lmhead.server.desk import Desk, Refused, answering, check_length
from lmhead.server.work import Ticket

__all__ = ["routes"]

MOST_WORDS = 20  # in a cell


def routes(desk: Desk) -> list[Route]:
    """The one of this file."""

    async def lens(request: Request) -> Response:
        asked = await desk.read(request, {"model", "prompt", "ids", "target", "top"})
        _, model = desk.model(asked.get("model"))
        prompt = desk.prompt(asked)
        top = _whole("top", asked.get("top", 8), 1, min(MOST_WORDS, model.head.vocab_size))
        target = asked.get("target")
        if target is not None:
            target = _whole("target", target, 0, model.head.vocab_size - 1)
        found = await desk.work(
            request, lambda ticket: _look(desk, model, prompt, target, top, ticket)
        )
        return JSONResponse(found)

    return [Route("/api/lens", answering(lens), methods=["POST"])]


def _look(
    desk: Desk,
    model: LanguageModel,
    prompt: str | list[int],
    target: int | None,
    top: int,
    ticket: Ticket,
) -> dict[str, Any]:
    ids = desk.tokens(model, prompt)
    check_length("prompt", len(ids), 1, desk.limits.lens_tokens)
    ticket.check()
    try:
        found = logit_lens(model, ids, top=top, target=target, between=ticket.check)
    except TypeError as error:  # a body without layers
        raise Refused(400, "no_layers", str(error)) from None
    return found.to_json()


def _whole(name: str, value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise Refused(400, "wrong_value", f"{name} must be a whole number from {low} to {high}")
    return value
