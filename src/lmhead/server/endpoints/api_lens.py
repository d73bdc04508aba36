"""The logit lens of a prompt.

POST /api/lens    {"model": NAME, "prompt": text or "ids": [...], "target": id or null, "top": 8}

The response is that of `lmhead lens --json`: `prompt`, `targets`, and `layers` with their cells.
The work stops between two layers if the client disconnects.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lmhead.analysis import logit_lens
from lmhead.models import LanguageModel
from lmhead.server.api_context import ApiContext, RequestError, check_length, handle_errors
from lmhead.server.worker import Cancellation

__all__ = ["routes"]

MOST_TOKENS = 20  # in a cell


def routes(api: ApiContext) -> list[Route]:
    """Return the route of this file."""

    async def lens(request: Request) -> Response:
        fields = await api.read(request, {"model", "prompt", "ids", "target", "top"})
        _, model = api.model(fields.get("model"))
        prompt = api.prompt(fields)
        vocab = model.head.vocab_size
        top = api.integer(fields, "top", 1, min(MOST_TOKENS, vocab), 8)
        target = None
        if fields.get("target") is not None:
            target = api.integer(fields, "target", 0, vocab - 1, 0)
        found = await api.work(
            request, lambda cancellation: _look(api, model, prompt, target, top, cancellation)
        )
        return JSONResponse(found)

    return [Route("/api/lens", handle_errors(lens), methods=["POST"])]


def _look(
    api: ApiContext,
    model: LanguageModel,
    prompt: str | list[int],
    target: int | None,
    top: int,
    cancellation: Cancellation,
) -> dict[str, Any]:
    ids = api.tokens(model, prompt)
    check_length("prompt", len(ids), 1, api.limits.lens_tokens)
    cancellation.check()
    try:
        found = logit_lens(model, ids, top=top, target=target, on_step=cancellation.check)
    except TypeError as error:  # a body without layers
        raise RequestError(400, "no_layers", str(error)) from None
    return found.to_json()
