"""What may be asked of the models given at launch.

    GET  /api/models                    names and sizes
    GET  /api/vocabulary?model=NAME     the text of every token, by id
    POST /api/next                      {"model": NAME, "prompt": text} or {..., "ids": [...]}

`/api/next` answers with binary: four bytes that give the length of a JSON text (little-endian), the
text `{"prompt": [tokens], "vocab_size": V}` filled up with spaces to a multiple of four, and then
one row of V float32 logits. The page does the rest, so that no slider asks the server.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lmhead.analysis.reading import prompt_ids, read_hidden
from lmhead.analysis.tokens import piece_of, pieces_of
from lmhead.models import LanguageModel
from lmhead.server.guard import refusal
from lmhead.server.limits import Limits
from lmhead.server.work import Busy, Gone, Ticket, Worker
from lmhead.sweep import whole_row

__all__ = ["Api"]

_T = TypeVar("_T")


class Refused(Exception):  # noqa: N818
    """A question that cannot be answered, with the answer that says so."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.response = refusal(status, code, message)


class Api:
    """The endpoints, on models by name."""

    def __init__(self, models: Mapping[str, LanguageModel], worker: Worker, limits: Limits) -> None:
        self.models, self.worker, self.limits = dict(models), worker, limits
        self._vocabularies: dict[str, bytes] = {}

    async def list_models(self, request: Request) -> Response:  # noqa: ARG002
        """Names and sizes."""
        found = [
            {
                "name": name,
                "vocab_size": model.head.vocab_size,
                "hidden_size": model.head.hidden_size,
                "max_length": model.max_length,
                "text": model.tokenizer is not None,
            }
            for name, model in self.models.items()
        ]
        return JSONResponse({"models": found})

    async def vocabulary(self, request: Request) -> Response:
        """The text of every token, by id; a token that is no text has its name."""
        try:
            name, model = self._model(request.query_params.get("model"))
            if name not in self._vocabularies:
                self._vocabularies[name] = await self._work(
                    request, lambda ticket: _vocabulary(model, ticket)
                )
        except Refused as refused:
            return refused.response
        return Response(self._vocabularies[name], media_type="application/json")

    async def next(self, request: Request) -> Response:
        """One row of logits behind a prompt."""
        try:
            asked = _object(await request.body(), {"model", "prompt", "ids"})
            _, model = self._model(asked.get("model"))
            prompt = self._prompt(asked)
            content = await self._work(request, lambda ticket: self._row(model, prompt, ticket))
        except Refused as refused:
            return refused.response
        return Response(content, media_type="application/octet-stream")

    def _row(self, model: LanguageModel, prompt: str | list[int], ticket: Ticket) -> bytes:
        try:
            ids = prompt_ids(model, prompt, "prompt" if isinstance(prompt, str) else "ids")
        except (ValueError, TypeError) as error:
            raise Refused(400, "wrong_value", str(error)) from None
        if len(ids) > self.limits.prompt_tokens:
            most = f"at most {self.limits.prompt_tokens:,} tokens"
            raise Refused(400, "wrong_value", f"prompt must have {most}; got {len(ids):,}")
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

    def _prompt(self, asked: dict[str, Any]) -> str | list[int]:
        if ("prompt" in asked) == ("ids" in asked):
            raise Refused(400, "wrong_value", "give prompt or ids, one of them")
        if "prompt" in asked:
            prompt = asked["prompt"]
            if not isinstance(prompt, str):
                raise Refused(400, "wrong_value", "prompt must be text")
            try:
                prompt.encode("utf-8")
            except UnicodeEncodeError:
                raise Refused(400, "wrong_value", "prompt must be text in UTF-8") from None
            return prompt
        ids = asked["ids"]
        if not isinstance(ids, list) or not all(type(id) is int for id in ids):
            raise Refused(400, "wrong_value", "ids must be a list of whole numbers")
        if not all(0 <= id < 2**31 for id in ids):
            raise Refused(400, "wrong_value", "ids must be ids of the model's tokens")
        return ids

    def _model(self, name: object) -> tuple[str, LanguageModel]:
        if not isinstance(name, str) or name not in self.models:
            raise Refused(404, "no_model", "there is no model of that name; see /api/models")
        return name, self.models[name]

    async def _work(self, request: Request, job: Callable[[Ticket], _T]) -> _T:
        """The job's result, unless the client leaves first."""
        job_done = asyncio.ensure_future(self.worker.run(job))
        client_left = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({job_done, client_left}, return_when=asyncio.FIRST_COMPLETED)
            if not job_done.done():
                raise Gone
            return job_done.result()
        except Busy as busy:
            refused = Refused(429, "busy", str(busy))
            refused.response.headers["retry-after"] = str(busy.seconds)
            raise refused from None
        except TimeoutError:
            message = f"no answer within {self.limits.seconds:g} s"
            raise Refused(503, "too_long", message) from None
        except Gone:
            raise Refused(499, "gone", "the client has left") from None
        finally:
            job_done.cancel()
            client_left.cancel()


async def _left(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _object(body: bytes, known: set[str]) -> dict[str, Any]:
    """A JSON object with these keys and no others."""
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise Refused(400, "wrong_json", "the body must be JSON in UTF-8") from None
    if not isinstance(found, dict):
        raise Refused(400, "wrong_json", "the body must be a JSON object")
    if unknown := sorted(set(found) - known):
        names = ", ".join(sorted(known))
        raise Refused(400, "wrong_value", f"the fields are {names}; got {unknown[0][:40]!r}")
    return found


def _no_number(name: str) -> float:
    raise ValueError(name)


def _vocabulary(model: LanguageModel, ticket: Ticket) -> bytes:
    texts = []
    for id in range(model.head.vocab_size):
        if id % 1024 == 0:
            ticket.check()
        texts.append(piece_of(model, id).to_json()["text"])
    return json.dumps(texts, ensure_ascii=True).encode("ascii")
