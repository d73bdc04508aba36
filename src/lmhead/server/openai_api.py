"""OpenAI-compatible API: models, completions, chat completions, tokenizer, health, metrics.

GET  /v1/models, /v1/models/NAME
POST /v1/completions          prompts as text or token ids; echo, logprobs, n, stop, seed, stream
POST /v1/chat/completions     with the model's chat template
POST /tokenize, /detokenize   {"model", "prompt"} and {"model", "tokens"}
GET  /tokenizer_info          ?model=NAME
GET  /health, /metrics        the latter as Prometheus text

Extensions: every option of `Sampler` is a field of a request, and `ignore_eos`, `prompt_logprobs`,
`certified`, `kept`, `order`, `guided_json` and so on. Log-probabilities are the model's, before
temperature and truncation.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lmhead import __version__
from lmhead.analysis.token_text import Piece, hidden_states, piece_of
from lmhead.models import LanguageModel
from lmhead.sampling import Sampler, TokenEvent
from lmhead.sampling.generation_loop import GenerationTask
from lmhead.server.api_context import (
    ApiContext,
    RequestError,
    encode_text,
    handle_errors,
    parse_json_object,
)
from lmhead.server.batch_engine import BatchEngine
from lmhead.server.metrics import Metrics
from lmhead.server.openai_requests import (
    CompletionRequest,
    encode_prompt,
    field_error,
    parse_chat,
    parse_completion,
)
from lmhead.server.worker import Cancellation

__all__ = ["openai_routes"]

_STARTED = int(time.time())
_FINISH = {"eos": "stop", "stop": "stop", "length": "length"}
_MOST_KEPT = 1024  # ids of `kept` in a response; of more only the count
_LEAST = -9999.0  # OpenAI's value for a probability of 0, which JSON cannot hold as a logarithm


def openai_routes(
    api: ApiContext, metrics: Metrics, screened: Mapping[str, LanguageModel]
) -> list[Route]:
    """Return the routes of the API.

    Requests to one model share the steps of its body where that has a batch-invariant arithmetic.

    Args:
        api: models and worker.
        metrics: counters to update.
        screened: by name, models with a screened head, for requests with `certified`.
    """
    engines = {name: BatchEngine(model) for name, model in api.models.items()}

    async def list_models(request: Request) -> Response:  # noqa: ARG001
        data = [_model_entry(name, model) for name, model in api.models.items()]
        return JSONResponse({"object": "list", "data": data})

    async def one_model(request: Request) -> Response:
        return JSONResponse(_model_entry(*_find_model(api, request.path_params["name"])))

    async def completions(request: Request) -> Response:
        return await _complete(api, metrics, screened, engines, request, chat=False)

    async def chat_completions(request: Request) -> Response:
        return await _complete(api, metrics, screened, engines, request, chat=True)

    async def tokenize(request: Request) -> Response:
        body = await api.read(request, {"model", "prompt", "add_special_tokens"})
        _, model = _find_model(api, body.get("model"))
        text, special = api.text(body, "prompt"), body.get("add_special_tokens", True)
        if not isinstance(special, bool):
            raise field_error("add_special_tokens", "add_special_tokens must be true or false")
        ids = await api.work(request, lambda _: encode_text(model, text, "prompt", bos=special))
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": model.max_length})

    async def detokenize(request: Request) -> Response:
        body = await api.read(request, {"model", "tokens"})
        _, model = _find_model(api, body.get("model"))
        ids = api.ids(body.get("tokens"), "tokens")
        if model.tokenizer is None:
            raise field_error("model", "the model has no tokenizer")
        decode = model.tokenizer.decode
        encode_prompt(model, ids or [0], api.limits)
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
                "bos_token": None if bos is None else _string(piece_of(model, bos)),
                "bos_token_id": bos,
                "eos_token": None if eos is None else _string(piece_of(model, eos)),
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
        Route("/v1/models", handle_errors(list_models)),
        Route("/v1/models/{name:path}", handle_errors(one_model)),
        Route("/v1/completions", handle_errors(completions), methods=["POST"]),
        Route("/v1/chat/completions", handle_errors(chat_completions), methods=["POST"]),
        Route("/tokenize", handle_errors(tokenize), methods=["POST"]),
        Route("/detokenize", handle_errors(detokenize), methods=["POST"]),
        Route("/tokenizer_info", handle_errors(tokenizer_info)),
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


@dataclass(frozen=True)
class _Prepared:
    """The first result of a job: the validated request, before any token is generated."""

    request: CompletionRequest
    prompts: list[list[int]]
    scores: list[list[_Token]] | None  # log-probabilities of the prompts, if they are needed

    @property
    def rows(self) -> list[list[int]]:
        """The prompt of every choice."""
        return [ids for ids in self.prompts for _ in range(self.request.n)]


def _job(
    api: ApiContext,
    model: LanguageModel,
    screened: LanguageModel | None,
    engine: BatchEngine,
    body: Mapping[str, Any],
    *,
    chat: bool,
) -> Any:
    """Return a job for the worker: first a `_Prepared`, then lists of `TokenEvent`s."""

    def steps(cancellation: Cancellation) -> Iterator[_Prepared | list[TokenEvent]]:
        request = (parse_chat if chat else parse_completion)(body, model, api.limits)
        prompts = [encode_prompt(model, prompt, api.limits) for prompt in request.prompts]
        if request.certified and screened is None:
            message = "certified needs a server that was started with --screen"
            raise field_error("certified", message)
        if request.stop and model.tokenizer is None:
            raise field_error("stop", "stop needs a tokenizer, which this model does not have")
        top = request.prompt_logprobs
        if top is None and request.echo:
            top = request.logprobs
        scores = None
        if top is not None:
            scores = [_score_prompt(model, ids, top) for ids in prompts]
        prepared = _Prepared(request, prompts, scores)
        cancellation.check()
        decoder, sampler = model, request.sampler
        if request.certified and screened is not None:
            decoder = screened
        if request.certified or request.kept:
            # Greedy decoding without a sampler would also compute exact log-probabilities.
            sampler = sampler or Sampler(do_sample=False)
        try:
            task = GenerationTask(
                decoder,
                prepared.rows,
                sampler,
                api.limits.new_tokens if request.max_tokens is None else request.max_tokens,
                list(request.stop) or None,
                request.logprobs or 0,
                () if request.ignore_eos else None,
                request.grammar,
            )
            yield prepared
            yield from engine.stream(task, kept=request.kept)
        except ValueError as error:
            raise RequestError(400, "generation_failed", str(error)) from None

    return steps


async def _complete(
    api: ApiContext,
    metrics: Metrics,
    screened: Mapping[str, LanguageModel],
    engines: Mapping[str, BatchEngine],
    request: Request,
    *,
    chat: bool,
) -> Response:
    body = parse_json_object(await request.body())
    name, model = _find_model(api, body.get("model"))
    job = _job(api, model, screened.get(name), engines[name], body, chat=chat)
    results: AsyncGenerator[Any, None] = api.stream(job)
    try:
        prepared = await api.until_disconnect(request, anext(results))
        response = (_Chat if chat else _Completion)(name, model, prepared)
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


async def _server_sent_events(
    response: _Completion, results: AsyncGenerator[list[TokenEvent], None], metrics: Metrics
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


@torch.no_grad()
def _score_prompt(model: LanguageModel, ids: list[int], top_k: int) -> list[_Token]:
    """Return the tokens of a prompt with their log-probabilities; the first one has none."""
    found = [_Token.of(model, ids[0], None, None, ())]
    if len(ids) > 1:
        targets = torch.tensor(ids[1:])
        logits = model.head(hidden_states(model, ids[:-1])).double()
        answers: Any = logits.ask(log_prob=targets, rank=targets, logsumexp=True, top_k=top_k)
        log_probs, ranks = answers.log_prob.tolist(), answers.rank.tolist()
        tops: list[Any] = [()] * len(log_probs)
        if top_k:
            values = (answers.top_k.values - answers.logsumexp[:, None]).tolist()
            pairs = zip(answers.top_k.indices.tolist(), values, strict=True)
            tops = [tuple(zip(*pair, strict=True)) for pair in pairs]
        for i, id in enumerate(ids[1:]):
            token = _Token.of(model, id, ids[i], log_probs[i], tops[i], rank=ranks[i])
            found.append(token)
    return found


# --- formatting -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Token:
    """A token of a response, with its log-probability and the most probable alternatives."""

    piece: Piece
    log_prob: float | None
    top: tuple[tuple[Piece, float], ...]
    rank: int | None = None  # from 0

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        id: int,
        previous: int | None,
        log_prob: float | None,
        top: tuple[tuple[int, float], ...],
        *,
        rank: int | None = None,
    ) -> _Token:
        # The token's own number is the same in `top`: clients compare both to see whether it is
        # the best one.
        alternatives = tuple(
            (piece_of(model, i, previous), value if i != id or log_prob is None else log_prob)
            for i, value in top
        )
        return cls(piece_of(model, id, previous), log_prob, alternatives, rank)

    def to_chat(self) -> dict[str, Any]:
        """Return OpenAI's chat format."""
        return {
            **_chat_entry(self.piece, self.log_prob),
            "top_logprobs": [_chat_entry(piece, value) for piece, value in self.top],
        }

    def to_prompt_logprobs(self) -> dict[str, Any] | None:
        """Return vLLM's format of prompt_logprobs: by id; ranks start at 1."""
        if self.log_prob is None:
            return None
        entries = [(piece, value, n) for n, (piece, value) in enumerate(self.top, 1)]
        if self.piece.id not in {piece.id for piece, _, _ in entries}:
            entries.append((self.piece, self.log_prob, (self.rank or 0) + 1))
        return {
            str(piece.id): {
                "logprob": _number(value),
                "rank": rank,
                "decoded_token": _string(piece),
            }
            for piece, value, rank in entries
        }


