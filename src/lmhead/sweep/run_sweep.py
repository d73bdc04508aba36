"""The three ways to run a sweep: answer; answer and differentiate; differentiate earlier answers.

answer                        questions -> answers, decisions            1 product
answer_and_differentiate      questions, loss -> value, gradients        3 products, retained
differentiate                 questions, answers, their gradients        3 products more
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from lmhead.scores import Rows
from lmhead.scores.row_loss import RowLoss, RowSums
from lmhead.sweep import small_vocab
from lmhead.sweep.chunk import Buffers, Chunk
from lmhead.sweep.exact_decisions import Rank, TopK
from lmhead.sweep.gradients import Gradients, Needs
from lmhead.sweep.plan import DEFAULT_MAX_BYTES
from lmhead.sweep.questions import Decisions, Questions

Given = ParamSpec("Given")
Made = TypeVar("Made")


def in_own_precision(
    sweep: Callable[Concatenate[Questions, Given], Made],
) -> Callable[Concatenate[Questions, Given], Made]:
    """Run a sweep in the precision of its source, whatever the global settings."""

    @wraps(sweep)
    def run(questions: Questions, /, *args: Given.args, **kwargs: Given.kwargs) -> Made:
        with questions.source.products():
            return sweep(questions, *args, **kwargs)

    return run


@in_own_precision
def answer(questions: Questions) -> tuple[RowSums, Decisions]:
    """Return all answers, (N, ...) each."""
    answers = _Collected(questions.source.rows)
    decisions = _Collected(questions.source.rows)
    for rows, chunk in chunks(questions):
        top, rank = _decision_trackers(questions, rows, chunk)
        given = chunk.forward(top, rank)
        answers.put(rows, given)
        values, ids = (None, None) if top is None else top.answer(given.lse)
        ranks = None if rank is None else rank.answer(given.lse)
        decisions.put(rows, Decisions(values, ids, ranks))
    if not answers.parts:
        return _empty_answers(questions), _empty_decisions(questions)
    return RowSums(*answers.parts), Decisions(*decisions.parts)


@in_own_precision
def answer_and_differentiate(
    questions: Questions, loss: RowLoss, flags: tuple[bool, ...]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the loss over all rows, and its gradients for the flagged tensors, in one sweep."""
    small = small_vocab.plan_for(questions)
    if small is not None:
        return small_vocab.answer_and_differentiate(questions, small, loss, flags)
    into, other_into = _gradients(questions, flags)
    total = torch.zeros((), dtype=torch.float64, device=questions.source.device)
    for rows, chunk in chunks(questions, retain=True, filtered=True):
        answers = chunk.forward()
        chunk_loss = loss.at(rows)
        total += chunk_loss.rows(answers).sum()
        chunk.backward(answers, chunk_loss.gradients(answers), into, other_into)
    return total, _results(questions, into, other_into)


@in_own_precision
def differentiate(
    questions: Questions, answers: RowSums, upstream: RowSums, flags: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the flagged tensors, given those of the answers.

    Here and above they are in the type of the products: the caller converts them.
    """
    into, other_into = _gradients(questions, flags)
    for rows, chunk in chunks(questions, filtered=True):
        chunk.backward(answers.at(rows), upstream.at(rows), into, other_into)
    return _results(questions, into, other_into)


def chunks(
    questions: Questions, *, retain: bool = False, filtered: bool = False
) -> Iterator[tuple[Rows, Chunk]]:
    """Yield the active rows, chunk by chunk; see `Questions.plan` for the options.

    After a chunk in which the filter had nothing to set aside, the rest is done without it, in
    larger chunks: an untrained model is flat in every chunk.
    """
    total, done = questions.rows, 0
    active = None
    if questions.active is not None and total < questions.source.rows:
        active = questions.active.nonzero()[:, 0]
    while done < total:
        plan = questions.plan(rows=total - done, retain=retain, filtered=filtered)
        buffers = Buffers(questions, plan)
        for start, stop in plan.chunks():
            here = slice(done + start, done + stop)
            rows: Rows = here if active is None else active[here]
            chunk = Chunk(questions, plan, buffers, rows)
            yield rows, chunk
            if chunk.flat:
                break
        buffers.free()
        done, filtered = here.stop, False


def _decision_trackers(
    questions: Questions, rows: Rows, chunk: Chunk
) -> tuple[TopK | None, Rank | None]:
    if questions.top_k == 0 and questions.rank_ids is None:
        return None, None
    source = questions.source
    numbers = rows
    if isinstance(numbers, slice):
        numbers = torch.arange(numbers.start, numbers.stop, device=source.device)
    max_bytes = DEFAULT_MAX_BYTES if questions.max_bytes is None else questions.max_bytes
    top = rank = None
    if questions.top_k:
        top = TopK(source, numbers, chunk.hiddens, max_bytes, questions.top_k)
    if questions.rank_ids is not None:
        rank = Rank(source, numbers, chunk.hiddens, max_bytes, questions.rank_ids[rows])
    return top, rank


def _gradients(questions: Questions, flags: tuple[bool, ...]) -> tuple[Gradients, Gradients]:
    source, other = questions.source, questions.other
    n = 2 * len(source.hiddens) + 1
    into = Gradients(source, Needs.of(source, flags[:n]))
    if other is None:
        return into, into
    return into, Gradients(other, Needs.of(other, flags[n:]))


def _results(
    questions: Questions, into: Gradients, other_into: Gradients
) -> tuple[Tensor | None, ...]:
    return into.result() if questions.other is None else into.result() + other_into.result()


class _Collected:
    """Tuples of per-chunk results, written into (N, ...) tensors; 0 for rows left out."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.parts: list[Tensor | None] = []

    def put(self, rows: Rows, chunk: RowSums | Decisions) -> None:
        if not self.parts:
            self.parts = [
                None if c is None else c.new_zeros(self.rows, *c.shape[1:]) for c in chunk
            ]
        for part, c in zip(self.parts, chunk, strict=True):
            if part is not None and c is not None:
                part[rows] = c


def _empty_answers(q: Questions) -> RowSums:
    n = q.source.rows
    make = q.source.hiddens[0].new_zeros

    def zeros(*shape: int) -> Tensor:
        return make(shape, dtype=torch.float64)

    return RowSums(
        lse=zeros(n),
        entropy=zeros(n) if q.entropy else None,
        picked=None if q.ids is None else zeros(n, q.ids.shape[1]),
        mixed=None if q.mix is None else zeros(n),
        softened=None if q.soft is None else zeros(n),
        kl=None if q.other is None else zeros(n),
        other_lse=None if q.other is None else zeros(n),
    )


def _empty_decisions(q: Questions) -> Decisions:
    n, device = q.source.rows, q.source.device
    return Decisions(
        top_values=torch.zeros(n, q.top_k, dtype=torch.float64, device=device) if q.top_k else None,
        top_ids=torch.zeros(n, q.top_k, dtype=torch.int64, device=device) if q.top_k else None,
        ranks=None if q.rank_ids is None else torch.zeros_like(q.rank_ids),
    )
