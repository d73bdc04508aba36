"""Run a sweep, as operations that autograd, `torch.func` and `vmap` understand.

    answer                      questions -> answers, decisions            1 product
    answer, with gradients      see `equal_rows`                           3 products, retained
    answer_and_differentiate    questions, loss -> value, gradients        3 products, retained
    differentiate               questions, answers, their gradients        3 products more

First derivatives are streamed. Higher ones go through `second_order`, which builds the logits: a
Hessian-vector product costs N x V memory. `vmap` runs one sweep per entry of the mapped dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from lmhead.scores import Rows
from lmhead.scores.row_loss import RowLoss, RowSums
from lmhead.sweep import exact_decisions, filter, wide_gradients
from lmhead.sweep.chunk import Buffers, Chunk, Gradients, Needs
from lmhead.sweep.equal_rows import GradientsAhead, upstream_ahead
from lmhead.sweep.exact_decisions import Rank, TopK
from lmhead.sweep.few_rows import answer_few_rows
from lmhead.sweep.questions import DEFAULT_MAX_BYTES, Decisions, Questions
from lmhead.sweep.second_order import dense_answers, differentiated, second_order
from lmhead.sweep.wide_gradients import to_dtype_of

Tensors = tuple[Tensor | None, ...]


def row_answers(questions: Questions) -> tuple[RowSums, Decisions]:
    """Return all answers; those in `RowSums` are differentiable with respect to the sources."""
    if (one := exact_decisions.answer_one_row(questions)) is not None:
        return one
    if (few := answer_few_rows(questions)) is not None:
        return few
    form, ahead = questions.without_tensors(), _gradients_ahead(questions)
    outputs = _Answer.apply(form, ahead, *questions.tensors())  # type: ignore[no-untyped-call]
    return _unpack(questions, outputs)


def _gradients_ahead(q: Questions) -> GradientsAhead | None:
    """Return storage for gradients of Σ log p, if computing them in the forward pass pays off."""
    if q.equal_rows is None or not q.equal_rows.expected or not torch.is_grad_enabled():
        return None
    if q.ids is None or q.ids.shape[1] != 1 or q.other is not None or q.shard is not None:
        return None
    if _transformed() or not q.plan(retain=True, filtered=True).retained:
        return None
    differentiable = q.tensors()[: q.n_differentiable]
    flags = tuple(t is not None and t.requires_grad for t in differentiable)
    return GradientsAhead(q.equal_rows, flags) if any(flags) else None


def total_loss(questions: Questions, loss: RowLoss) -> Tensor:
    """Return Σ_n loss.rows, in float64, with gradients from one sweep of three products.

    The gradients are computed together with the value and returned by the first backward pass; a
    second one through the same graph computes them again.
    """
    tensors = questions.tensors()
    flags = tuple(t is not None and t.requires_grad for t in tensors[: questions.n_differentiable])
    if not (torch.is_grad_enabled() and any(flags)) or _transformed():
        return loss.rows(row_answers(questions)[0]).sum()
    form = questions.without_tensors()
    total: Tensor = _Total.apply(form, flags, *loss, *tensors)  # type: ignore[no-untyped-call]
    return total


class _Answer(torch.autograd.Function):
    """Questions to answers: one product. Without `ahead`, backward computes the logits again."""

    @staticmethod
    def forward(
        form: Questions, ahead: GradientsAhead | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        answers, decisions = answer(form.with_tensors(tensors), ahead)
        return tuple(a for a in (*answers, *decisions) if a is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.form, ctx.ahead, *tensors = inputs
        answers, decisions = _unpack(ctx.form.with_tensors(tuple(tensors)), output)
        ctx.shape = tuple(a is not None for a in answers)
        ctx.n_outputs = len(output)
        exact = [d for d in (*decisions, answers.other_lse) if d is not None]
        ctx.mark_non_differentiable(*exact)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *answers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensors:
        form = ctx.form
        n = len(form.tensors())
        saved = ctx.saved_tensors
        tensors, answers = saved[:n], saved[n:]
        remaining = iter(grads)
        upstream = tuple(next(remaining) if present else None for present in ctx.shape)
        if all(u is None for u in upstream):
            return (None,) * (2 + n)
        flags = ctx.needs_input_grad[2 : 2 + form.n_differentiable]
        ahead = None if ctx.ahead is None else ctx.ahead.take(RowSums(*upstream))
        if ahead is not None:
            out = _typed(ahead, tensors)
        elif wide_gradients.is_enabled():
            sums = RowSums(*upstream)
            grads = differentiate(form.with_tensors(tensors), RowSums(*answers), sums, flags)
            out = _typed(grads, tensors)
        else:
            apply: Any = _AnswerBackward.apply
            out = apply(form, flags, *upstream, *answers, *tensors)
        return (None, None, *_fill(flags, out), *(None,) * (n - len(flags)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return _one_by_one(_Answer.apply, info, in_dims, args)


class _AnswerBackward(torch.autograd.Function):
    """Gradients of the answers to gradients of the flagged tensors, streamed."""

    @staticmethod
    def forward(form: Questions, flags: tuple[bool, ...], *args: Tensor | None) -> Tensors:
        upstream, answers, tensors = _split(args)
        grads = differentiate(form.with_tensors(tensors), answers, upstream, flags)
        return _typed(grads, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        ctx.form, ctx.flags, *args = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensors:
        upstream, _, tensors = _split(ctx.saved_tensors)

        def answers(tensors: Tensors) -> tuple[Tensor, ...]:
            dense = dense_answers(ctx.form.with_tensors(tensors))
            return tuple(
                a for a, u in zip(dense, upstream, strict=True) if u is not None and a is not None
            )

        present = tuple(u for u in upstream if u is not None)
        by_upstream, by_tensors = second_order(answers, present, tensors, ctx.flags, grads)
        gradients = iter(by_upstream)
        of_upstream = tuple(None if u is None else next(gradients) for u in upstream)
        rest = len(tensors) - len(ctx.flags)
        return (None, None, *of_upstream, *(None,) * len(of_upstream), *by_tensors, *(None,) * rest)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return _one_by_one(_AnswerBackward.apply, info, in_dims, args)


class _Total(torch.autograd.Function):
    """A loss and its gradients in three products; the gradients are for the first backward pass."""

    @staticmethod
    def forward(ctx: Any, form: Questions, flags: tuple[bool, ...], *args: Tensor | None) -> Tensor:
        loss, tensors = RowLoss(*args[:5]), args[5:]  # type: ignore[arg-type]
        value, ctx.gradients = answer_and_differentiate(form.with_tensors(tensors), loss, flags)
        ctx.form, ctx.flags = form, flags
        ctx.save_for_backward(*args)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensors:
        form, flags, args = ctx.form, ctx.flags, ctx.saved_tensors
        loss, tensors = RowLoss(*args[:5]), tuple(args[5:])
        if torch.is_grad_enabled():  # double backward: by the definition
            others = tensors[len(flags) :]

            def total(*flagged: Tensor | None) -> list[Tensor]:
                return [loss.rows(dense_answers(form.with_tensors(flagged + others))).sum()]

            made = differentiated(total, tensors[: len(flags)], [grad])
        else:
            gradients, ctx.gradients = ctx.gradients, None
            if gradients is None:  # a second pass through the same graph
                _, gradients = answer_and_differentiate(form.with_tensors(tensors), loss, flags)
            if float(grad) != 1.0:
                for g in gradients:
                    if g is not None:
                        g.mul_(grad.to(g.dtype))
            made = _fill(flags, _typed(gradients, tensors))
        return (None, None, *(None,) * 5, *made, *(None,) * (len(tensors) - len(flags)))


def _one_by_one(
    apply: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Run vmap as a loop: one streamed sweep per entry."""
    outputs = [
        apply(
            *(
                a if d is None or not isinstance(a, Tensor) else a.select(d, i)
                for a, d in zip(args, in_dims, strict=True)
            )
        )
        for i in range(info.batch_size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*outputs, strict=True))
    return stacked, (0,) * len(stacked)


