"""A loss over few logits: the arithmetic of the sweep in few operations.

With 65 tokens instead of 50,000 the three products take a fraction of a millisecond, and the
bookkeeping of the sweep (tiles, rows left out, all kinds of questions) takes longer. Here a chunk
of rows has the whole vocabulary as one tile, and everything between the products is one kernel.

In:  questions and a loss that `plan_for` has a plan for; all others use the general sweep.
Out: the same value and gradients as `run_sweep.answer_and_differentiate`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmhead.scores.row_loss import RowLoss
from lmhead.sweep import kernels, native
from lmhead.sweep.plan import Plan, make_small_plan
from lmhead.sweep.questions import Questions


def plan_for(questions: Questions) -> Plan | None:
    """Return the plan of a small loss; None where the general sweep is needed.

    It is needed where a row is left out, and for a low-rank delta, soft targets, a filter, or
    tensors that the compiled core does not take.
    """
    q, source = questions, questions.source
    if q.ids is None or q.other is not None or q.soft is not None or q.grad_filter is not None:
        return None
    tensors = (*source.hiddens, *source.weights, source.bias)
    if native.core is None or source.rows < 2 * native.MIN_TOKENS:
        return None
    if (
        not native.readable(*tensors, q.ids, q.mix)
        or len(tensors) != 3
        or any(t is not None and t.dtype != torch.float32 for t in tensors)
    ):
        return None
    plan = make_small_plan(source.rows, source.vocab, source.hidden_size, 4, q.max_bytes)
    return None if plan is None or q.rows < plan.rows else plan


def answer_and_differentiate(
    questions: Questions, plan: Plan, loss: RowLoss, flags: tuple[bool, ...]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the loss over all rows, and its gradients for the flagged tensors."""
    source = questions.source
    (hidden,), (weight,), bias = source.hiddens, source.weights, source.bias
    assert questions.ids is not None
    ids = questions.ids[:, 0]
    to_hidden = hidden.new_empty(hidden.shape) if flags[0] else None
    to_weight = to_bias = None
    total = 0.0
    for start, stop in plan.chunks():
        here = slice(start, stop)
        h = hidden[here]
        g = torch.mm(weight, h.T)
        total += kernels.loss_(g, bias, source.pointwise, ids[here], loss.at(here), questions.mix)
        if to_hidden is not None:
            torch.mm(g.T, weight, out=to_hidden[here])
        if flags[1]:
            to_weight = g @ h if to_weight is None else to_weight.addmm_(g, h)
        if flags[2] and bias is not None:
            to_bias = g.sum(1) if to_bias is None else to_bias.add_(g.sum(1))
    value = torch.tensor(total, dtype=torch.float64, device=source.device)
    return value, (to_hidden, to_weight, to_bias)