def _chat_entry(piece: Piece, log_prob: float | None) -> dict[str, Any]:
    return {"token": _string(piece), "logprob": _number(log_prob), "bytes": list(piece.bytes)}


def _string(piece: Piece) -> str:
    r"""Return the text of a token; bytes that are not UTF-8 as OpenAI writes them.

    >>> _string(Piece(9, b" caf")), _string(Piece(9, b"\xc3"))
    (' caf', 'bytes:\\xc3')
    """
    if piece.special is not None:
        return piece.special
    try:
        return piece.bytes.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece.bytes)


def _number(log_prob: float | None) -> float | None:
    return None if log_prob is None else max(log_prob, _LEAST)


@dataclass
class _Choice:
    """One choice while it is generated."""

    previous: int
    offset: int = 0  # characters before the next token
    text: str = ""
    tokens: list[_Token] = field(default_factory=list)
    kept: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = "length"


class _Completion:
    """The response to `/v1/completions`, whole or in chunks."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, name: str, model: LanguageModel, prepared: _Prepared) -> None:
        self.model, self.prepared, self.request = model, prepared, prepared.request
        self.choices = [_Choice(ids[-1]) for ids in prepared.rows]
        self.generated = 0
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": f"lmhead-{__version__}",
        }

    def add(self, event: TokenEvent) -> tuple[_Choice, list[_Token]]:
        """Add a token; return its choice, and the token if log-probabilities are asked for."""
        choice = self.choices[event.row]
        self.generated += 1
        choice.text += event.text
        new: list[_Token] = []
        # The token that ends a text has no text, but an entry as any other, as in vLLM: evaluation
        # harnesses take every entry but the last for the prompt.
        if self.request.logprobs is not None:
            log_prob = event.log_prob
            new = [_Token.of(self.model, event.token, choice.previous, log_prob, event.top)]
            choice.tokens += new
        if self.request.kept:
            choice.kept.append(self._kept(event))
        choice.previous = event.token
        if event.finish_reason is not None:
            choice.finish_reason = _FINISH[event.finish_reason]
        return choice, new

    def _kept(self, event: TokenEvent) -> dict[str, Any]:
        """Return how many tokens the sampler left, and which, if these are few."""
        if event.kept is None:
            return {"count": self.model.head.vocab_size, "ids": None}
        few = len(event.kept) <= _MOST_KEPT
        return {"count": len(event.kept), "ids": list(event.kept) if few else None}

    def document(self) -> dict[str, Any]:
        """Return the whole response."""
        choices = [
            {
                **self._content(index, choice),
                "index": index,
                "finish_reason": choice.finish_reason,
                "stop_reason": None,
                **({"kept": choice.kept} if self.request.kept else {}),
            }
            for index, choice in enumerate(self.choices)
        ]
        return {**self._head, "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Return the token counts."""
        prompt = sum(map(len, self.prepared.prompts))
        counts = {"prompt_tokens": prompt, "completion_tokens": self.generated}
        return {**counts, "total_tokens": prompt + self.generated}

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks before the first token: the echoed prompts."""
        if self.request.echo or self.request.prompt_logprobs is not None:
            for index, choice in enumerate(self.choices):
                yield self._chunk(index, **self._prompt_part(index, choice), finish_reason=None)

    def chunk(self, event: TokenEvent) -> dict[str, Any] | None:
        """Return the chunk of a token; None if it shows nothing."""
        choice, new = self.add(event)
        reason = None if event.finish_reason is None else choice.finish_reason
        if not event.text and not new and reason is None:
            return None
        part = self._part(choice, event.text, new)
        if self.request.kept:
            part["kept"], choice.kept = choice.kept, []  # of chunks that showed nothing, too
        return self._chunk(event.row, **part, finish_reason=reason)

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks after the last token: choices without one, token counts."""
        if not self.generated:
            for index, choice in enumerate(self.choices):
                part = self._part(choice, "", [])
                yield self._chunk(index, **part, finish_reason=choice.finish_reason)
        if self.request.include_usage:
            yield {**self._head, "object": self.chunk_kind, "choices": [], "usage": self.usage()}

    def _chunk(self, index: int, **content: Any) -> dict[str, Any]:
        choice = {"index": index, **content}
        return {**self._head, "object": self.chunk_kind, "choices": [choice]}

    def _content(self, index: int, choice: _Choice) -> dict[str, Any]:
        """Return text and logprobs of a complete choice."""
        before = self._prompt_part(index, choice)
        after = self._part(choice, choice.text, choice.tokens)
        merged: dict[str, Any] = {**before, **after, "text": before["text"] + after["text"]}
        if before["logprobs"] and after["logprobs"]:
            merged["logprobs"] = {
                name: before["logprobs"][name] + after["logprobs"][name]
                for name in after["logprobs"]
            }
        return merged

    def _prompt_part(self, index: int, choice: _Choice) -> dict[str, Any]:
        """Return the echoed prompt of a choice, and its log-probabilities."""
        number = index // self.request.n
        scores = None if self.prepared.scores is None else self.prepared.scores[number]
        part: dict[str, Any] = {"text": "", "logprobs": None}
        if self.request.echo:
            part = self._part(choice, self._prompt_text(number), scores or [])
        if self.request.prompt_logprobs is not None and scores is not None:
            part["prompt_logprobs"] = [token.to_prompt_logprobs() for token in scores]
        return part

    def _prompt_text(self, number: int) -> str:
        prompt, ids = self.request.prompts[number], self.prepared.prompts[number]
        if isinstance(prompt, str):
            return prompt
        pairs = zip([None, *ids], ids, strict=False)
        text = b"".join(piece_of(self.model, id, previous).bytes for previous, id in pairs)
        return text.decode("utf-8", "replace")

    def _part(self, choice: _Choice, text: str, tokens: list[_Token]) -> dict[str, Any]:
        """Return text and logprobs of a part of a choice."""
        if self.request.logprobs is None:
            return {"text": text, "logprobs": None}
        offsets = []
        for token in tokens:
            offsets.append(choice.offset)
            choice.offset += len(token.piece.text)
        found: dict[str, Any] = {
            "tokens": [_string(token.piece) for token in tokens],
            "token_logprobs": [_number(token.log_prob) for token in tokens],
            "top_logprobs": None,
            "text_offset": offsets,
        }
        if self.request.logprobs:
            found["top_logprobs"] = [_top_logprobs(token) for token in tokens]
        return {"text": text, "logprobs": found}


def _top_logprobs(token: _Token) -> dict[str, float | None] | None:
    """Return {token: log-probability} of the best tokens and the token itself, as OpenAI does."""
    if token.log_prob is None:
        return None
    found: dict[str, float | None] = {}
    for piece, value in (*token.top, (token.piece, token.log_prob)):
        found.setdefault(_string(piece), _number(value))
    return found


class _Chat(_Completion):
    """The response to `/v1/chat/completions`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self.choices)):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk(index, delta=delta, logprobs=None, finish_reason=None)

    def _content(self, index: int, choice: _Choice) -> dict[str, Any]:  # noqa: ARG002
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(choice.tokens)}

    def _part(self, choice: _Choice, text: str, tokens: list[_Token]) -> dict[str, Any]:  # noqa: ARG002
        delta = {"content": text} if text else {}
        return {"delta": delta, "logprobs": self._logprobs(tokens)}

    def _logprobs(self, tokens: list[_Token]) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        return {"content": [token.to_chat() for token in tokens], "refusal": None}
