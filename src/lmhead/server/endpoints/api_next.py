"""One row of logits after a prompt.

POST /api/next    {"model": NAME, "prompt": text} or {"model": NAME, "ids": [...]}

and optionally "more": [...], ids after the prompt.

The response is binary: four bytes with the length of a JSON text (little-endian), the text
`{"prompt": [tokens], "vocab_size": V}` padded with spaces to a multiple of four, and then one row
of V float32 logits. The page applies samplers itself, so that a slider sends no request.
"""

from __future__ import annotations

import json
import struct

import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmhead.analysis.token_text import hidden_states, pieces_of
from lmhead.models import LanguageModel
from lmhead.server.api_context import ApiContext, handle_errors
from lmhead.server.worker import Cancellation

__all__ = ["routes"]


def routes(api: ApiContext) -> list[Route]:
    """Return the route of this file."""

    async def next_row(request: Request) -> Response:
        fields = await api.read(request, {"model", "prompt", "ids", "more"})
        _, model = api.model(fields.get("model"))
        prompt, more = api.prompt(fields), api.more(fields)
        content = await api.work(
            request, lambda cancellation: _row(api, model, prompt, more, cancellation)
        )
        return Response(content, media_type="application/octet-stream")

    return [Route("/api/next", handle_errors(next_row), methods=["POST"])]


def _row(
    api: ApiContext,
    model: LanguageModel,
    prompt: str | list[int],
    more: list[int],
    cancellation: Cancellation,
) -> bytes:
    ids = api.tokens(model, prompt)
    if more:
        ids = api.tokens(model, ids + more)
    cancellation.check()
    last = hidden_states(model, ids)[-1:]
    cancellation.check()
    with torch.no_grad():
        logits = model.head(last).float().scores().row_logits()[0]
    document = {
        "prompt": [piece.to_json() for piece in pieces_of(model, ids)],
        "vocab_size": len(logits),
    }
    text = json.dumps(document).encode("ascii")
    text += b" " * (-len(text) % 4)
    row: bytes = logits.contiguous().numpy().astype("<f4").tobytes()
    return struct.pack("<I", len(text)) + text + row