def _unpack(q: Questions, outputs: tuple[Tensor, ...]) -> tuple[RowSums, Decisions]:
    given: Iterator[Tensor] = iter(outputs)
    asked = (
        True,
        q.entropy,
        q.ids is not None,
        q.mix is not None,
        q.soft is not None,
        q.other is not None,
        q.other is not None,
        q.log_sum_sq,
    )
    answers = RowSums(*(next(given) if a else None for a in asked))
    top, rank = q.top_k > 0, q.rank_ids is not None
    return answers, Decisions(*(next(given) if d else None for d in (top, top, rank)))


def _split(args: tuple[Tensor | None, ...]) -> tuple[RowSums, RowSums, Tensors]:
    n = len(RowSums._fields)
    return RowSums(*args[:n]), RowSums(*args[n : 2 * n]), tuple(args[2 * n :])


def _typed(grads: Tensors, tensors: Tensors) -> tuple[Tensor, ...]:
    """Return the gradients that are not None, in the types of their tensors."""
    pairs = zip(grads, tensors, strict=False)
    return tuple(
        g if g.dtype == t.dtype else to_dtype_of(g, t)
        for g, t in pairs
        if g is not None and t is not None
    )


def _fill(flags: tuple[bool, ...], values: tuple[Tensor, ...]) -> Tensors:
    given = iter(values)
    return tuple(next(given) if f else None for f in flags)


