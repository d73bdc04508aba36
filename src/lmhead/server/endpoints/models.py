"""Which models there are, and the text of their tokens.

GET /api/models                    names, sizes, ends, languages, and the version of lmhead
GET /api/vocabulary?model=NAME     the text of every token, by id; [text, bytes] where the bytes of
                                   the token are not those of the text
"""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lmhead import __version__
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
                "given": desk.given.get(name, name),
                "vocab_size": model.head.vocab_size,
                "hidden_size": model.head.hidden_size,
                "max_length": model.max_length,
                "eos_token_ids": list(model.eos_token_ids),
                "text": model.tokenizer is not None,
                "speaks": _speaks(model),
            }
            for name, model in desk.models.items()
        ]
        return JSONResponse({"lmhead": __version__, "models": found})

    async def vocabulary(request: Request) -> Response:
        name, model = desk.model(request.query_params.get("model"))
        if name not in vocabularies:
            vocabularies[name] = await desk.work(request, lambda ticket: _texts(model, ticket))
        return Response(vocabularies[name], media_type="application/json")

    return [
        Route("/api/models", list_models),
        Route("/api/vocabulary", answering(vocabulary)),
    ]


# A model has words for a language if it takes few tokens to a character, not one for each byte.
_MOST = 1.5
_SAMPLES = {"en": "And it came to pass in those days", "zh": "明月几时有，把酒问青天"}


def _speaks(model: LanguageModel) -> list[str]:
    """The languages of the page that the model has words for."""
    encode = None if model.tokenizer is None else model.tokenizer.encode
    return [
        lang for lang, text in _SAMPLES.items() if encode and len(encode(text)) <= _MOST * len(text)
    ]


def _texts(model: LanguageModel, ticket: Ticket) -> bytes:
    """A list of texts as JSON; a token that is no text has its name, and its bytes beside it."""
    texts: list[str | list[str | list[int]]] = []
    for id in range(model.head.vocab_size):
        if id % 1024 == 0:
            ticket.check()
        said = piece_of(model, id).to_json()
        same = said["text"].encode("utf-8") == bytes(said["bytes"])
        texts.append(said["text"] if same else [said["text"], said["bytes"]])
    return json.dumps(texts, ensure_ascii=True).encode("ascii")
