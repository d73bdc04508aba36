"""Continuous batching: the rows of all requests to a model, one token per step.

In:  tasks of `generate`; each joins between two steps and leaves when it is done or cancelled.
Out: their `TokenEvent`s.

Each request pulls its own events. If none is waiting, it runs one step for the rows of all
requests, so requests that take turns (see `Worker`) share the steps. A long prompt is processed in
parts, with steps of the others in between. A row's numbers do not depend on the other
rows: see `lmhead.nn.batch_decode`. With bodies that transformers runs they would; requests to these
take turns without sharing steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lmhead.models import LanguageModel
from lmhead.nn import DecoderBody
from lmhead.nn.batch_decode import BatchDecoder, SequenceCache
from lmhead.sampling import Sampler, TokenEvent
from lmhead.sampling.generation_loop import (
    Choice,
    GenerationBatch,
    GenerationRow,
    GenerationTask,
    choose_tokens,
)


@dataclass(eq=False)
class _Row:
    """One row while it is generated."""

    row: GenerationRow  # its text and stop conditions
    ids: list[int]  # prompt and generated tokens
    head: Callable[[Tensor], Any]  # plain or screened
    sampler: Sampler | None  # of one row; None for greedy
    kept: bool  # whether to return the tokens that the sampler kept
    hidden: Tensor  # of the last token, (D,)
    cache: SequenceCache
    prompt_length: int
    state: Any = None
    done: bool = False
    # generated, but not yet pulled; an exception ends the row
    events: deque[TokenEvent | Exception] = field(default_factory=deque)

    @property
    def group(self) -> Any:
        """Key of the rows whose tokens can be chosen by one sweep of the head."""
        sampler = None if self.sampler is None else self.sampler.merge_key
        constrained = self.row.grammar is not None
        return id(self.head), sampler, self.row.task.logprobs, self.kept, constrained

    def take(self, choice: Choice, index: int) -> int | None:
        """Add the next token; return it if the row continues."""
        try:
            event = self.row.take(choice, index)
        except ValueError as error:  # of its grammar
            self.fail(error)
            return None
        self.events.append(event)
        self.state = choice.state
        self.ids.append(event.token)
        self.done = event.finish_reason is not None
        return None if self.done else event.token

    def fail(self, error: Exception) -> None:
        """End the row with an error."""
        self.events.append(error)
        self.done = True


class BatchEngine:
    """Generate for several requests at once; the model's body decides whether they share steps."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.decoder: BatchDecoder | None = None
        if isinstance(model.body, DecoderBody) and not model.body.has_cross_attention:
            self.decoder = BatchDecoder(model.body)
        self.rows: list[_Row] = []
        self.steps = 0

    def stream(self, task: GenerationTask, *, kept: bool = False) -> Iterator[list[TokenEvent]]:
        """Yield the events of a task, step by step; those of one step together.

        The task's model has this engine's body; its head may be a screened one.
        """
        decoder = self.decoder
        if decoder is None:
            yield from _alone(task, kept=kept)
            return
        own_rows: list[_Row] = []
        try:
            for number, max_new in enumerate(task.max_new):
                if max_new:
                    for row in _start(decoder, task, number, own_rows, kept=kept):
                        if row is None:
                            yield []  # between parts of a long prompt, other requests run a step
                        else:
                            own_rows.append(row)
            self.rows += own_rows
            yield []  # others may join before the first step
            while any(row.events or not row.done for row in own_rows):
                if not any(row.events for row in own_rows):
                    self.step()
                yield [_checked(row.events.popleft()) for row in own_rows if row.events]
        finally:
            self.rows = [row for row in self.rows if row not in own_rows]

    def step(self) -> None:
        """Generate one token of every row."""
        assert self.decoder is not None
        self.steps += 1
        groups: dict[Any, list[_Row]] = {}
        for row in self.rows:
            if not row.done:
                groups.setdefault(row.group, []).append(row)
        tokens: list[int] = []
        unfinished: list[_Row] = []
        for rows in groups.values():
            for row, token in _choose(rows):
                if token is not None:
                    tokens.append(token)
                    unfinished.append(row)
        if not unfinished:
            return
        hidden = self.decoder.step(tokens, [row.cache for row in unfinished])
        for row, state in zip(unfinished, hidden, strict=True):
            row.hidden = state


def _start(
    decoder: BatchDecoder,
    task: GenerationTask,
    number: int,
    others: Sequence[_Row],
    *,
    kept: bool,
) -> Iterator[_Row | None]:
    """Process a prompt, or copy the state of another row with the same one.

    Yields None after each part of a long prompt, and then the row.
    """
    ids = task.prompts[number]
    same = next((row for row in others if row.ids == ids), None)
    if same is not None:
        hidden, cache = same.hidden, same.cache.copy()
    else:
        for started in decoder.start_in_parts(ids):
            if started is None:
                yield None
            else:
                hidden, cache = started
    sampler: Any = task.sampler
    if sampler is not None:
        sampler = sampler.select(torch.tensor([number]))
    row = GenerationRow(task, number)
    yield _Row(row, list(ids), task.model.head, sampler, kept, hidden, cache, len(ids))


def _choose(rows: list[_Row]) -> Iterator[tuple[_Row, int | None]]:
    """Choose the next tokens of rows of one group, by one sweep of the head."""
    try:
        choice = _decide(rows)
    except ValueError as error:
        if len(rows) == 1:
            rows[0].fail(error)
            return
        for row in rows:  # an error of one row must not end the others
            yield from _choose([row])
        return
    for index, row in enumerate(rows):
        yield row, row.take(choice, index)


def _decide(rows: list[_Row]) -> Choice:
    first = rows[0]
    sampler = None
    if first.sampler is not None:
        sampler = Sampler.merge([row.sampler for row in rows if row.sampler is not None])
    grammars = [row.row.grammar for row in rows]
    masks = [grammar.bitmask() for grammar in grammars if grammar is not None]
    return choose_tokens(
        first.head,
        torch.stack([row.hidden for row in rows]),
        sampler,
        first.row.task.logprobs,
        allowed=torch.stack(masks) if masks else None,
        kept=first.kept,
        context=[row.ids for row in rows],
        prompt_length=[row.prompt_length for row in rows],
        state=first.state,  # mirostat alone has one, and a group of its own
    )


def _alone(task: GenerationTask, *, kept: bool) -> Iterator[list[TokenEvent]]:
    """Generate each row in a batch of its own: the body's arithmetic may depend on the batch."""
    rows: list[tuple[GenerationRow, GenerationBatch]] = []
    for number, max_new in enumerate(task.max_new):
        if max_new:
            sampler: Any = task.sampler
            if sampler is not None:
                sampler = sampler.select(torch.tensor([number]))
            batch = GenerationBatch(task.model, sampler, [task.prompts[number]])
            row = GenerationRow(task, number)
            batch.grammars = [] if row.grammar is None else [row.grammar]
            rows.append((row, batch))
    while rows:
        choices = [batch.choose(task.logprobs, kept=kept) for _, batch in rows]
        pairs = list(zip(rows, choices, strict=True))
        events = [row.take(choice, 0) for (row, _), choice in pairs]
        yield events
        rows = []
        for (pair, choice), event in zip(pairs, events, strict=True):
            if event.finish_reason is None:
                pair[1].read(choice.tokens, [0])
                rows.append(pair)


def _checked(event: TokenEvent | Exception) -> TokenEvent:
    if isinstance(event, Exception):
        raise event
    return event