def _transformed() -> bool:
    """Return whether a `torch.func` transform is active, which forbids gradients in `forward`."""
    return bool(torch._C._are_functorch_transforms_active())


Args = ParamSpec("Args")
Result = TypeVar("Result")


def in_own_precision(
    sweep: Callable[Concatenate[Questions, Args], Result],
) -> Callable[Concatenate[Questions, Args], Result]:
    """Run a sweep in the precision of its source, whatever the global settings."""

    @wraps(sweep)
    def run(questions: Questions, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        with questions.source.products():
            return sweep(questions, *args, **kwargs)

    return run


@in_own_precision
def answer(questions: Questions, ahead: GradientsAhead | None = None) -> tuple[RowSums, Decisions]:
    """Return all answers, (N, ...) each; with `ahead`, also compute its gradients."""
    answers = _Collected(questions.source.rows)
    decisions = _Collected(questions.source.rows)
    retain = ahead is not None
    into = None if ahead is None else _gradients(questions, ahead.flags)
    for rows, chunk in chunks(questions, retain=retain, filtered=retain):
        numbers = _numbers(rows, questions.source.device)
        top, rank = _decision_trackers(questions, rows, numbers, chunk)
        sums = exact_decisions.recompute_infinite_rows(questions, numbers, chunk.forward(top, rank))
        answers.put(rows, sums)
        # With shards, rows without an order are found when the slices are combined.
        lse = sums.lse if questions.shard is None else torch.zeros_like(sums.lse)
        values, ids = (None, None) if top is None else top.answer(lse)
        ranks = None if rank is None else rank.answer(lse)
        decisions.put(rows, Decisions(values, ids, ranks))
        if into is not None:
            _backward(chunk, sums, upstream_ahead(sums), *into)
    if ahead is not None and into is not None:
        ahead.gradients = _results(questions, *into)
    if not answers.parts:
        return _empty_answers(questions), _empty_decisions(questions)
    results = RowSums(*answers.parts), Decisions(*decisions.parts)
    return (
        results if questions.shard is None else questions.shard.combine(*results, questions.top_k)
    )


@in_own_precision
def answer_and_differentiate(
    questions: Questions, loss: RowLoss, flags: tuple[bool, ...]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the loss over all rows, and its gradients for the flagged tensors, in one sweep."""
    into, other_into = _gradients(questions, flags)
    total = torch.zeros((), dtype=torch.float64, device=questions.source.device)
    for rows, chunk in chunks(questions, retain=True, filtered=True):
        answers = chunk.forward()
        if questions.shard is not None:
            answers, _ = questions.shard.combine(answers)
        chunk_loss = loss.at(rows)
        total += chunk_loss.rows(answers).sum()
        _backward(chunk, answers, chunk_loss.gradients(answers), into, other_into)
    return total, _results(questions, into, other_into)


@in_own_precision
def differentiate(
    questions: Questions, answers: RowSums, upstream: RowSums, flags: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the flagged tensors, given those of the answers.

    Here and in the functions above they have the type of the products: the caller converts them.
    """
    into, other_into = _gradients(questions, flags, final=True)
    for rows, chunk in chunks(questions, filtered=True):
        _backward(chunk, answers.at(rows), upstream.at(rows), into, other_into)
    return _results(questions, into, other_into)


def _backward(
    chunk: Chunk, answers: RowSums, upstream: RowSums, into: Gradients, other_into: Gradients
) -> None:
    """Add the gradients of a chunk, filtered if its plan says so."""
    settings = chunk.questions.grad_filter
    if chunk.plan.filtered and settings is not None:
        filter.backward(chunk, answers, upstream, into, settings)
    else:
        chunk.backward(answers, upstream, into, other_into)


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
            range_of_rows = slice(done + start, done + stop)
            rows: Rows = range_of_rows if active is None else active[range_of_rows]
            chunk = Chunk(questions, plan, buffers, rows)
            yield rows, chunk
            if chunk.flat and questions.shard is None:  # other processes may see another chunk
                break
        buffers.free()
        done, filtered = range_of_rows.stop, False


def _numbers(rows: Rows, device: torch.device) -> Tensor:
    """Return the row numbers of a chunk."""
    if isinstance(rows, slice):
        return torch.arange(rows.start, rows.stop, device=device)
    return rows


def _decision_trackers(
    questions: Questions, rows: Rows, numbers: Tensor, chunk: Chunk
) -> tuple[TopK | None, Rank | None]:
    if questions.top_k == 0 and questions.rank_ids is None:
        return None, None
    source = questions.source
    max_bytes = DEFAULT_MAX_BYTES if questions.max_bytes is None else questions.max_bytes
    top = rank = None
    if questions.top_k:
        k = min(questions.top_k, source.vocab)
        top = TopK(source, numbers, chunk.hiddens, max_bytes, k)
    if questions.rank_ids is not None:
        values = None if questions.rank_values is None else questions.rank_values[rows]
        rank = Rank(source, numbers, chunk.hiddens, max_bytes, questions.rank_ids[rows], values)
    return top, rank


def _gradients(
    questions: Questions, flags: tuple[bool, ...], *, final: bool = False
) -> tuple[Gradients, Gradients]:
    source, other = questions.source, questions.other
    n = 2 * len(source.hiddens) + 1
    into = Gradients(source, Needs.of(source, flags[:n]), final=final)
    if other is None:
        return into, into
    return into, Gradients(other, Needs.of(other, flags[n:]), final=final)


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
        log_sum_sq=zeros(n) if q.log_sum_sq else None,
    )


def _empty_decisions(q: Questions) -> Decisions:
    n, device = q.source.rows, q.source.device
    return Decisions(
        top_values=torch.zeros(n, q.top_k, dtype=torch.float64, device=device) if q.top_k else None,
        top_ids=torch.zeros(n, q.top_k, dtype=torch.int64, device=device) if q.top_k else None,
        ranks=None if q.rank_ids is None else torch.zeros_like(q.rank_ids),
    )
