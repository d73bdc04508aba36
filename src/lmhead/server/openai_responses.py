"""Responses of OpenAI's API: token events to completion and chat documents, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lmhead import __version__
from lmhead.analysis.token_text import Piece, hidden_states, piece_of, text_of, top_log_probs
from lmhead.models import LanguageModel
from lmhead.sampling import TokenEvent
from lmhead.server.openai_requests import CompletionRequest

_FINISH = {"eos": "stop", "stop": "stop", "length": "length"}
_MAX_KEPT = 1024  # largest list of `kept` ids in a response; longer ones are only counted
_MIN_LOGPROB = -9999.0  # OpenAI's value for a probability of 0: JSON cannot hold -inf


@dataclass(frozen=True)
class Prepared:
    """The first result of a job: the validated request, before any token is generated."""

    request: CompletionRequest
    prompts: list[list[int]]
    scores: list[list[ScoredPiece]] | None  # log-probabilities of the prompts, if they are needed

    @property
    def rows(self) -> list[list[int]]:
        """The prompt of every choice."""
        return [ids for ids in self.prompts for _ in range(self.request.n)]


@torch.no_grad()
def score_prompt(model: LanguageModel, ids: list[int], top_k: int) -> list[ScoredPiece]:
    """Return the tokens of a prompt with their log-probabilities; the first one has none."""
    pieces = [ScoredPiece.of(model, ids[0], None, None, ())]
    if len(ids) > 1:
        targets = torch.tensor(ids[1:])
        logits = model.head(hidden_states(model, ids[:-1])).double()
        answers: Any = logits.ask(log_prob=targets, rank=targets, logsumexp=True, top_k=top_k)
        log_probs, ranks = answers.log_prob.tolist(), answers.rank.tolist()
        tops = top_log_probs(answers) if top_k else [()] * len(log_probs)
        for i, id in enumerate(ids[1:]):
            token = ScoredPiece.of(model, id, ids[i], log_probs[i], tops[i], rank=ranks[i])
            pieces.append(token)
    return pieces


@dataclass(frozen=True)
class ScoredPiece:
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
    ) -> ScoredPiece:
        """Return the token `id` after another one, `previous`."""
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

    def to_prompt_logprobs(self, k: int) -> dict[str, Any] | None:
        """Return vLLM's format of prompt_logprobs, the k best by id; ranks start at 1."""
        if self.log_prob is None:
            return None
        entries = [(piece, value, n) for n, (piece, value) in enumerate(self.top[:k], 1)]
        if self.piece.id not in {piece.id for piece, _, _ in entries}:
            entries.append((self.piece, self.log_prob, (self.rank or 0) + 1))
        return {
            str(piece.id): {
                "logprob": _number(value),
                "rank": rank,
                "decoded_token": token_string(piece),
            }
            for piece, value, rank in entries
        }


def _chat_entry(piece: Piece, log_prob: float | None) -> dict[str, Any]:
    return {"token": token_string(piece), "logprob": _number(log_prob), "bytes": list(piece.bytes)}


def token_string(piece: Piece) -> str:
    r"""Return the text of a token; bytes that are not UTF-8 as OpenAI writes them.

    >>> token_string(Piece(9, b" caf")), token_string(Piece(9, b"\xc3"))
    (' caf', 'bytes:\\xc3')
    """
    if piece.special is not None:
        return piece.special
    try:
        return piece.bytes.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece.bytes)


def _number(log_prob: float | None) -> float | None:
    return None if log_prob is None else max(log_prob, _MIN_LOGPROB)


@dataclass
class _Choice:
    """One choice while it is generated."""

    previous: int
    offset: int = 0  # characters before the next token
    text: str = ""
    tokens: list[ScoredPiece] = field(default_factory=list)
    kept: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = "length"
    stop_reason: str | int | None = None  # the stop string, as in vLLM


