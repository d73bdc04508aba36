"""The logit lens of a prompt.

POST /api/lens    {"model": NAME, "prompt": text or "ids": [...], "target": id or null, "top": 8,
                   "stream": false}

The response is that of `lmhead lens --json`: `prompt`, `targets`, and `layers` with their cells.
With "stream", it comes in lines, one per layer. The work stops between two layers if the client
disconnects.
"""

from __future__ import annotations

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmhead.analysis.lens import stream_lens
from lmhead.models import LanguageModel
from lmhead.server.api_context import ApiContext, Part, check_length
from lmhead.server.request_fields import RequestError

MAX_TOKENS = 20  # in a cell


def routes(api: ApiContext) -> list[Route]:
    """Return the route of this file."""

    async def lens(request: Request) -> Response:
        fields = await api.read(request, {"model", "prompt", "ids", "target", "top", "stream"})
        model = api.model(fields.get("model"))
        prompt = api.prompt(fields)
        vocab = model.head.vocab_size
        top = fields.integer("top", 1, min(MAX_TOKENS, vocab), 8)
        if fields.get("target") is None:
            fields.pop("target", None)
        target = fields.integer("target", 0, vocab - 1, None)
        return await api.respond(request, fields, lambda _: _rows(api, model, prompt, target, top))

    return [Route("/api/lens", lens, methods=["POST"])]


def _rows(
    api: ApiContext, model: LanguageModel, prompt: str | list[int], target: int | None, top: int
) -> Iterator[Part]:
    """Yield prompt and targets, and then one layer after the other."""
    ids = api.tokens(model, prompt)
    check_length("prompt", len(ids), 1, api.limits.lens_tokens)
    try:
        for lens, count in stream_lens(model, ids, top=top, target=target):
            part = lens.to_json()
            yield {
                **({} if lens.cells else part),
                "layers": part["layers"][-1:],
                "progress": [len(lens.cells), count],
            }
    except TypeError as error:  # a body without layers
        raise RequestError(400, "no_layers", str(error)) from None
