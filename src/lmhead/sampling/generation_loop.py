"""The generation loop: hidden state, logits, token, text, repeated.

GenerationTask   checked arguments; runs the loop
GenerationBatch  unfinished rows: ids, mask, cache, hidden state of the last position
GenerationRow    one row: its text and its stop conditions
choose_tokens    the next token of every row, from their hidden states
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmhead import checks
from lmhead.lazy import LazyLogits
from lmhead.sampling.arguments import Stop, id_list, is_single, prompt_ids, stops
from lmhead.sampling.events import FinishReason, Generation, TokenEvent
from lmhead.sampling.grammar import Grammar, GrammarMatcher
from lmhead.sampling.model import Cache, Model
from lmhead.sampling.run_stages import ScreenedSampled
from lmhead.sampling.sampler import masked
from lmhead.sampling.text import TextStream, bytes_after, bytes_of


class GenerationTask:
    """Checked arguments of `generate`, and the loop."""

    def __init__(
        self,
        model: Model,
        prompt: Any,
        sampler: Callable[..., Any] | None,
        max_new_tokens: int,
        stop: Stop | None,
        logprobs: int,
        eos_token_ids: Sequence[int] | None,
        grammar: Grammar | None = None,
        *,
        return_kept: bool = False,
    ) -> None:
        checks.check_integer("max_new_tokens", max_new_tokens, low=0)
        checks.check_integer("logprobs", logprobs, low=0)
        if sampler is not None and not callable(sampler):
            raise TypeError(f"sampler must be callable or None; got {type(sampler).__name__}")
        self.model, self.sampler, self.logprobs = model, sampler, logprobs
        self.return_kept = return_kept
        self.stop_texts, self.stop_ids = stops(stop, model.tokenizer)
        eos = model.eos_token_ids if eos_token_ids is None else eos_token_ids
        self.eos_ids = frozenset(id_list("eos_token_ids", eos))
        if grammar is not None and not isinstance(grammar, Grammar):
            raise TypeError(f"grammar must be a Grammar or None; got {type(grammar).__name__}")
        self.grammar = grammar
        self.single = is_single(prompt)
        prompts = [prompt] if self.single else prompt
        self.prompts = [prompt_ids(prompt_item, model.tokenizer) for prompt_item in prompts]
        max_length: int | None = getattr(model, "max_length", None)
        longest = max(map(len, self.prompts))
        if max_length is not None and longest > max_length:
            raise ValueError(
                f"prompt must have at most {max_length} tokens, the context length of the model; "
                f"got {longest}"
            )
        self.max_new = [
            max_new_tokens if max_length is None else min(max_new_tokens, max_length - len(ids))
            for ids in self.prompts
        ]

    def run(self) -> Iterator[TokenEvent]:
        """Yield every token of every row, step by step."""
        numbers = [number for number, max_new in enumerate(self.max_new) if max_new]
        if not numbers:
            return
        batch = GenerationBatch(
            self.model, self.sampler, [self.prompts[number] for number in numbers]
        )
        rows = [GenerationRow(self, number) for number in numbers]
        batch.grammars = [row.grammar for row in rows if row.grammar is not None]
        while True:
            choice = batch.choose(self.logprobs, kept=self.return_kept)
            unfinished = []
            for index, row in enumerate(rows):
                event = row.take(choice, index)
                if event.finish_reason is None:
                    unfinished.append(index)
                yield event
            if not unfinished:
                return
            rows = [rows[index] for index in unfinished]
            batch.read(choice.tokens, unfinished)

    def result(self, number: int, events: list[TokenEvent], interrupted: bool) -> Generation:
        """Combine the events of a row."""
        reason = events[-1].finish_reason if events else None
        text = "".join(event.text for event in events)
        if reason is None:
            interrupted = interrupted and self.max_new[number] > 0
            reason = "interrupted" if interrupted else "length"
            text = self._full_text(number, events)
        return Generation(tuple(self.prompts[number]), text, reason, tuple(events))

    def _full_text(self, number: int, events: list[TokenEvent]) -> str:
        """Return the text of an interrupted row, with the text that was held back."""
        row = GenerationRow(self, number)
        return "".join(row.show(event.token) for event in events) + row.text.finish()


class GenerationRow:
    """An unfinished row: its text so far and its stop conditions."""

    def __init__(self, task: GenerationTask, number: int) -> None:
        self.task, self.number, self.tokenizer = task, number, task.model.tokenizer
        self.left = task.max_new[number]
        prompt = task.prompts[number]
        self.previous = prompt[-1]
        before = bytes_of(self.tokenizer, prompt) if self.tokenizer else b""
        self.text = TextStream(task.stop_texts, before=before)
        self.grammar = None if task.grammar is None else task.grammar.matcher(task.model)

    def show(self, token: int) -> str:
        """Return the text that is complete after this token."""
        if self.tokenizer is None:
            return ""
        piece = bytes_after(self.tokenizer, self.previous, token)
        self.previous = token
        return self.text.push(piece)

    def take(self, choice: Choice, index: int) -> TokenEvent:
        """Return the event of the next token."""
        token = choice.tokens[index]
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
            if self.grammar is not None and self.grammar.accept(token):
                reason = "stop"  # nothing may follow
            elif self.left == 0:
                reason = "length"
        if reason is not None:
            text += self.text.finish()
        if self.text.stopped_by is not None:
            reason, stopped_by = "stop", self.text.stopped_by
        return TokenEvent(
            row=self.number,
            token=token,
            text=text,
            log_prob=choice.log_probs[index],
            top=choice.top[index],
            sampler_log_prob=choice.sampler_log_probs[index],
            log_prob_error=choice.log_prob_error,
            finish_reason=reason,
            stopped_by=stopped_by,
            kept=_ids(choice.kept[index]) if choice.kept else None,
        )


def _last_ids(row: int, arguments: dict[str, Any]) -> list[int]:
    """Return the last ids of a row of the context, for an error message."""
    ids, mask = arguments["context"][row], arguments.get("context_mask")
    row_ids: list[int] = ids if mask is None else ids[mask[row]].tolist()
    return row_ids[-8:]


def _ids(kept: Tensor | None) -> tuple[int, ...] | None:
    return None if kept is None else tuple(kept.tolist())


_Top = list[tuple[tuple[int, float], ...]] | None
"""Per row (id, log-probability) of the most probable tokens, best first; None if not asked for."""


class Choice(NamedTuple):
    """The next token of every row, with log-probabilities."""

    tokens: list[int]
    log_probs: list[float]
    sampler_log_probs: Sequence[float | None]
    top: Sequence[tuple[tuple[int, float], ...]]
    log_prob_error: float = 0.0  # error bound of log-probabilities; above 0 with a screened head
    kept: Sequence[Tensor | None] = ()  # ids that the sampler kept; () if not asked for
    state: Any = None  # of the sampler


class GenerationBatch:
    """The unfinished rows, padded on the left: ids and mask (B, L), and their states."""

    cache: Cache

    def __init__(
        self,
        model: Model,
        sampler: Callable[..., Any] | None,
        prompts: list[list[int]],
    ) -> None:
        self.model, self.sampler = model, sampler
        device = getattr(model, "device", None)
        length = max(map(len, prompts))
        self.ids = torch.tensor([[0] * (length - len(p)) + p for p in prompts], device=device)
        self.prompt_length = torch.tensor([len(p) for p in prompts], device=device)
        column = torch.arange(length, device=device)
        self.mask = column >= length - self.prompt_length[:, None]
        self.state: Any = None
        self.grammars: list[GrammarMatcher] = []  # one per row, or none
        self._run(self.ids, None)

    def read(self, tokens: list[int], unfinished: list[int]) -> None:
        """Run the body on the new tokens of unfinished rows; remove the others."""
        new = torch.tensor(tokens, device=self.ids.device)
        if len(unfinished) < len(tokens):
            rows = torch.tensor(unfinished, device=self.ids.device)
            new, self.cache = new[rows], self.cache.select(rows)
            self.ids, self.mask = self.ids[rows], self.mask[rows]
            self.prompt_length = self.prompt_length[rows]
            self.state = _select(self.state, rows)
            self.grammars = [self.grammars[index] for index in unfinished if self.grammars]
            select = getattr(self.sampler, "select", None)
            self.sampler = select(rows) if select else self.sampler  # one seed per row, perhaps
        self.ids = torch.cat((self.ids, new[:, None]), 1)
        self.mask = torch.cat((self.mask, torch.ones_like(new[:, None], dtype=torch.bool)), 1)
        self._run(new[:, None], self.cache)

    def _run(self, new: Tensor, cache: Cache | None) -> None:
        with torch.no_grad():
            hidden, self.cache = self.model.body(new, cache, self.mask)
            self.last = hidden[:, -1]

    def choose(self, k: int, *, kept: bool = False) -> Choice:
        """Choose the next token of every row, with the k most probable ones."""
        allowed = None
        if self.grammars:
            allowed = torch.stack([grammar.bitmask() for grammar in self.grammars])
        chosen = choose_tokens(
            self.model.head,
            self.last,
            self.sampler,
            k,
            allowed=allowed,
            kept=kept,
            context=self.ids,
            position=self.mask.sum(-1),
            prompt_length=self.prompt_length,
            context_mask=self.mask,
            state=self.state,
        )
        self.state = chosen.state
        return chosen


@torch.no_grad()
def choose_tokens(
    head: Callable[[Tensor], LazyLogits | Tensor],
    hidden: Tensor,
    sampler: Callable[..., Any] | None,
    k: int,
    *,
    allowed: Tensor | None = None,
    kept: bool = False,
    **given: Any,
) -> Choice:
    """Choose the next token of every row from hidden states (B, D), with the k most probable ones.

    Without a `sampler`, take the most probable token; `given` are further arguments of the sampler,
    such as context and position. Tokens whose bit in `allowed` (B, W) int32 is 0 are forbidden.
    With `kept`, the choice has the tokens that the sampler kept.
    """
    logits = head(hidden)
    if k and k > logits.shape[-1]:
        raise ValueError(
            f"logprobs must be at most {logits.shape[-1]}, the vocabulary size; got {k}"
        )
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    error, sampler_log_probs, state = 0.0, None, None
    kept_ids: Sequence[Tensor | None] = ()
    if sampler is None:
        tokens, log_probs, top = _greedy(logits, k, allowed)
    else:
        arguments = given if allowed is None else {**given, "allowed": allowed}
        sampled = sampler(logits, **arguments)
        tokens, state, top = sampled.token, sampled.state, None
        if isinstance(sampled, ScreenedSampled):
            by_sampler, log_probs = sampled.estimate
            error = sampled.estimate_error
            again = k > 0  # exact with a screened head as well
        else:
            by_sampler, log_probs = sampled.log_prob, sampled.raw_log_prob
            again = k > 0 or allowed is not None  # over all tokens, not only the allowed ones
        sampler_log_probs = by_sampler.tolist()
        if again:
            log_probs, top = _log_probs(logits, tokens, k)
        if kept:
            counts = sampled.kept.counts()
            kept_ids = [
                ids if n < logits.shape[-1] else None
                for ids, n in zip(sampled.kept, counts, strict=True)
            ]
    chosen = Choice(
        tokens.tolist(),
        log_probs.tolist(),
        sampler_log_probs or [None] * len(hidden),
        top or [()] * len(hidden),
        error,
        kept_ids,
        state,
    )
    for row, (token, log_prob) in enumerate(zip(*chosen[:2], strict=True)):
        if token < 0 or log_prob != log_prob:
            raise ValueError(
                "the model's logits must have a finite maximum; got NaN, inf, "
                f"or only -inf after {_last_ids(row, given)}"
            )
    return chosen


def _pairs(top: Any, lse: Tensor) -> list[tuple[tuple[int, float], ...]]:
    """Return (id, log-probability) of the best tokens of each row, from logits and ids (B, k)."""
    values, ids = top
    both = zip(ids.tolist(), (values - lse[:, None]).tolist(), strict=True)
    return [tuple(zip(*row, strict=True)) for row in both]


def _greedy(
    logits: LazyLogits | Tensor, k: int, allowed: Tensor | None
) -> tuple[Tensor, Tensor, _Top]:
    """Return the best token, its log-probability, and the k most probable tokens."""
    if allowed is not None:
        tokens = masked(logits, allowed).argmax(-1)
        return tokens, *_log_probs(logits, tokens, k)
    if isinstance(logits, LazyLogits):
        answers: Any = logits.ask(top_k=max(k, 1), logsumexp=True)
        top, lse = answers.top_k, answers.logsumexp
        tokens = top.indices[:, 0]
    else:
        top, lse = logits.topk(max(k, 1)), logits.logsumexp(-1)
        tokens = logits.argmax(-1)  # among equals, argmax returns the first, topk any
    return tokens, top.values[:, 0] - lse, _pairs(top, lse) if k else None


def _log_probs(logits: LazyLogits | Tensor, tokens: Tensor, k: int) -> tuple[Tensor, _Top]:
    """Return the log-probabilities of tokens (B,), and the k most probable ones, by one sweep."""
    if isinstance(logits, LazyLogits):
        answers: Any = logits.ask(log_prob=tokens, top_k=k, logsumexp=k > 0)
        return answers.log_prob, _pairs(answers.top_k, answers.logsumexp) if k else None
    log_probs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return log_probs, _pairs(logits.topk(k), logits.logsumexp(-1)) if k else None


def _select(state: Any, rows: Tensor) -> Any:
    """Return a sampler's state for some of the rows."""
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
