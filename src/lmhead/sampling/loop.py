"""The loop of generation: hidden state, logits, token, text, and again.

Task     what was asked for, checked; runs the loop
Batch    the rows under way: ids, mask, cache, hidden state of the last position
Row      one of them: its text, and when it is done
Choice   the next token of every row
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmhead import checks
from lmhead.logits import LazyLogits
from lmhead.sampling.arguments import Stop, id_list, is_one, prompt_ids, stops
from lmhead.sampling.events import FinishReason, Generation, TokenEvent
from lmhead.sampling.model import Cache, Model
from lmhead.sampling.text import TextStream, bytes_after, bytes_of


class Task:
    """A generation that was asked for; see `generate` for the arguments."""

    def __init__(
        self,
        model: Model,
        prompt: Any,
        sampler: Callable[..., Any] | None,
        max_new_tokens: int,
        stop: Stop | None,
        logprobs: int,
        eos_token_ids: Sequence[int] | None,
    ) -> None:
        checks.check_whole("max_new_tokens", max_new_tokens, low=0)
        checks.check_whole("logprobs", logprobs, low=0)
        if sampler is not None and not callable(sampler):
            raise TypeError(f"sampler must be callable or None; got {type(sampler).__name__}")
        self.model, self.sampler, self.logprobs = model, sampler, logprobs
        self.stop_texts, self.stop_ids = stops(stop, model.tokenizer)
        eos = model.eos_token_ids if eos_token_ids is None else eos_token_ids
        self.eos_ids = frozenset(id_list("eos_token_ids", eos))
        self.single = is_one(prompt)
        prompts = [prompt] if self.single else prompt
        self.prompts = [prompt_ids(one, model.tokenizer) for one in prompts]
        max_length: int | None = getattr(model, "max_length", None)
        longest = max(map(len, self.prompts))
        if max_length is not None and longest > max_length:
            raise ValueError(
                f"prompt must have at most {max_length} tokens, what the model can see at once; "
                f"got {longest}"
            )
        self.room = [
            max_new_tokens if max_length is None else min(max_new_tokens, max_length - len(ids))
            for ids in self.prompts
        ]

    def run(self) -> Iterator[TokenEvent]:
        """Every token of every row, step by step."""
        numbers = [number for number, room in enumerate(self.room) if room]
        if not numbers:
            return
        batch = Batch(self.model, self.sampler, [self.prompts[number] for number in numbers])
        rows = [Row(self, number) for number in numbers]
        while True:
            choice = batch.choose(self.logprobs)
            going = []
            for place, row in enumerate(rows):
                event = row.take(choice, place)
                if event.finish_reason is None:
                    going.append(place)
                yield event
            if not going:
                return
            rows = [rows[place] for place in going]
            batch.read(choice.tokens, going)

    def result(self, number: int, events: list[TokenEvent], interrupted: bool) -> Generation:
        """A row's events put together."""
        reason = events[-1].finish_reason if events else None
        text = "".join(event.text for event in events)
        if reason is None:
            interrupted = interrupted and self.room[number] > 0
            reason = "interrupted" if interrupted else "length"
            text = self._whole_text(number, events)
        return Generation(tuple(self.prompts[number]), text, reason, tuple(events))

    def _whole_text(self, number: int, events: list[TokenEvent]) -> str:
        """The text of a row that did not come to its end, with what was held back."""
        row = Row(self, number)
        return "".join(row.show(event.token) for event in events) + row.text.finish()


class Row:
    """A row under way: its text so far, and when it is done."""

    def __init__(self, task: Task, number: int) -> None:
        self.task, self.number, self.tokenizer = task, number, task.model.tokenizer
        self.left = task.room[number]
        prompt = task.prompts[number]
        self.previous = prompt[-1]
        before = bytes_of(self.tokenizer, prompt) if self.tokenizer else b""
        self.text = TextStream(task.stop_texts, before=before)

    def show(self, token: int) -> str:
        """The text that a token lets out."""
        if self.tokenizer is None:
            return ""
        piece = bytes_after(self.tokenizer, self.previous, token)
        self.previous = token
        return self.text.push(piece)

    def take(self, choice: Choice, place: int) -> TokenEvent:
        """The event of the next token."""
        token = choice.tokens[place]
        self.left -= 1
        text = ""
        reason: FinishReason | None = None
        stopped_by: str | int | None = None
        if token in self.task.stop_ids:
            reason, stopped_by = "stop", token
        elif token in self.task.eos_ids:
            reason = "eos"
        else:
            text = self.show(token)
            if self.left == 0:
                reason = "length"
        if reason is not None:
            text += self.text.finish()
        if self.text.stopped_by is not None:
            reason, stopped_by = "stop", self.text.stopped_by
        return TokenEvent(
            row=self.number,
            token=token,
            text=text,
            log_prob=choice.log_probs[place],
            top=choice.top[place],
            sampler_log_prob=choice.sampler_log_probs[place],
            finish_reason=reason,
            stopped_by=stopped_by,
        )


class Choice(NamedTuple):
    """The next token of every row, and what is known about it."""

    tokens: list[int]
    log_probs: list[float]
    sampler_log_probs: Sequence[float | None]
    top: Sequence[tuple[tuple[int, float], ...]]


