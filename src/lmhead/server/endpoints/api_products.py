"""How the head computes logits: the hidden state after a prompt, and the weights of some tokens.

POST /api/products    {"model": NAME, "ids": [...], "tokens": [id, ...]}
                      {"model": NAME, "tokens": [id, ...]}

The response has `hidden` (D numbers), `weights` (one row of D numbers per token), `bias` (one
number per token, or null), and `scale` and `softcap` (or null), applied after the dot product.
Without "ids" the model is not run, and `hidden` is null.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lmhead.analysis.token_text import hidden_states
from lmhead.models import LanguageModel
from lmhead.server.api_context import ApiContext, RequestError, handle_errors
from lmhead.server.worker import Cancellation

__all__ = ["routes"]

MOST_TOKENS = 16


def routes(api: ApiContext) -> list[Route]:
    """Return the route of this file."""

    async def products(request: Request) -> Response:
        fields = await api.read(request, {"model", "ids", "tokens"})
        _, model = api.model(fields.get("model"))
        tokens = api.ids(fields.get("tokens"), "tokens")
        ids = api.tokens(model, api.ids(fields["ids"])) if "ids" in fields else None
        if not 1 <= len(tokens) <= MOST_TOKENS or max(tokens) >= model.head.vocab_size:
            message = f"tokens must be 1 to {MOST_TOKENS} ids of the model's tokens"
            raise RequestError(400, "wrong_value", message)
        document = await api.work(
            request, lambda cancellation: _products(model, ids, tokens, cancellation)
        )
        return JSONResponse(document)

    return [Route("/api/products", handle_errors(products), methods=["POST"])]


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
