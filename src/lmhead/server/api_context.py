"""Shared by all endpoints: the models, the worker, and what a request says about them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from lmhead.analysis.token_text import prompt_ids
from lmhead.models import LanguageModel
from lmhead.sampler_options import ORDERS
from lmhead.sampling import Sampler
from lmhead.server.request_fields import Fields, RequestError, wrong_value
from lmhead.server.request_limits import Limits
from lmhead.server.worker import Cancellation, Job, QueueFull, Worker, call_before, layers_of

_T = TypeVar("_T")
Part = dict[str, Any]  # of a response


class ApiContext:
    """Models, worker and limits of a server.

    `run` is the folder of a training run to watch; `given` has, by name, the argument of
    `lmhead.open_model` that opens the model again.
    """

    def __init__(
        self,
        models: Mapping[str, LanguageModel],
        worker: Worker,
        limits: Limits,
        run: Path | None = None,
        given: Mapping[str, str] | None = None,
    ) -> None:
        self.models, self.worker, self.limits, self.run = dict(models), worker, limits, run
        self.given = dict(given or {})
        self._layers = layers_of(self.models.values())

    async def read(self, request: Request, known: set[str]) -> Fields:
        """Return the body: a JSON object with only these fields."""
        fields = parse_json_object(await request.body())
        if unknown := sorted(set(fields) - known):
            names = ", ".join(sorted(known))
            raise wrong_value(f"the fields are {names}; got {unknown[0][:40]!r}")
        return Fields(fields)

    def model(self, name: object) -> LanguageModel:
        """Return the model of this name."""
        if not isinstance(name, str) or name not in self.models:
            raise RequestError(404, "no_model", "there is no model of that name; see /api/models")
        return self.models[name]

    def prompt(self, fields: Fields) -> str | list[int]:
        """Return the text in the field "prompt", or the list in "ids"."""
        if ("prompt" in fields) == ("ids" in fields):
            raise wrong_value("give either prompt or ids")
        return fields.text("prompt") if "prompt" in fields else fields.ids()

    def tokens(self, model: LanguageModel, prompt: str | list[int]) -> list[int]:
        """Return the prompt as ids of this model, within the limits. Runs in the worker."""
        if isinstance(prompt, str):
            name, ids = "prompt", encode_text(model, prompt, "prompt")
        else:
            name, ids = "ids", prompt
        limit = self.limits.prompt_tokens
        check_length(name, len(ids), 1, min(limit, model.max_length or limit))
        try:
            return prompt_ids(model, ids, name)
        except (ValueError, TypeError) as error:
            raise wrong_value(str(error)) from None

    async def work(self, request: Request, job: Callable[[Cancellation], _T]) -> _T:
        """Return the job's result; cancel the job if the client disconnects."""

        def once(cancellation: Cancellation) -> Iterator[_T]:
            yield job(cancellation)

        async with aclosing(self.stream(once, single=True)) as results:
            return await self.until_disconnect(request, anext(results))

    async def stream(self, job: Job[_T], *, single: bool = False) -> AsyncGenerator[_T, None]:
        """Yield what a job yields; if `single`, only the first.

        The models check the cancellation before each layer, so a job stops even in the middle of a
        long text.
        """

        def stoppable(cancellation: Cancellation) -> Iterator[_T]:
            steps = job(cancellation)
            while True:
                # Not around the loop: between two steps, other jobs use the models.
                with call_before(self._layers, cancellation.check):
                    try:
                        result = next(steps)
                    except StopIteration:
                        return
                yield result

        try:
            # Closed explicitly: a generator that is only dropped would run on for a while.
            worked = self.worker.stream(stoppable, single=single, limits=self.limits)
            async with aclosing(worked) as results:
                async for result in results:
                    yield result
        except QueueFull as full:
            error = RequestError(429, "busy", str(full), seconds=full.seconds)
            error.response.headers["retry-after"] = str(full.seconds)
            raise error from None
        except TimeoutError:
            message = f"no answer within {self.limits.seconds:g} s"
            raise RequestError(503, "too_long", message, seconds=self.limits.seconds) from None

    async def respond(self, request: Request, fields: Fields, job: Job[Part]) -> Response:
        """Return what a job yields as one JSON document; with the field "stream", in lines.

        A document is made of its parts by appending lists and replacing everything else. Lines have
        `progress`, too: [done, all]. An error after the first line is the last line, and each part
        has as much time as a whole document.
        """
        stream = fields.flag("stream")

        def parts(cancellation: Cancellation) -> Iterator[Part]:
            for part in job(cancellation):
                if stream:
                    cancellation.renew()
                yield part

        results = self.stream(parts)
        if not stream:
            document: Part = {}

            async def collect() -> None:
                async with aclosing(results):
                    async for part in results:
                        _merge(document, part)

            await self.until_disconnect(request, collect())
            document.pop("progress", None)
            return JSONResponse(document)
        try:
            first = await self.until_disconnect(request, anext(results))
        except BaseException:
            await results.aclose()
            raise
        return StreamingResponse(_lines(first, results), media_type="application/x-ndjson")

    async def until_disconnect(self, request: Request, work: Awaitable[_T]) -> _T:
        """Return the result; cancel the work if the client disconnects."""
        job_done = asyncio.ensure_future(work)
        disconnected = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({job_done, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if not job_done.done():
                raise RequestError(499, "gone", "the client has disconnected")
            return job_done.result()
        finally:
            job_done.cancel()
            disconnected.cancel()
            await asyncio.wait({job_done, disconnected})


def encode_text(model: LanguageModel, text: str, name: str, *, bos: bool = True) -> list[int]:
    """Return a text as ids, with the leading special tokens if `bos`. Runs in the worker."""
    if model.tokenizer is None:
        message = f"{name} needs a tokenizer, which this model does not have"
        raise RequestError(400, "no_tokenizer", message)
    return list(model.tokenizer.encode(text, bos=bos))


def parse_sampler(given: object, name: str, known: Collection[str], **fixed: Any) -> Sampler:
    """Return a sampler from the options in field `name`: numbers, and the order of the stages."""
    if not isinstance(given, Mapping):
        raise wrong_value(f"{name} must be an object of options")
    for option, value in given.items():
        if option == "order":
            if value not in ORDERS:
                raise wrong_value(f"{name}.order must be one of {', '.join(ORDERS)}")
        elif option not in known:
            names = ", ".join(sorted({*known, "order"}))
            raise wrong_value(f"the options of {name} are {names}; got {str(option)[:40]!r}")
        elif type(value) not in (int, float) or abs(value) >= 2**53:
            raise wrong_value(f"{name}.{option} must be a number")
    try:
        return Sampler(**{"seed": 0, **given, **fixed})
    except (ValueError, TypeError, OverflowError) as error:
        raise wrong_value(f"{name}: {error}") from None


def check_length(name: str, got: int, least: int, most: int) -> None:
    """Refuse a text of too many or too few tokens."""
    if not least <= got <= most:
        message = f"{name} must have from {least} to {most:,} tokens; got {got:,}"
        raise RequestError(400, "wrong_length", message, least=least, most=most, got=got)


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object; refuse NaN and infinities."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise RequestError(400, "wrong_json", "the body must be JSON in UTF-8") from None
    if not isinstance(value, dict):
        raise RequestError(400, "wrong_json", "the body must be a JSON object")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(name)


def _merge(document: Part, part: Part) -> None:
    """Append lists of objects; replace everything else."""
    for name, value in part.items():
        rows = isinstance(value, list) and all(isinstance(row, dict | list) for row in value)
        if rows and name in document:
            document[name] += value
        else:
            document[name] = value


async def _lines(first: Part, results: AsyncGenerator[Part, None]) -> AsyncGenerator[str, None]:
    async with aclosing(results):
        yield json.dumps(first, allow_nan=False) + "\n"
        try:
            async for part in results:
                yield json.dumps(part, allow_nan=False) + "\n"
        except RequestError as error:  # too late for a status
            yield bytes(error.response.body).decode("utf-8") + "\n"


async def _disconnected(request: Request) -> None:
    """Return when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
