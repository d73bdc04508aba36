"""Log-probability, rank and entropy of every token of a text.

POST /api/score    {"model": NAME, "text": text, "stream": false}

The response is that of `lmhead score --json --tokens`, without its header, and with `first`: the
first token, which is not scored since it has no context. With "stream", it comes in lines, one per
window.
"""

from __future__ import annotations

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmhead.analysis.score import Score, stream_score
from lmhead.analysis.token_text import piece_of
from lmhead.models import LanguageModel
from lmhead.server.api_context import ApiContext, Part, check_length, encode_text
from lmhead.server.request_fields import wrong_value


def routes(api: ApiContext) -> list[Route]:
    """Return the route of this file."""

    async def score_text(request: Request) -> Response:
        fields = await api.read(request, {"model", "text", "stream"})
        model = api.model(fields.get("model"))
        text = fields.text("text")
        return await api.respond(request, fields, lambda _: _scored(api, model, text))

    return [Route("/api/score", score_text, methods=["POST"])]


def _scored(api: ApiContext, model: LanguageModel, text: str) -> Iterator[Part]:
    """Yield the first token, and then the tokens of each window with the totals so far."""
    ids = encode_text(model, text, "text")
    check_length("text", len(ids), 2, api.limits.text_tokens)
    yield {"first": piece_of(model, ids[0]).to_json(), "tokens": [], "progress": [0, len(ids) - 1]}
    result: Score | None = None
    try:
        for tokens, result in stream_score(model, text):
            yield {
                "tokens": [token.to_json() for token in tokens],
                **result.to_json(),
                "progress": [result.tokens, len(ids) - 1],
            }
    except ValueError as error:
        raise wrong_value(str(error)) from None
    if result is not None:
        yield result.to_json()  # complete only after the last window
