"""Two models, or two samplers of one model, along a text.

GET  /api/comparable?a=NAME&b=NAME     whether both models have the same tokens
POST /api/compare    {"a": NAME, "b": NAME, "text": text, "stream": false}
                     {"a": NAME, "sampler_a": {...}, "sampler_b": {...}, "text": text, ...}

The response is that of `lmhead compare --json`, but with every position of the text, in order:
`places`, and `first`, the first token, which is not predicted. If the models have different tokens,
the response is `{"comparable": false, "reason": ..., ...}`, with status 200. With "stream", the
response comes in lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lmhead.analysis import VocabularyMismatch
from lmhead.analysis.comparison import (
    RunningComparison,
    stream_compare_models,
    stream_compare_samplers,
)
from lmhead.analysis.same_vocabulary import check_same_vocabulary
from lmhead.analysis.token_text import Piece, piece_of
from lmhead.models import LanguageModel
from lmhead.sampling import Sampler
from lmhead.server.api_context import ApiContext, Part, check_length, encode_text, parse_sampler
from lmhead.server.request_fields import wrong_value

OPTIONS = frozenset({"temperature", "top_k", "top_p", "min_p", "typical_p"})


def routes(api: ApiContext) -> list[Route]:
    """Return the routes of this file."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    async def comparable(request: Request) -> Response:
        a, b = (request.query_params.get(side, "") for side in ("a", "b"))
        model_a, model_b = api.model(a), api.model(b)
        if (a, b) not in known:
            known[a, b] = await api.work(request, lambda _: _comparable(model_a, model_b))
        return JSONResponse(known[a, b])

    async def compare(request: Request) -> Response:
        known = {"a", "b", "sampler_a", "sampler_b", "text", "stream"}
        fields = await api.read(request, known)
        text = fields.text("text")
        a = api.model(fields.get("a"))
        if "b" in fields:
            if "sampler_a" in fields or "sampler_b" in fields:
                raise wrong_value("give b, or sampler_a and sampler_b")
            b = api.model(fields["b"])
            return await api.respond(request, fields, lambda _: _models(api, a, b, text))
        eos = list(a.eos_token_ids) or None
        first, second = (
            parse_sampler(fields.get(name), name, OPTIONS, eos_token_id=eos)
            for name in ("sampler_a", "sampler_b")
        )
        return await api.respond(request, fields, lambda _: _samplers(api, a, first, second, text))

    return [Route("/api/comparable", comparable), Route("/api/compare", compare, methods=["POST"])]


def _comparable(a: LanguageModel, b: LanguageModel) -> dict[str, Any]:
    try:
        check_same_vocabulary(a, b)
    except VocabularyMismatch as different:
        return _mismatch(different)
    except ValueError as error:  # a model without a tokenizer
        raise wrong_value(str(error)) from None
    return {"comparable": True}


def _mismatch(different: VocabularyMismatch) -> dict[str, Any]:
    """Return where two models differ, in a form that the page can translate."""
    first, second = (Piece(0, x).text if isinstance(x, bytes) else x for x in different.found)
    return {
        "comparable": False,
        "reason": different.reason,
        "place": different.place,
        "a": first,
        "b": second,
    }


def _models(api: ApiContext, a: LanguageModel, b: LanguageModel, text: str) -> Iterator[Part]:
    if not (result := _comparable(a, b))["comparable"]:
        yield result
        return
    count, first = _measured(api, a, text)
    try:
        yield from _places(stream_compare_models(a, b, text, worst=count), count, first)
    except VocabularyMismatch as different:
        yield _mismatch(different)


def _samplers(
    api: ApiContext, model: LanguageModel, a: Sampler, b: Sampler, text: str
) -> Iterator[Part]:
    count, first = _measured(api, model, text)
    yield from _places(stream_compare_samplers(model, a, b, text, worst=count), count, first)


def _measured(api: ApiContext, model: LanguageModel, text: str) -> tuple[int, dict[str, Any]]:
    """Return the number of tokens of a text, within the limits, and the first of them."""
    ids = encode_text(model, text, "text")
    check_length("text", len(ids), 2, api.limits.compare_tokens)
    return len(ids), piece_of(model, ids[0]).to_json()


_POSITIONS = 64  # in a part, if they come one by one


def _places(
    steps: Iterator[RunningComparison], count: int, first: dict[str, Any]
) -> Iterator[Part]:
    """Yield the command's document in parts, with all positions in the order of the text."""
    sent = 0
    for comparison in steps:
        if sent and comparison.positions - sent < _POSITIONS and comparison.positions < count - 1:
            continue
        document = comparison.result().to_json()
        places = sorted(document.pop("differences"), key=lambda place: int(place["position"]))
        for place in places:
            del place["before"]
        start = {} if sent else {"comparable": True, "first": first}
        progress = [comparison.positions, count - 1]
        yield {**start, **document, "places": places[sent:], "progress": progress}
        sent = comparison.positions