class CompletionResponse:
    """The response to `/v1/completions`, whole or in chunks."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, name: str, model: LanguageModel, prepared: Prepared) -> None:
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

    def add(self, event: TokenEvent) -> tuple[_Choice, list[ScoredPiece]]:
        """Add a token; return its choice, and the token if log-probabilities are asked for."""
        choice = self.choices[event.row]
        self.generated += 1
        choice.text += event.text
        new: list[ScoredPiece] = []
        # The token that ends a text has no text, but an entry as any other, as in vLLM: evaluation
        # harnesses take every entry but the last for the prompt.
        if self.request.logprobs is not None:
            log_prob, top = event.log_prob, event.top[: self.request.logprobs]
            new = [ScoredPiece.of(self.model, event.token, choice.previous, log_prob, top)]
            choice.tokens += new
        if self.request.kept:
            choice.kept.append(self._kept(event))
        choice.previous = event.token
        if event.finish_reason is not None:
            choice.finish_reason = _FINISH[event.finish_reason]
            choice.stop_reason = event.stopped_by
        return choice, new

    def _kept(self, event: TokenEvent) -> dict[str, Any]:
        """Return the number of tokens that the sampler kept, and their ids if these are few."""
        if event.kept is None:
            return {"count": self.model.head.vocab_size, "ids": None}
        ids = list(event.kept) if len(event.kept) <= _MAX_KEPT else None
        return {"count": len(event.kept), "ids": ids}

    def document(self) -> dict[str, Any]:
        """Return the whole response."""
        choices = [
            {
                **self._content(index, choice),
                "index": index,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
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
            part["kept"], choice.kept = choice.kept, []  # including those of skipped chunks
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
        usage = {"usage": None} if self.request.include_usage else {}  # the last chunk has it
        return {**self._head, "object": self.chunk_kind, "choices": [choice], **usage}

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
        return {**part, **self._prompt_logprobs(number)}

    def _prompt_logprobs(self, number: int) -> dict[str, Any]:
        """Return vLLM's field: of a choice, or of the whole response of a chat."""
        k, scores = self.request.prompt_logprobs, self.prepared.scores
        if k is None or scores is None:
            return {}
        return {"prompt_logprobs": [token.to_prompt_logprobs(k) for token in scores[number]]}

    def _prompt_text(self, number: int) -> str:
        prompt, ids = self.request.prompts[number], self.prepared.prompts[number]
        return prompt if isinstance(prompt, str) else text_of(self.model, ids)

    def _part(self, choice: _Choice, text: str, tokens: list[ScoredPiece]) -> dict[str, Any]:
        """Return text and logprobs of a part of a choice."""
        if self.request.logprobs is None:
            return {"text": text, "logprobs": None}
        offsets = []
        for token in tokens:
            offsets.append(choice.offset)
            choice.offset += len(token.piece.text)
        part: dict[str, Any] = {
            "tokens": [token_string(token.piece) for token in tokens],
            "token_logprobs": [_number(token.log_prob) for token in tokens],
            "top_logprobs": None,
            "text_offset": offsets,
        }
        if k := self.request.logprobs:
            part["top_logprobs"] = [_top_logprobs(token, k) for token in tokens]
        return {"text": text, "logprobs": part}


def _top_logprobs(token: ScoredPiece, k: int) -> dict[str, float | None] | None:
    """Return {token: log-probability} of the k best and the token itself, as OpenAI does."""
    if token.log_prob is None:
        return None
    by_token: dict[str, float | None] = {}
    for piece, value in (*token.top[:k], (token.piece, token.log_prob)):
        by_token.setdefault(token_string(piece), _number(value))
    return by_token


class ChatResponse(CompletionResponse):
    """The response to `/v1/chat/completions`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks before the first token: the role of every choice."""
        for index in range(len(self.choices)):
            delta = {"role": "assistant", "content": ""}
            chunk = self._chunk(index, delta=delta, logprobs=None, finish_reason=None)
            yield chunk if index else {**chunk, **self._prompt_logprobs(0)}

    def document(self) -> dict[str, Any]:
        """Return the whole response."""
        return {**super().document(), **self._prompt_logprobs(0)}

    def _content(self, index: int, choice: _Choice) -> dict[str, Any]:  # noqa: ARG002
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(choice.tokens)}

    def _part(self, choice: _Choice, text: str, tokens: list[ScoredPiece]) -> dict[str, Any]:  # noqa: ARG002
        delta = {"content": text} if text else {}
        return {"delta": delta, "logprobs": self._logprobs(tokens)}

    def _logprobs(self, tokens: list[ScoredPiece]) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        return {"content": [token.to_chat() for token in tokens], "refusal": None}
