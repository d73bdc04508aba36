"""OpenAI-compatible API: models, completions, chat completions, tokenizer, health, metrics.

GET  /v1/models, /v1/models/NAME
POST /v1/completions          prompts as text or token ids; echo, logprobs, n, stop, seed, stream
POST /v1/chat/completions     with the model's chat template
POST /tokenize, /detokenize   {"model", "prompt"} or {"model", "messages"}, and {"model", "tokens"}
GET  /tokenizer_info          ?model=NAME
GET  /health, /metrics        the latter as Prometheus text

Extensions: every option of `Sampler` is a field of a request, and `ignore_eos`, `prompt_logprobs`,
`certified`, `kept`, `order`, `guided_json` and so on. Log-probabilities are the model's, before
temperature and truncation.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lmhead import __version__
from lmhead.analysis.token_text import piece_of
from lmhead.models import LanguageModel
from lmhead.sampling import Sampler, TokenEvent
from lmhead.sampling.generation_loop import GenerationTask
from lmhead.server.api_context import ApiContext, encode_text, parse_json_object
from lmhead.server.batch_engine import BatchEngine
from lmhead.server.metrics import Metrics
from lmhead.server.openai_requests import encode_chat, encode_prompt, parse_chat, parse_completion
from lmhead.server.openai_responses import (
    ChatResponse,
    CompletionResponse,
    Prepared,
    score_prompt,
    token_string,
)
from lmhead.server.request_fields import OpenAIFields, RequestError, check_ids, field_error, is_utf8
from lmhead.server.worker import Cancellation

_STARTED = int(time.time())


def openai_routes(
    api: ApiContext, metrics: Metrics, screened: Mapping[str, LanguageModel]
) -> list[Route]:
    """Return the routes of the API; `screened` has models with a screened head, for `certified`.

    Requests to one model share the steps of its body where that has a batch-invariant arithmetic.
    """
    engines = {name: BatchEngine(model) for name, model in api.models.items()}

    async def list_models(request: Request) -> Response:  # noqa: ARG001
        data = [_model_entry(name, model) for name, model in api.models.items()]
        return JSONResponse({"object": "list", "data": data})

    async def one_model(request: Request) -> Response:
        return JSONResponse(_model_entry(*_find_model(api, request.path_params["name"])))

    async def complete(request: Request, *, chat: bool) -> Response:
        body = parse_json_object(await request.body())
        name, model = _find_model(api, body.get("model"))
        job = _job(api, model, screened.get(name), engines[name], body, chat=chat)
        results: AsyncGenerator[Any, None] = api.stream(job)
        try:
            prepared = await api.until_disconnect(request, anext(results))
            response = (ChatResponse if chat else CompletionResponse)(name, model, prepared)
            metrics.prompt_tokens += sum(map(len, prepared.prompts))
            if prepared.request.stream:
                events = _server_sent_events(response, results, metrics)
                return StreamingResponse(events, media_type="text/event-stream")
        except BaseException:
            await results.aclose()
            raise

        async def collect() -> None:
            async with aclosing(results):
                async for events in results:
                    metrics.generated_tokens += len(events)
                    for event in events:
                        response.add(event)

        await api.until_disconnect(request, collect())
        return JSONResponse(response.document())

    async def tokenize(request: Request) -> Response:
        body = OpenAIFields({"add_special_tokens": True, **parse_json_object(await request.body())})
        body.refuse_others({"model", "add_special_tokens", "messages", "prompt"})
        _, model = _find_model(api, body.get("model"))
        text, messages = body.get("prompt", ""), body.get("messages")
        if ("prompt" in body) == ("messages" in body):
            raise field_error("prompt", "give either prompt or messages")
        if not isinstance(text, str) or not is_utf8(text):
            raise field_error("prompt", "prompt must be text in UTF-8")
        special = body.flag("add_special_tokens")

        def encode(_: Cancellation) -> list[int]:
            if "messages" in body:
                return encode_chat(messages, model)
            return encode_text(model, text, "prompt", bos=special)

        ids = await api.work(request, encode)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": model.max_length})

    async def detokenize(request: Request) -> Response:
        body = OpenAIFields(parse_json_object(await request.body()))
        body.refuse_others({"model", "tokens"})
        _, model = _find_model(api, body.get("model"))
        ids: Any = body.get("tokens")
        check_ids("tokens", ids, model.head.vocab_size)
        if model.tokenizer is None:
            raise field_error("model", "the model has no tokenizer")
        decode = model.tokenizer.decode
        return JSONResponse({"prompt": await api.work(request, lambda _: decode(ids))})

    async def tokenizer_info(request: Request) -> Response:
        name, model = _find_model(api, request.query_params.get("model"))
        bos = None if model.tokenizer is None else model.tokenizer.bos_token_id
        eos = model.eos_token_ids[0] if model.eos_token_ids else None
        return JSONResponse(
            {
                "model": name,
                "vocab_size": model.head.vocab_size,
                "tokenizer_size": None if model.tokenizer is None else len(model.tokenizer),
                "bos_token": None if bos is None else token_string(piece_of(model, bos)),
                "bos_token_id": bos,
                "eos_token": None if eos is None else token_string(piece_of(model, eos)),
                "eos_token_ids": list(model.eos_token_ids),
                "pad_token": None,
                "chat_template": None if model.chat is None else model.chat.template,
            }
        )

    async def health(request: Request) -> Response:  # noqa: ARG001
        return JSONResponse({"status": "ok", "lmhead": __version__})

    async def show_metrics(request: Request) -> Response:  # noqa: ARG001
        return PlainTextResponse(metrics.text(running=api.worker.waiting))

    return [
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", one_model),
        Route("/v1/completions", partial(complete, chat=False), methods=["POST"]),
        Route("/v1/chat/completions", partial(complete, chat=True), methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info),
        Route("/health", health),
        Route("/metrics", show_metrics),
    ]


def _model_entry(name: str, model: LanguageModel) -> dict[str, Any]:
    entry = {"id": name, "object": "model", "created": _STARTED, "owned_by": "lmhead"}
    return {**entry, "max_model_len": model.max_length}


def _find_model(api: ApiContext, name: object) -> tuple[str, LanguageModel]:
    """Return the model of that name; without a name the only one."""
    if name is None and len(api.models) == 1:
        return next(iter(api.models.items()))
    if not isinstance(name, str):
        raise field_error("model", "model must be a name of /v1/models")
    if name not in api.models:
        message = f"the model {name[:80]!r} does not exist; see /v1/models"
        raise field_error("model", message, status=404, code="model_not_found")
    return name, api.models[name]


# --- running a request ----------------------------------------------------------------------------


def _job(
    api: ApiContext,
    model: LanguageModel,
    screened: LanguageModel | None,
    engine: BatchEngine,
    body: Mapping[str, Any],
    *,
    chat: bool,
) -> Any:
    """Return a job for the worker: first a `Prepared`, then lists of `TokenEvent`s."""

    def steps(cancellation: Cancellation) -> Iterator[Prepared | list[TokenEvent]]:
        request = (parse_chat if chat else parse_completion)(body, model, api.limits)
        prompts = [encode_prompt(model, text, api.limits, request) for text in request.prompts]
        if request.certified and screened is None:
            message = "certified needs a server that was started with --screen"
            raise field_error("certified", message)
        if request.stop and model.tokenizer is None:
            raise field_error("stop", "stop needs a tokenizer, which this model does not have")
        tops = [request.prompt_logprobs, request.logprobs if request.echo else None]
        requested = [top for top in tops if top is not None]
        scores = None
        if requested:
            scores = [score_prompt(model, ids, max(requested)) for ids in prompts]
        prepared = Prepared(request, prompts, scores)
        cancellation.check()
        decoder, sampler = model, request.sampler
        if request.certified and screened is not None:
            decoder = screened
        if request.certified or request.kept:
            # Greedy decoding without a sampler would also compute exact log-probabilities.
            sampler = sampler or Sampler(do_sample=False)
        logprobs = request.logprobs or 0
        if request.certified and request.logprobs == 0:
            logprobs = 1  # a screened head computes exact log-probabilities only on request
        try:
            task = GenerationTask(
                decoder,
                prepared.rows,
                sampler,
                api.limits.new_tokens if request.max_tokens is None else request.max_tokens,
                list(request.stop) or None,
                logprobs,
                () if request.ignore_eos else None,
                request.grammar,
            )
            yield prepared
            yield from engine.stream(task, kept=request.kept)
        except ValueError as error:
            raise RequestError(400, "generation_failed", str(error)) from None

    return steps


async def _server_sent_events(
    response: CompletionResponse, results: AsyncGenerator[list[TokenEvent], None], metrics: Metrics
) -> AsyncIterator[str]:
    """Yield the events of a streamed response; the last one is [DONE]."""
    async with aclosing(results):
        for chunk in response.first_chunks():
            yield _event(chunk)
        try:
            async for events in results:
                metrics.generated_tokens += len(events)
                for event in events:
                    if (part := response.chunk(event)) is not None:
                        yield _event(part)
        except RequestError as error:  # too late for a status
            yield f"data: {bytes(error.response.body).decode('utf-8')}\n\n"
            return
        for chunk in response.last_chunks():
            yield _event(chunk)
        yield "data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, allow_nan=False)}\n\n"
