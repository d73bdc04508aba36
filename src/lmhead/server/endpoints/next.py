"""One row of logits behind a prompt.

POST /api/next    {"model": NAME, "prompt": text} or {"model": NAME, "ids": [...]}

and with "more": [...], ids that came behind the prompt, if there are any.

The answer is binary: four bytes that give the length of a JSON text (little-endian), the text
`{"prompt": [tokens], "vocab_size": V}` filled up with spaces to a multiple of four, and then one
row of V float32 logits. The page does the rest, so that no slider asks the server.
"""

from __future__ import annotations

import json
import struct

import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmhead.analysis.reading import read_hidden
from lmhead.analysis.tokens import pieces_of
from lmhead.models import LanguageModel
from lmhead.server.desk import Desk, answering
from lmhead.server.work import Ticket
from lmhead.sweep import whole_row

__all__ = ["routes"]


def routes(desk: Desk) -> list[Route]:
    """The one of this file."""

    async def next(request: Request) -> Response:
        asked = await desk.read(request, {"model", "prompt", "ids", "more"})
        _, model = desk.model(asked.get("model"))
        prompt, more = desk.prompt(asked), desk.more(asked)
        content = await desk.work(request, lambda ticket: _row(desk, model, prompt, more, ticket))
        return Response(content, media_type="application/octet-stream")

    return [Route("/api/next", answering(next), methods=["POST"])]


def _row(
    desk: Desk, model: LanguageModel, prompt: str | list[int], more: list[int], ticket: Ticket
) -> bytes:
    ids = desk.tokens(model, prompt)
    if more:
        ids = desk.tokens(model, ids + more)
    ticket.check()
    last = read_hidden(model, ids)[-1:]
    ticket.check()
    with torch.no_grad():
        logits = whole_row(model.head(last).float().source(), 0)
    said = {
        "prompt": [piece.to_json() for piece in pieces_of(model, ids)],
        "vocab_size": len(logits),
    }
    text = json.dumps(said).encode("ascii")
    text += b" " * (-len(text) % 4)
    row: bytes = logits.contiguous().numpy().astype("<f4").tobytes()
    return struct.pack("<I", len(text)) + text + row
