"""The models, and the text of their tokens.

GET /api/models                    names, sizes, engines, ends, languages, and the version of lmhead
GET /api/vocabulary?model=NAME     the text of every token, by id; [text, bytes] where the bytes of
                                   the token are not those of the text
"""

from __future__ import annotations

import json

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lmhead import __version__
from lmhead.analysis.token_text import piece_of
from lmhead.models import LanguageModel
from lmhead.server.api_context import ApiContext
from lmhead.server.worker import Cancellation


def routes(api: ApiContext) -> list[Route]:
    """Return the routes of this file."""
    vocabularies: dict[str, bytes] = {}

    async def list_models(request: Request) -> Response:  # noqa: ARG001
        entries = [
            {
                "name": name,
                "given": api.given.get(name, name),
                "vocab_size": model.head.vocab_size,
                "hidden_size": model.head.hidden_size,
                "parameters": _parameters(model),
                "max_length": model.max_length,
                "engine": model.engine,
                "eos_token_ids": list(model.eos_token_ids),
                "text": model.tokenizer is not None,
                "languages": _languages(model),
            }
            for name, model in api.models.items()
        ]
        return JSONResponse({"lmhead": __version__, "models": entries})

    async def vocabulary(request: Request) -> Response:
        name = request.query_params.get("model", "")
        model = api.model(name)
        if name not in vocabularies:
            vocabularies[name] = await api.work(
                request, lambda cancellation: _texts(model, cancellation)
            )
        return Response(vocabularies[name], media_type="application/json")

    return [Route("/api/models", list_models), Route("/api/vocabulary", vocabulary)]


# A vocabulary covers a language if it needs few tokens per character, not one per byte.
_MAX_RATIO = 1.5
_SAMPLES = {"en": "And it came to pass in those days", "zh": "明月几时有，把酒问青天"}


def _parameters(model: LanguageModel) -> int | None:
    """Return the number of parameters, a shared tensor counted once; None if unknown."""
    if not isinstance(model.body, torch.nn.Module):
        return None
    tensors: list[torch.Tensor] = [*model.body.parameters()] or [*model.body.buffers()]
    tensors = [*tensors, *model.head.parameters()]
    return sum({t.data_ptr(): t.numel() for t in tensors}.values())


def _languages(model: LanguageModel) -> list[str]:
    """Return the languages of the page that the model's vocabulary covers."""
    encode = None if model.tokenizer is None else model.tokenizer.encode
    return [
        lang
        for lang, text in _SAMPLES.items()
        if encode and len(encode(text)) <= _MAX_RATIO * len(text)
    ]


def _texts(model: LanguageModel, cancellation: Cancellation) -> bytes:
    """Return a list of texts as JSON; [text, bytes] where the bytes are not those of the text."""
    texts: list[str | list[str | list[int]]] = []
    for id in range(model.head.vocab_size):
        if id % 1024 == 0:
            cancellation.check()
        piece = piece_of(model, id).to_json()
        same = piece["text"].encode("utf-8") == bytes(piece["bytes"])
        texts.append(piece["text"] if same else [piece["text"], piece["bytes"]])
    return json.dumps(texts, ensure_ascii=True).encode("ascii")
