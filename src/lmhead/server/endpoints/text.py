"""How well a model expects a text, token by token.

POST /api/score    {"model": NAME, "text": text}

The answer is what `lmhead score --json --tokens` prints, without its head, and with `first`: the
token at the beginning, which has no figures since nothing comes before it.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmhead.analysis.score import ScoredToken, score
from lmhead.analysis.tokens import piece_of
from lmhead.models import LanguageModel
from lmhead.server.desk import Desk, Refused, answering, check_length, encoded
from lmhead.server.work import Ticket

__all__ = ["routes"]


def routes(desk: Desk) -> list[Route]:
    """The one of this file."""

    async def score_text(request: Request) -> Response:
        asked = await desk.read(request, {"model", "text"})
        _, model = desk.model(asked.get("model"))
        text = desk.text(asked, "text")
        content = await desk.work(request, lambda ticket: _scored(desk, model, text, ticket))
        return Response(content, media_type="application/json")

    return [Route("/api/score", answering(score_text), methods=["POST"])]


def _scored(desk: Desk, model: LanguageModel, text: str, ticket: Ticket) -> bytes:
    ids = encoded(model, text, "text")
    check_length("text", len(ids), 2, desk.limits.text_tokens)
    ticket.check()
    tokens: list[dict[str, Any]] = []

    def add(scored: ScoredToken) -> None:
        ticket.check()  # whoever has left stops the work at the next window
        tokens.append(scored.to_json())

    try:
        result = score(model, text, each=add)
    except ValueError as error:
        raise Refused(400, "wrong_value", str(error)) from None
    said = {"first": piece_of(model, ids[0]).to_json(), "tokens": tokens, **result.to_json()}
    return json.dumps(said, allow_nan=False).encode("ascii")
