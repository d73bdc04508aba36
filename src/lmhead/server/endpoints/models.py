"""Which models there are, and the text of their tokens.

GET /api/models                    names and sizes
GET /api/vocabulary?model=NAME     the text of every token, by id
"""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lmhead.analysis.tokens import piece_of
from lmhead.models import LanguageModel
from lmhead.server.desk import Desk, answering
from lmhead.server.work import Ticket

__all__ = ["routes"]


def routes(desk: Desk) -> list[Route]:
    """The two of this file."""
    vocabularies: dict[str, bytes] = {}

    async def list_models(request: Request) -> Response:  # noqa: ARG001
        found = [
            {
                "name": name,
                "vocab_size": model.head.vocab_size,
                "hidden_size": model.head.hidden_size,
                "max_length": model.max_length,
                "text": model.tokenizer is not None,
            }
            for name, model in desk.models.items()
        ]
        return JSONResponse({"models": found})

    async def vocabulary(request: Request) -> Response:
        name, model = desk.model(request.query_params.get("model"))
        if name not in vocabularies:
            vocabularies[name] = await desk.work(request, lambda ticket: _texts(model, ticket))
        return Response(vocabularies[name], media_type="application/json")

    return [
        Route("/api/models", list_models),
        Route("/api/vocabulary", answering(vocabulary)),
    ]


def _texts(model: LanguageModel, ticket: Ticket) -> bytes:
    """A list of texts as JSON; a token that is no text has its name."""
    texts = []
    for id in range(model.head.vocab_size):
        if id % 1024 == 0:
            ticket.check()
        texts.append(piece_of(model, id).to_json()["text"])
    return json.dumps(texts, ensure_ascii=True).encode("ascii")
