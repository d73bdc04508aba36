"""One row of logits after a prompt, and how the head computes its entries.

POST /api/next    {"model": NAME, "prompt": text} or {"model": NAME, "ids": [...]}

and optionally "more": [...], ids after the prompt.

The response is binary: four bytes with the length of a JSON text (little-endian), the text
`{"prompt": [tokens], "vocab_size": V}` padded with spaces to a multiple of four, and then one row
of V float32 logits. The page applies samplers itself, so that a slider sends no request.

POST /api/products    {"model": NAME, "ids": [...], "tokens": [id, ...]}
                      {"model": NAME, "tokens": [id, ...]}

The response has `hidden`, the state after the ids (D numbers), `weights` (one row of D numbers per
token), `bias` (one number per token, or null), and `scale` and `softcap` (or null), applied after
the dot product. Without "ids" the model is not run, and `hidden` is null.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lmhead.analysis.token_text import hidden_states, pieces_of
from lmhead.models import LanguageModel
from lmhead.server.api_context import ApiContext
from lmhead.server.request_fields import wrong_value
from lmhead.server.worker import Cancellation

MAX_TOKENS = 16  # of a request to /api/products


def routes(api: ApiContext) -> list[Route]:
    """Return the routes of this file."""

    async def next_row(request: Request) -> Response:
        fields = await api.read(request, {"model", "prompt", "ids", "more"})
        model = api.model(fields.get("model"))
        prompt, more = api.prompt(fields), fields.ids("more") if "more" in fields else []
        content = await api.work(
            request, lambda cancellation: _row(api, model, prompt, more, cancellation)
        )
        return Response(content, media_type="application/octet-stream")

    async def products(request: Request) -> Response:
        fields = await api.read(request, {"model", "ids", "tokens"})
        model = api.model(fields.get("model"))
        tokens = fields.ids("tokens")
        ids = api.tokens(model, fields.ids()) if "ids" in fields else None
        if not 1 <= len(tokens) <= MAX_TOKENS or max(tokens) >= model.head.vocab_size:
            raise wrong_value(f"tokens must be 1 to {MAX_TOKENS} ids of the model's tokens")
        document = await api.work(
            request, lambda cancellation: _products(model, ids, tokens, cancellation)
        )
        return JSONResponse(document)

    return [
        Route("/api/next", next_row, methods=["POST"]),
        Route("/api/products", products, methods=["POST"]),
    ]


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


def _products(
    model: LanguageModel, ids: list[int] | None, tokens: list[int], cancellation: Cancellation
) -> dict[str, Any]:
    hidden = None if ids is None else hidden_states(model, ids)[-1].float().tolist()
    cancellation.check()
    head = model.head
    bias = head.bias
    return {
        "hidden": hidden,
        "weights": head.weight.detach()[tokens].float().tolist(),
        "bias": None if bias is None else bias.detach()[tokens].float().tolist(),
        "scale": head.scale,
        "softcap": head.softcap,
    }