class Batch:
    """The rows under way, padded on the left: ids and mask (B, L), and all that goes with them."""

    def __init__(
        self, model: Model, sampler: Callable[..., Any] | None, prompts: list[list[int]]
    ) -> None:
        self.model, self.sampler = model, sampler
        device = getattr(model, "device", None)
        length = max(map(len, prompts))
        self.ids = torch.tensor([[0] * (length - len(p)) + p for p in prompts], device=device)
        self.prompt_length = torch.tensor([len(p) for p in prompts], device=device)
        place = torch.arange(length, device=device)
        self.mask = place >= length - self.prompt_length[:, None]
        self.cache: Cache | None = None
        self.state: Any = None
        self._run(self.ids)

    def read(self, tokens: list[int], going: list[int]) -> None:
        """Give the body the tokens of the rows that go on; the others leave."""
        new = torch.tensor(tokens, device=self.ids.device)
        if len(going) < len(tokens):
            rows = torch.tensor(going, device=self.ids.device)
            assert self.cache is not None
            new, self.cache = new[rows], self.cache.select(rows)
            self.ids, self.mask = self.ids[rows], self.mask[rows]
            self.prompt_length = self.prompt_length[rows]
            self.state = _select(self.state, rows)
            select = getattr(self.sampler, "select", None)
            self.sampler = select(rows) if select else self.sampler  # it may have a seed per row
        self.ids = torch.cat((self.ids, new[:, None]), 1)
        self.mask = torch.cat((self.mask, torch.ones_like(new[:, None], dtype=torch.bool)), 1)
        self._run(new[:, None])

    def _run(self, new: Tensor) -> None:
        with torch.no_grad():
            hidden, self.cache = self.model.body(new, self.cache, self.mask)
            self.last = hidden[:, -1]

    def choose(self, k: int) -> Choice:
        """The next token of every row, with the k most probable ones."""
        with torch.no_grad():
            logits = self.model.head(self.last)
            if k > logits.shape[-1]:
                raise ValueError(
                    f"logprobs must be at most {logits.shape[-1]}, the number of words; got {k}"
                )
            if logits.dtype in (torch.bfloat16, torch.float16):
                logits = logits.float()
            if self.sampler is None:
                drawn: list[float] | None = None
                tokens, log_probs, top = _greedy(logits, k)
            else:
                sampled = self.sampler(
                    logits,
                    self.ids,
                    self.mask.sum(-1),
                    prompt_length=self.prompt_length,
                    context_mask=self.mask,
                    state=self.state,
                )
                self.state = sampled.state
                tokens, log_probs = sampled.token, sampled.raw_log_prob
                drawn = sampled.log_prob.tolist()
                top = _top(logits, k) if k else None
        chosen = Choice(
            tokens.tolist(),
            log_probs.tolist(),
            drawn or [None] * len(self.ids),
            top.pairs() if top else [()] * len(self.ids),
        )
        for place, (token, log_prob) in enumerate(zip(*chosen[:2], strict=True)):
            if token < 0 or log_prob != log_prob:
                raise ValueError(
                    "the model's logits must hold a largest one, to choose a token; got NaN, inf, "
                    f"or only -inf behind {self.ids[place][self.mask[place]].tolist()[-8:]}"
                )
        return chosen


@dataclass(frozen=True)
class _Top:
    """Ids and log-probabilities (B, k), best first."""

    ids: Tensor
    log_probs: Tensor

    def pairs(self) -> list[tuple[tuple[int, float], ...]]:
        both = zip(self.ids.tolist(), self.log_probs.tolist(), strict=True)
        return [tuple(zip(*row, strict=True)) for row in both]


def _top(logits: LazyLogits | Tensor, k: int) -> _Top:
    """The k most probable words: one sweep, if the logits are lazy."""
    if isinstance(logits, LazyLogits):
        answers = logits.ask(top_k=k, logsumexp=True)
        assert answers.top_k is not None
        assert answers.logsumexp is not None
        (values, ids), lse = answers.top_k, answers.logsumexp
    else:
        (values, ids), lse = logits.topk(k), logits.logsumexp(-1)
    return _Top(ids, values - lse[:, None])


def _greedy(logits: LazyLogits | Tensor, k: int) -> tuple[Tensor, Tensor, _Top | None]:
    """Equivalent to: logits.argmax(-1), its log-probability, and `_top`."""
    top = _top(logits, max(k, 1))
    tokens, log_probs = top.ids[:, 0], top.log_probs[:, 0]
    if isinstance(logits, Tensor):  # of equals, argmax takes the first, topk any
        tokens = logits.argmax(-1)
    return tokens, log_probs, top if k else None


def _select(state: Any, rows: Tensor) -> Any:
    """A sampler's state, for some of the rows."""
    if state is None:
        return None
    if isinstance(state, Tensor):
        return state[rows]
    if isinstance(state, tuple | list):
        return type(state)(_select(part, rows) for part in state)
    if hasattr(state, "select"):
        return state.select(rows)
    raise TypeError(
        "the sampler's state must be None, a tensor with one entry per row, a tuple or list of "
        f"these, or have select(rows); got {type(state).__name__}"
    )
