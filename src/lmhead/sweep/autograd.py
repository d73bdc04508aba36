"""The sweep as operations that autograd, `torch.func` and `vmap` understand.

First derivatives are streamed. Higher ones go through `dense_answers`, which builds the logits: a
Hessian-vector product costs N x V memory. `vmap` runs one sweep per entry of the mapped dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lmhead.scores.row_loss import RowLoss, RowSums
from lmhead.sweep import run_sweep, single_row
from lmhead.sweep.kernels import FLOOR
from lmhead.sweep.questions import Decisions, Questions

Tensors = tuple[Tensor | None, ...]


def row_answers(questions: Questions) -> tuple[RowSums, Decisions]:
    """Return all answers; those in `RowSums` are differentiable with respect to the sources."""
    if (one := single_row.answer(questions)) is not None:
        return one
    outputs = _Answer.apply(questions.without_tensors(), *questions.tensors())  # type: ignore[no-untyped-call]
    return _unpack(questions, outputs)


def total_loss(questions: Questions, loss: RowLoss) -> Tensor:
    """Return Σ_n loss.rows, in float64, with gradients from one sweep of three products.

    The gradients are computed together with the value and returned by the first backward pass; a
    second one through the same graph computes them again.
    """
    tensors = questions.tensors()
    flags = tuple(t is not None and t.requires_grad for t in tensors[: questions.n_differentiable])
    if not (torch.is_grad_enabled() and any(flags)) or _transformed():
        return loss.rows(row_answers(questions)[0]).sum()
    made = _Made()
    form = questions.without_tensors()
    total: Tensor = _Total.apply(form, flags, made, *loss, *tensors)  # type: ignore[no-untyped-call]
    return total


def dense_answers(questions: Questions) -> RowSums:
    """Return every differentiable answer by its definition, on dense logits: (N, V) memory."""
    with torch.autocast(questions.source.device.type, enabled=False):
        return _dense_answers(questions)


def _dense_answers(q: Questions) -> RowSums:
    z = q.source.dense().double()
    lse = z.logsumexp(-1)
    log_p = (z - lse[:, None]).clamp(min=FLOOR)
    entropy = -(log_p.exp() * log_p).sum(-1)
    masked = z == -torch.inf
    mixed = softened = kl = None
    if q.mix is not None:
        mixed = (z.masked_fill(masked, 0.0) * q.mix).sum(-1)
    if q.soft is not None:
        soft = q.soft if q.soft_weight is None else q.soft * q.soft_weight
        softened = (z.masked_fill(masked & (soft == 0), 0.0) * soft).sum(-1)
    if q.other is not None:
        log_q = q.other.dense().double().log_softmax(-1)
        cross = (log_p.exp() * log_q).masked_fill(log_p.exp() == 0, 0.0).sum(-1)
        kl = -entropy - cross
    answers = RowSums(
        lse=lse,
        entropy=entropy if q.entropy else None,
        picked=None if q.ids is None else z.gather(1, q.ids),
        mixed=mixed,
        softened=softened,
        kl=kl,
        other_lse=None if kl is None else torch.zeros_like(lse),
    )
    if q.active is None:
        return answers
    return RowSums(
        *(None if a is None else torch.where(_column(q.active, a), a, 0.0) for a in answers)
    )


class _Answer(torch.autograd.Function):
    """Questions to answers: one product. Backward makes the logits again."""

    @staticmethod
    def forward(form: Questions, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        answers, decisions = run_sweep.answer(form.with_tensors(tensors))
        return tuple(a for a in (*answers, *decisions) if a is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.form, *tensors = inputs
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
        given = iter(grads)
        upstream = tuple(next(given) if present else None for present in ctx.shape)
        flags = ctx.needs_input_grad[1 : 1 + form.n_differentiable]
        apply: Any = _AnswerBackward.apply
        out = apply(form, flags, *upstream, *answers, *tensors)
        return (None, *_fill(flags, out), *(None,) * (n - len(flags)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return _one_by_one(_Answer.apply, info, in_dims, args)


class _AnswerBackward(torch.autograd.Function):
    """Gradients of the answers to gradients of the flagged tensors, streamed."""

    @staticmethod
    def forward(form: Questions, flags: tuple[bool, ...], *args: Tensor | None) -> Tensors:
        upstream, answers, tensors = _split(args)
        grads = run_sweep.differentiate(form.with_tensors(tensors), answers, upstream, flags)
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

        given = tuple(u for u in upstream if u is not None)
        by_upstream, by_tensors = _second_order(answers, given, tensors, ctx.flags, grads)
        handed = iter(by_upstream)
        up = tuple(None if u is None else next(handed) for u in upstream)
        rest = len(tensors) - len(ctx.flags)
        return (None, None, *up, *(None,) * len(up), *by_tensors, *(None,) * rest)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return _one_by_one(_AnswerBackward.apply, info, in_dims, args)


class _Made:
    """Gradients computed in the forward pass, for the first backward pass."""

    gradients: Tensors | None = None


class _Total(torch.autograd.Function):
    """A loss and its gradients in three products."""

    @staticmethod
    def forward(
        ctx: Any, form: Questions, flags: tuple[bool, ...], made: _Made, *args: Tensor | None
    ) -> Tensor:
        loss, tensors = RowLoss(*args[:5]), args[5:]  # type: ignore[arg-type]
        value, grads = run_sweep.answer_and_differentiate(form.with_tensors(tensors), loss, flags)
        made.gradients = grads
        ctx.form, ctx.flags, ctx.made = form, flags, made
        ctx.save_for_backward(*args)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensors:
        args = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward
            apply: Any = _TotalBackward.apply
            out = apply(ctx.form, ctx.flags, ctx.made, grad, *args)
        else:
            out = _scaled_gradients(ctx.form, ctx.flags, ctx.made, grad, args)
        rest = len(args) - 5 - len(ctx.flags)
        return (None, None, None, *(None,) * 5, *_fill(ctx.flags, out), *(None,) * rest)


class _TotalBackward(torch.autograd.Function):
    """The gradients that `_Total` made, times the gradient of the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        form: Questions,
        flags: tuple[bool, ...],
        made: _Made,
        grad: Tensor,
        *args: Tensor | None,
    ) -> Tensors:
        ctx.form, ctx.flags = form, flags
        ctx.save_for_backward(grad, *args)
        ctx.set_materialize_grads(False)
        return _scaled_gradients(form, flags, made, grad, args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensors:
        upstream, *args = ctx.saved_tensors
        loss, tensors = RowLoss(*args[:5]), tuple(args[5:])

        def total(tensors: Tensors) -> tuple[Tensor, ...]:
            return (loss.rows(dense_answers(ctx.form.with_tensors(tensors))).sum(),)

        (by_grad,), by_tensors = _second_order(total, (upstream,), tensors, ctx.flags, grads)
        rest = len(tensors) - len(ctx.flags)
        return (None, None, None, by_grad, *(None,) * 5, *by_tensors, *(None,) * rest)


def _scaled_gradients(
    form: Questions, flags: tuple[bool, ...], made: _Made, grad: Tensor, args: Tensors
) -> tuple[Tensor, ...]:
    """Return the gradients of the forward pass (or new ones) times the gradient of the loss."""
    loss, tensors = RowLoss(*args[:5]), args[5:]  # type: ignore[arg-type]
    gradients, made.gradients = made.gradients, None
    if gradients is None:
        _, gradients = run_sweep.answer_and_differentiate(form.with_tensors(tensors), loss, flags)
    if float(grad) != 1.0:
        for g in gradients:
            if g is not None:
                g.mul_(grad.to(g.dtype))
    return _typed(gradients, tensors)


def _second_order(
    function: Callable[[Tensors], tuple[Tensor, ...]],
    upstream: tuple[Tensor, ...],
    tensors: Tensors,
    flags: tuple[bool, ...],
    grads: Tensors,
) -> tuple[tuple[Tensor, ...], Tensors]:
    """Return the gradients of <grads, first derivative of function> for `upstream` and the sources.

    The first derivative is by the flagged tensors; it depends on all tensors of the sources.
    """
    vjp: Any = torch.func.vjp
    n = len(flags)
    present = tuple(t is not None for t in tensors[:n])

    def first_order(upstream: tuple[Tensor, ...], *values: Tensor) -> tuple[Tensor, ...]:
        given = iter(values)
        all_values = tuple(next(given) if p else None for p in present)

        def of_flagged(*flagged: Tensor) -> tuple[Tensor, ...]:
            chosen = iter(flagged)
            head = tuple(next(chosen) if f else v for v, f in zip(all_values, flags, strict=True))
            return function(head + tensors[n:])

        flagged = (v for v, f in zip(all_values, flags, strict=True) if f)
        outputs, pull = vjp(of_flagged, *flagged)
        typed = tuple(u.to(o.dtype) for u, o in zip(upstream, outputs, strict=True))
        pulled: tuple[Tensor, ...] = pull(typed)
        return pulled

    outputs, pull = vjp(first_order, upstream, *(t for t in tensors[:n] if t is not None))
    cotangents = tuple(
        torch.zeros_like(o) if g is None else g for g, o in zip(grads, outputs, strict=True)
    )
    by_upstream, *by_tensors = pull(cotangents)
    given = iter(by_tensors)
    return by_upstream, tuple(next(given) if p else None for p in present)


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
    return tuple(g.to(t.dtype) for g, t in pairs if g is not None and t is not None)


def _fill(flags: tuple[bool, ...], values: tuple[Tensor, ...]) -> Tensors:
    given = iter(values)
    return tuple(next(given) if f else None for f in flags)


def _column(active: Tensor, like: Tensor) -> Tensor:
    return active if like.dim() == 1 else active[:, None]


def _transformed() -> bool:
    """Return whether a `torch.func` transform is active: then gradients cannot be made ahead."""
    return bool(torch._C._are_functorch_transforms_active())
