"""Second derivatives of the answers, from dense logits: (N, V) memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lmhead.scores.row_loss import RowSums
from lmhead.sweep.kernels import FLOOR
from lmhead.sweep.questions import Questions
from lmhead.sweep.source import without_autocast

Tensors = tuple[Tensor | None, ...]


def dense_answers(questions: Questions) -> RowSums:
    """Return every differentiable answer by its definition, on dense logits: (N, V) memory."""
    if questions.shard is not None:
        raise NotImplementedError(
            "second derivatives of a vocabulary-parallel head are not supported; build its logits "
            "by logits.materialize() and differentiate those"
        )
    with without_autocast(questions.source.device):
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
        log_sum_sq=(2 * z).logsumexp(-1) - 2 * lse if q.log_sum_sq else None,
    )
    if q.active is None:
        return answers
    return RowSums(
        *(None if a is None else torch.where(_column(q.active, a), a, 0.0) for a in answers)
    )


def second_order(
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
        remaining = iter(values)
        all_values = tuple(next(remaining) if p else None for p in present)

        def of_flagged(*flagged: Tensor) -> tuple[Tensor, ...]:
            chosen = iter(flagged)
            head = tuple(next(chosen) if f else v for v, f in zip(all_values, flags, strict=True))
            return function(head + tensors[n:])

        flagged = (v for v, f in zip(all_values, flags, strict=True) if f)
        outputs, pull = vjp(of_flagged, *flagged)
        typed_upstream = tuple(u.to(o.dtype) for u, o in zip(upstream, outputs, strict=True))
        pulled: tuple[Tensor, ...] = pull(typed_upstream)
        return pulled

    outputs, pull = vjp(first_order, upstream, *(t for t in tensors[:n] if t is not None))
    cotangents = tuple(
        torch.zeros_like(o) if g is None else g for g, o in zip(grads, outputs, strict=True)
    )
    by_upstream, *by_tensors = pull(cotangents)
    remaining = iter(by_tensors)
    return by_upstream, tuple(next(remaining) if p else None for p in present)


def differentiated(
    definition: Callable[..., Sequence[Tensor]],
    tensors: Tensors,
    grads: Sequence[Tensor | None],
) -> Tensors:
    """Return the gradients of definition(*tensors), as part of the graph; None for constants.

    They are those of a node of the graph: partial derivatives, one for each place of a tensor. What
    reaches one tensor through another that is computed from it is added by autograd itself.
    """
    aliases = tuple(None if t is None else alias(t) for t in tensors)
    pairs = [
        (o, g)
        for o, g in zip(definition(*aliases), grads, strict=True)
        if g is not None and o.requires_grad
    ]
    wanted = [a for a in aliases if a is not None and a.requires_grad]
    if not pairs or not wanted:
        return (None,) * len(tensors)
    outputs, upstream = zip(*pairs, strict=True)
    made = iter(
        torch.autograd.grad(outputs, wanted, upstream, create_graph=True, allow_unused=True)
    )
    return tuple(next(made) if a is not None and a.requires_grad else None for a in aliases)


def alias(t: Tensor) -> Tensor:
    """Return the same values to differentiate by: no other tensor is computed from the alias.

    The alias itself is part of the graph, so that second derivatives reach the tensor.
    """
    return t.view_as(t) if t.requires_grad else t


def _column(active: Tensor, like: Tensor) -> Tensor:
    return active if like.dim() == 1 else active[:, None]
