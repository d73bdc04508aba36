"""Random problems: loss, answers and gradients against the float64 reference.

What is measured may be off by as much as plain torch with the same dtype, plus a small constant.
What is counted or chosen (rank, argmax, top-k) must be exact. `python -m
scripts.reliability.differential` draws as many problems as one has time for.
"""

from typing import Any

import dense_torch
import numpy as np
import oracle
import torch
from compare import Array, assert_as_good_as, assert_close, float64
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_problems import Leaves, Problem, problems, teacher
from torch import Tensor

import lmhead
from lmhead import reference

FAST = settings(
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@settings(FAST, max_examples=280)
@given(st.data())
def test_loss_of_ids(data: st.DataObject) -> None:
    problem = data.draw(problems())
    options = data.draw(loss_options(problem))
    options["ignore_index"] = data.draw(st.sampled_from([-100, -1, 0, problem.vocab]))
    targets = problem.ids(*problem.rows)
    ignored = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    hit = torch.rand(targets.shape, generator=problem.random) < ignored
    check_loss(problem, torch.where(hit, options["ignore_index"], targets), options)


@settings(FAST, max_examples=180)
@given(st.data())
def test_loss_of_probabilities(data: st.DataObject) -> None:
    problem = data.draw(problems())
    options = data.draw(loss_options(problem))
    logits = torch.full((*problem.rows, problem.vocab), -torch.inf, dtype=torch.float64)
    logits[..., problem.allowed] = 3.0 * problem.normal(*problem.rows, len(problem.allowed))
    check_loss(problem, logits.softmax(-1).to(problem.dtype), options)


@settings(FAST, max_examples=280)
@given(st.data())
def test_answers_and_their_joint_gradient(data: st.DataObject) -> None:
    """log_prob, entropy, logsumexp and kl from one sweep, each with its own upstream gradient."""
    problem = data.draw(problems())
    names = ["log_prob", "entropy", "logsumexp", "kl"]
    asked = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    ids = draw_ids(data, problem, problem.ids)
    has_bias = data.draw(st.booleans())
    other = teacher(problem, data.draw(st.integers(1, 40)), has_bias=has_bias)

    ours, plain, our_other, plain_other = (p.leaves() for p in (problem, problem, other, other))
    kl_to = our_other.lazy_logits() if has_bias else (our_other.hidden, our_other.weight)
    answers = lmhead.query(
        ours.hidden,
        ours.weight,
        log_prob=ids if "log_prob" in asked else None,
        entropy="entropy" in asked,
        logsumexp="logsumexp" in asked,
        kl_to=kl_to if "kl" in asked else None,
        max_bytes=problem.max_bytes,
        **ours.head,
    )
    dense_answers = dense_torch.answers(plain.dense_logits(), ids, plain_other.dense_logits())
    logits, other_logits = problem.logits(), other.logits()
    truths = {
        "log_prob": reference.log_prob(logits, ids.numpy()),
        "entropy": reference.entropy(logits),
        "logsumexp": reference.logsumexp(logits),
        "kl": reference.kl(logits, other_logits),
    }
    size = condition(logits) + ("kl" in asked) * condition(other_logits)
    upstream: dict[str, Tensor] = {}
    for name, truth in truths.items():
        if name not in asked:
            assert getattr(answers, name) is None
            continue
        assert_as_good_as(
            getattr(answers, name),
            dense_answers[name],
            truth,
            slack(problem.dtype),
            scale=size,
            dtype=dense_torch.result_dtype(problem.dtype),
            what=name,
        )
        upstream[name] = problem.normal(*truth.shape).to(dense_torch.result_dtype(problem.dtype))
    torch.autograd.backward([getattr(answers, n) for n in upstream], list(upstream.values()))
    torch.autograd.backward([dense_answers[n] for n in upstream], list(upstream.values()))

    grad, other_grad = joint_backward(logits, other_logits, ids, upstream)
    # p · (log p + H) and p · (log p - log q - KL) are as large as this.
    size *= 1.0 + float(np.log(problem.vocab)) + ("kl" in asked) * truths["kl"].max(initial=0.0)
    per_row = [
        up.abs() if up.shape == problem.rows else up.abs().sum(-1) for up in upstream.values()
    ]
    reach = float64(torch.stack(per_row).sum(0))
    assert_gradients(problem, ours, plain, head_backward(problem, grad), reach, size)
    if "kl" in asked:
        true = head_backward(other, other_grad)
        assert_gradients(other, our_other, plain_other, true, reach, size)


@settings(FAST, max_examples=180)
@given(st.data())
def test_order(data: st.DataObject) -> None:
    """rank, argmax and top-k are those of the float64 logits, ties to the lowest id."""
    problem = data.draw(problems(saturating=False))
    k = data.draw(st.integers(1, min(problem.vocab, 70)))
    ids = draw_ids(data, problem, problem.any_ids)
    answers = lmhead.query(
        problem.hidden,
        problem.weight,
        rank=ids,
        argmax=True,
        top_k=k,
        max_bytes=problem.max_bytes,
        **problem.head,
    )
    logits = problem.logits()
    values, indices = reference.top_k(logits, k)
    rank = reference.rank(logits, ids.numpy())
    assert_close(answers.rank, rank, dtype=torch.int64, what="rank")
    assert_close(answers.argmax, reference.argmax(logits), dtype=torch.int64, what="argmax")
    assert answers.top_k is not None
    assert_close(answers.top_k.indices, indices, dtype=torch.int64, what="top_k")
    assert_as_good_as(
        answers.top_k.values,
        problem.leaves().dense_logits().gather(-1, torch.from_numpy(indices)),
        values,
        slack(problem.dtype),
        scale=condition(logits),
        dtype=dense_torch.result_dtype(problem.dtype),
        what="logits of the top k",
    )


@st.composite
def loss_options(draw: st.DrawFn, problem: Problem) -> dict[str, Any]:
    reduction = draw(st.sampled_from(["mean", "sum", "none"]))
    weighted = draw(st.booleans())
    counted = reduction == "mean" and draw(st.booleans())
    weights = 0.1 + torch.rand(problem.vocab, generator=problem.random)
    return {
        "reduction": reduction,
        "ignore_index": -100,
        "label_smoothing": draw(st.sampled_from([0.0, 0.0, 0.1, 0.7])),
        "z_loss": draw(st.sampled_from([0.0, 0.0, 1e-3])),
        "class_weight": weights.to(problem.dtype) if weighted else None,
        "num_items": draw(st.integers(1, 50)) if counted else None,
    }


def draw_ids(data: st.DataObject, problem: Problem, pick: Any) -> Tensor:
    """Ids (...), or K of them for each row, (..., K)."""
    k = data.draw(st.sampled_from([None, 1, 2, 5]))
    ids: Tensor = pick(*problem.rows, *([] if k is None else [k]))
    return ids


def check_loss(problem: Problem, targets: Tensor, options: dict[str, Any]) -> None:
    """Loss and gradients of `linear_cross_entropy` are as good as torch's."""
    reduction = options["reduction"]
    upstream = problem.normal(*(problem.rows if reduction == "none" else ()))
    upstream = upstream.to(dense_torch.result_dtype(problem.dtype))
    ours, plain = problem.leaves(), problem.leaves()
    loss = lmhead.linear_cross_entropy(
        ours.hidden,
        ours.weight,
        targets,
        max_bytes=problem.max_bytes,
        **ours.head,
        **options,
    )
    dense_loss = dense_torch.cross_entropy(plain.dense_logits(), targets, **options)
    torch.autograd.backward([loss, dense_loss], [upstream, upstream])

    arguments = {**problem.head, **options}
    truth = oracle.linear_cross_entropy(problem.hidden, problem.weight, targets, **arguments)
    # What one row weighs in the loss: with no row at all, the mean is NaN.
    soft = targets.is_floating_point()
    kept = torch.ones(problem.rows) if soft else targets != options["ignore_index"]
    share = float64(kept)
    if reduction == "mean":
        share = share / (options["num_items"] or max(1.0, share.sum()))
    size = condition(problem.logits())
    size += options["z_loss"] * size**2
    assert_as_good_as(
        loss,
        dense_loss,
        truth,
        slack(problem.dtype),
        scale=size * (share.max(initial=0.0) if reduction == "none" else share.sum()),
        dtype=dense_torch.result_dtype(problem.dtype),
        equal_nan=reduction == "mean" and not options["num_items"] and not kept.any(),
        what="loss",
    )
    grads = oracle.linear_cross_entropy_backward(
        problem.hidden, problem.weight, targets, grad_output=upstream, **arguments
    )
    assert_gradients(problem, ours, plain, grads, share * np.abs(float64(upstream)), size)


def assert_gradients(
    problem: Problem,
    ours: Leaves,
    plain: Leaves,
    truth: oracle.Gradients,
    reach: Array,
    size: float,
) -> None:
    """Each gradient has the dtype of its tensor and is as good as torch's.

    `reach` (...) is how large the gradient is that reaches a row; `size` is that of the numbers it
    comes from. Times weights, or summed times hidden states, they say what one rounding is.
    """
    size *= abs(problem.head["scale"])
    largest, total, rows = reach.max(initial=0.0), reach.sum(), problem.rows.numel()
    scales = {  # with the number of terms of each sum
        "hidden": (size * largest * float64(problem.weight.abs()).max(initial=0.0), problem.vocab),
        "weight": (size * total * float64(problem.hidden.abs()).max(initial=0.0), rows),
        "bias": (size * total, rows),
    }
    for name, (scale, terms) in scales.items():
        true = getattr(truth, name)
        if true is None:
            continue
        granted = slack(problem.dtype, terms) * scale
        if problem.dtype in dense_torch.HALF:  # may be rounded twice: once kept, once scaled
            granted += 0.5 * torch.finfo(problem.dtype).eps * np.abs(true).max(initial=0.0)
        assert_as_good_as(
            getattr(ours, name).grad,
            getattr(plain, name).grad,
            true,
            granted,
            scale=1.0,
            dtype=problem.dtype,
            what=f"gradient of {name}",
        )


def slack(dtype: torch.dtype, terms: int = 0) -> float:
    """The small constant: a few roundings of the dtype that results are given in.

    A product may add up its terms in any order; equal terms are all rounded the same way.
    """
    return (8 + terms / 8) * float(torch.finfo(dense_torch.result_dtype(dtype)).eps)


def condition(logits: Array) -> float:
    """How large the numbers are whose difference a log-probability is; at least 1."""
    return float(np.abs(logits[np.isfinite(logits)]).max(initial=1.0))


def head_backward(problem: Problem, grad_logits: Array) -> oracle.Gradients:
    return oracle.head_logits_backward(grad_logits, problem.hidden, problem.weight, **problem.head)


def joint_backward(
    logits: Array, other_logits: Array, ids: Tensor, upstream: dict[str, Tensor]
) -> tuple[Array, Array]:
    """Gradients of Σ upstream · answer for both logits."""
    grad, other_grad = np.zeros_like(logits), np.zeros_like(other_logits)
    for name, value in upstream.items():
        up = float64(value)
        if name == "log_prob":
            grad += reference.log_prob_backward(up, logits, ids.numpy())
        elif name == "entropy":
            grad += reference.entropy_backward(up, logits)
        elif name == "logsumexp":
            grad += up[..., None] * reference.softmax(logits)
        else:
            grad_p, other_grad = reference.kl_backward(up, logits, other_logits)
            grad += grad_p
    return grad, other_grad
