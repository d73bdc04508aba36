"""Two models, or two samplers of one model, along a text.

GET  /api/comparable?a=NAME&b=NAME     whether both models speak of the same words
POST /api/compare    {"a": NAME, "b": NAME, "text": text}
                     {"a": NAME, "sampler_a": {...}, "sampler_b": {...}, "text": text}

The answer to a comparison is that of `lmhead compare --json`, but with every position of the text,
in its order: `places`, and `first`, the token that nothing comes before. Models whose tokens differ
are no mistake of who asks: the answer is `{"comparable": false, "reason": ..., ...}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lmhead.analysis import DifferentWords, compare_models, compare_samplers
from lmhead.analysis.same_words import check_same_words
from lmhead.analysis.tokens import Piece, piece_of
from lmhead.models import LanguageModel
from lmhead.sampling import Sampler
from lmhead.server.desk import Desk, Refused, answering, check_length, encoded
from lmhead.server.work import Ticket

__all__ = ["routes"]

NUMBERS = frozenset({"temperature", "top_k", "top_p", "min_p", "typical_p"})
MOST = 1e9  # of any of them
ORDERS = ("hf", "vllm", "llama.cpp")


def routes(desk: Desk) -> list[Route]:
    """The two of this file."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    async def comparable(request: Request) -> Response:
        a, one = desk.model(request.query_params.get("a"))
        b, two = desk.model(request.query_params.get("b"))
        if (a, b) not in known:
            known[a, b] = await desk.work(request, lambda _: _comparable(one, two))
        return JSONResponse(known[a, b])

    async def compare(request: Request) -> Response:
        asked = await desk.read(request, {"a", "b", "sampler_a", "sampler_b", "text"})
        text = desk.text(asked, "text")
        _, a = desk.model(asked.get("a"))
        if "b" in asked:
            if "sampler_a" in asked or "sampler_b" in asked:
                raise Refused(400, "wrong_value", "give b, or sampler_a and sampler_b")
            _, b = desk.model(asked["b"])
            found = await desk.work(request, lambda ticket: _models(desk, a, b, text, ticket))
        else:
            one, two = (_sampler(asked.get(name), name, a) for name in ("sampler_a", "sampler_b"))
            found = await desk.work(
                request, lambda ticket: _samplers(desk, a, one, two, text, ticket)
            )
        return JSONResponse(found)

    return [
        Route("/api/comparable", answering(comparable)),
        Route("/api/compare", answering(compare), methods=["POST"]),
    ]


def _comparable(a: LanguageModel, b: LanguageModel) -> dict[str, Any]:
    try:
        check_same_words(a, b)
    except DifferentWords as different:
        return _told(different)
    except ValueError as error:  # a model without a tokenizer
        raise Refused(400, "wrong_value", str(error)) from None
    return {"comparable": True}


def _told(different: DifferentWords) -> dict[str, Any]:
    """Where two models part, in a form that the page can put into words."""
    one, two = (
        Piece(0, said).text if isinstance(said, bytes) else said for said in different.found
    )
    return {
        "comparable": False,
        "reason": different.reason,
        "place": different.place,
        "a": one,
        "b": two,
    }


def _models(
    desk: Desk, a: LanguageModel, b: LanguageModel, text: str, ticket: Ticket
) -> dict[str, Any]:
    if not (told := _comparable(a, b))["comparable"]:
        return told
    count, first = _measured(desk, a, text)
    ticket.check()
    try:
        found = compare_models(a, b, text, worst=count, between=ticket.check)
    except DifferentWords as different:
        return _told(different)
    return _document(found.to_json(), first)


def _samplers(
    desk: Desk, model: LanguageModel, a: Sampler, b: Sampler, text: str, ticket: Ticket
) -> dict[str, Any]:
    count, first = _measured(desk, model, text)
    ticket.check()
    found = compare_samplers(model, a, b, text, worst=count, between=ticket.check)
    return _document(found.to_json(), first)


def _measured(desk: Desk, model: LanguageModel, text: str) -> tuple[int, dict[str, Any]]:
    """How many tokens a text has, within the limits, and the first of them."""
    ids = encoded(model, text, "text")
    check_length("text", len(ids), 2, desk.limits.compare_tokens)
    return len(ids), piece_of(model, ids[0]).to_json()


def _document(found: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """The command's document, with all places in the order of the text."""
    places = sorted(found.pop("differences"), key=lambda place: int(place["position"]))
    for place in places:
        del place["before"]
    return {"comparable": True, **found, "first": first, "places": places}


def _sampler(options: object, name: str, model: LanguageModel) -> Sampler:
    """A sampler of options by the names that the library has for them."""
    if not isinstance(options, Mapping):
        raise Refused(400, "wrong_value", f"{name} must be an object")
    if unknown := sorted(set(options) - NUMBERS - {"order"}):
        names = ", ".join(sorted(NUMBERS | {"order"}))
        raise Refused(
            400, "wrong_value", f"the fields of {name} are {names}; got {unknown[0][:40]!r}"
        )
    for option, value in options.items():
        if option == "order" and value not in ORDERS:
            orders = ", ".join(ORDERS)
            raise Refused(400, "wrong_value", f"order of {name} must be one of {orders}")
        if option != "order" and not (type(value) in (int, float) and abs(value) <= MOST):
            raise Refused(400, "wrong_value", f"{option} of {name} must be a number")
    try:
        return Sampler(seed=0, eos_token_id=list(model.eos_token_ids) or None, **options)
    except (ValueError, TypeError, OverflowError) as error:
        raise Refused(400, "wrong_value", f"{name}: {error}") from None
