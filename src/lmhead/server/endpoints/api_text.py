"""Log-probability, rank and entropy of every token of a text.

POST /api/score    {"model": NAME, "text": text}

The response is that of `lmhead score --json --tokens`, without its header, and with `first`: the
first token, which is not scored since it has no context.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmhead.analysis.score import ScoredToken, score
from lmhead.analysis.token_text import piece_of
from lmhead.models import LanguageModel
from lmhead.server.api_context import (
    ApiContext,
    RequestError,
    check_length,
    encode_text,
    handle_errors,
)
from lmhead.server.worker import Cancellation

__all__ = ["routes"]


def routes(api: ApiContext) -> list[Route]:
    """Return the route of this file."""

    async def score_text(request: Request) -> Response:
        fields = await api.read(request, {"model", "text"})
        _, model = api.model(fields.get("model"))
        text = api.text(fields, "text")
        content = await api.work(
            request, lambda cancellation: _scored(api, model, text, cancellation)
        )
        return Response(content, media_type="application/json")

    return [Route("/api/score", handle_errors(score_text), methods=["POST"])]


def _scored(api: ApiContext, model: LanguageModel, text: str, cancellation: Cancellation) -> bytes:
    ids = encode_text(model, text, "text")
    check_length("text", len(ids), 2, api.limits.text_tokens)
    cancellation.check()
    tokens: list[dict[str, Any]] = []

    def add(scored: ScoredToken) -> None:
        cancellation.check()  # stops at the next window if the client has disconnected
        tokens.append(scored.to_json())

    try:
        result = score(model, text, on_token=add)
    except ValueError as error:
        raise RequestError(400, "wrong_value", str(error)) from None
    document = {"first": piece_of(model, ids[0]).to_json(), "tokens": tokens, **result.to_json()}
    return json.dumps(document, allow_nan=False).encode("ascii")
