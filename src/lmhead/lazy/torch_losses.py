"""Torch's losses on lazy logits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.lazy import routing
from lmhead.lazy.logits import LazyLogits, plain
from lmhead.lazy.program import Env, Leaf, Operand
from lmhead.lazy.recording import NotRecorded, record
from lmhead.lazy.reductions import over_rows, reduce
from lmhead.scores.row_loss import CrossEntropy
from lmhead.sweep import SweptScores
from lmhead.sweep.small_batch import MAX_ROWS, quick_loss


def _legacy(reduction: str, size_average: bool | None, reduce: bool | None) -> str:
    if size_average is None and reduce is None:
        return reduction
    return F._Reduction.legacy_get_string(size_average, reduce, emit_warning=False)  # type: ignore[attr-defined, no-any-return]


def loss_dtype(logits: LazyLogits) -> torch.dtype:
    """Return the dtype of the logits; float32 under autocast, as torch does for losses."""
    on = torch.is_autocast_enabled(logits.device.type) if logits.device.type != "meta" else False
    return torch.float32 if on and logits.dtype != torch.float64 else logits.dtype


def cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute F.cross_entropy of lazy logits (N, V), (V,) or (N, V, d1, ...)."""
    reduction = _legacy(reduction, size_average, reduce)
    if not isinstance(input, LazyLogits):
        return _lazy_targets(input, target, weight, reduction, label_smoothing)
    if weight is None and type(target) is Tensor and reduction != "none" and not label_smoothing:
        few = _few_logits(input, target)
        if few is not None:
            return _small_cross_entropy(few, target, ignore_index, reduction)
    logits, shape = _classes_last(input, target)
    options = {
        "class_weight": weight,
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }
    if isinstance(target, LazyLogits):
        return _lazy_targets(input, target, weight, reduction, label_smoothing)
    # A copy: the backward pass needs them even if the caller reuses their tensor.
    targets = _targets_last(input, target)
    targets = targets if targets.is_floating_point() else targets.clone()
    found = routing.form(logits.part)
    if found is None or found.kind == "probs":
        loss = _of_rows(logits, targets, **options)
    else:
        like = torch.empty(0, device=logits.device)
        spec = CrossEntropy.checked(logits.lead, logits.shape[-1], like, targets, **options)

        leaf = found.leaf
        # A small part of the rows: there may be many such losses, each with a gradient to keep.
        keep = not isinstance(leaf, Leaf) or 3 * leaf.n_rows >= leaf.root_rows

        def of(env: Env) -> tuple[Tensor, ...]:
            return (leaf.bound(env).cross_entropy(spec, keep_gradients=keep),)

        if torch.is_tensor(targets) and targets.is_floating_point() and targets.requires_grad:
            return _of_rows(logits, targets, **options).reshape(
                shape if reduction == "none" else ()
            )
        (loss,) = routing.answer(of, [logits.part])
    dtype = loss_dtype(input)
    if targets.is_floating_point():
        dtype = torch.promote_types(dtype, targets.dtype)
    return loss.reshape(shape if reduction == "none" else ()).to(dtype)


def _few_logits(logits: LazyLogits, targets: Tensor) -> Leaf | None:
    """Return the head's logits (N, V) if `quick_loss` may know their loss for ids (N,)."""
    if targets.dim() != 1 or targets.numel() > MAX_ROWS or targets.dtype != torch.int64:
        return None
    shape = plain(logits, "shape")
    if len(shape) != 2 or shape[0] != targets.numel() or logits._vdim != 1:
        return None
    node = logits.part
    if not isinstance(node, Leaf) or node.steps or node.dtype != torch.float32:
        return None
    scores = node.root.scores
    if type(scores) is not SweptScores or scores.grad_filter is not None:
        return None
    source = scores.source
    several = source.bias is not None or len(source.hiddens) > 1 or source.row_scale is not None
    quick = scores.max_bytes is None and not several and source.pointwise.is_identity
    return node if quick else None


def _small_cross_entropy(leaf: Leaf, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Return the loss of logits (N, V) by `quick_loss`, or by a sweep where that is refused."""
    root, own = leaf.root, leaf.root.own.tensors()
    if torch.is_grad_enabled():
        targets = targets.clone()  # for a second derivative, even if the caller reuses them

    def of(env: Env) -> tuple[Tensor, ...]:
        loss = None
        if env.stand_in(root) is None:
            hidden, weight = env.root_tensors(root) or own
            loss = quick_loss(hidden, weight, targets, ignore_index, reduction)
        if loss is None:
            lead, like = torch.Size((leaf.n_rows,)), own[0]
            options: Any = {"ignore_index": ignore_index, "reduction": reduction}
            spec = CrossEntropy.checked(lead, leaf.width, like, targets, **options)
            loss = leaf.bound(env).cross_entropy(spec).to(leaf.dtype)
        return (loss,)

    return routing.answer(of, [leaf])[0]


def _classes_last(input: LazyLogits, target: Any) -> tuple[LazyLogits, torch.Size]:
    """Return the logits with the classes last, and the shape of unreduced losses."""
    n = input.dim()
    place = 0 if n == 1 else 1
    if input._vdim != place:
        fitting = (input.shape, (input.shape[0], *input.shape[2:]))  # of probabilities, and of ids
        if n > 2 and input._vdim == n - 1 and tuple(target.shape) not in fitting:
            raise ValueError(
                f"F.cross_entropy takes logits of shape (N, V), (V,) or (N, V, ...), classes "
                f"second; got {tuple(input.shape)} with the vocabulary last and targets "
                f"{tuple(target.shape)}. Use logits.view(-1, {input.shape[-1]}) and "
                "targets.view(-1), or logits.transpose(1, 2)"
            )
        raise NotRecorded
    last = input if place == n - 1 else input.movedim(place, -1)
    return last, input.lead  # type: ignore[return-value]


def _targets_last(input: LazyLogits, target: Any) -> Any:
    """Return targets for logits with the classes last."""
    floating = isinstance(target, Tensor) and target.is_floating_point()
    if floating and target.dim() == input.dim() > 1:
        return target.movedim(1, -1)
    return target


def _of_rows(logits: LazyLogits, targets: Tensor, **options: Any) -> Tensor:
    """Return the loss of a program, from torch's own loss of a few rows at a time."""
    weight, ignore = options["class_weight"], options["ignore_index"]
    vocab = logits.shape[-1]
    soft = targets.is_floating_point()
    flat = targets.reshape(-1, vocab) if soft else targets.reshape(-1)
    if flat.shape[0] != logits.lead.numel():
        raise ValueError(
            f"targets must have shape {tuple(logits.lead)}; got {tuple(targets.shape)}"
        )
    operands = [Operand.of(t, torch.Size()) for t in (weight,) if t is not None]
    target_rows = None
    if soft:
        target_rows = Operand.of(flat, torch.Size((flat.shape[0],)))
        operands.append(target_rows)

    def of(env: Env, tiles: Sequence[Tensor], first: int, last: int) -> tuple[Tensor, ...]:
        weights = None if weight is None else env.tensor(weight)
        here = flat[first:last] if target_rows is None else target_rows.dense(env, first, last)
        rows = F.cross_entropy(
            tiles[0],
            here.to(tiles[0].dtype) if soft else here,
            weights,
            ignore_index=ignore,
            reduction="none",
            label_smoothing=options["label_smoothing"],
        )
        return (rows,)

    (rows,) = over_rows([logits], of, operands=operands)
    if options["reduction"] == "none":
        return rows
    total = rows.double().sum()
    if options["reduction"] == "sum":
        return total.to(rows.dtype)
    if soft:
        return (total / len(rows)).to(rows.dtype)
    counted = (flat != ignore).double()
    if weight is not None:
        counted = counted * weight.double()[torch.where(flat == ignore, 0, flat)]
    return (total / counted.sum()).to(rows.dtype)  # type: ignore[no-any-return]


def _lazy_targets(
    input: Any, target: LazyLogits, weight: Tensor | None, reduction: str, smoothing: float
) -> Any:
    """Compute the cross-entropy with lazy target probabilities: -Σ t log p, by its definition."""
    if input.dim() != 2 or target.shape != input.shape:
        raise NotRecorded
    dtype = loss_dtype(target)
    if dtype != target.dtype:
        input = input.to(dtype)
    wanted: Any = target.to(dtype)
    if smoothing:
        wanted = wanted * (1 - smoothing) + smoothing / input.shape[1]
    if weight is not None:
        wanted = wanted * weight
    rows = reduce("sum", wanted * -input.log_softmax(1), 1)
    if reduction == "none":
        return rows
    return rows.sum() if reduction == "sum" else rows.mean()


def nll_loss(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """Compute F.nll_loss: of lazy log-probabilities, the cross-entropy of their logits."""
    reduction = _legacy(reduction, size_average, reduce)
    found = routing.form(input.part) if isinstance(input, LazyLogits) else None
    if found is not None and found.kind == "log_probs" and not found.terms:
        return cross_entropy(input, target, weight, None, ignore_index, None, reduction)
    if not isinstance(input, LazyLogits):
        raise NotRecorded
    if (dtype := loss_dtype(input)) != input.dtype:
        input = input.to(dtype)
    logits, shape = _classes_last(input, target)
    active = target != ignore_index
    ids = torch.where(active, target, 0)
    picked = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    own = active.to(picked.dtype)
    if weight is not None:
        own = own * weight.to(picked.dtype)[ids]
    rows = -torch.where(active, picked, 0.0) * own
    if reduction == "none":
        return rows.reshape(shape)
    return rows.sum() if reduction == "sum" else rows.sum() / own.sum()


def kl_div(
    input: Any,
    target: Any,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    """Compute F.kl_div: KL(target ‖ input) if both are distributions, else its definition."""
    reduction = _legacy(reduction, size_average, reduce)
    rows = None if reduction == "none" else _kl_rows(input, target, log_target=log_target)
    if rows is None:
        terms = record(_kl_terms, (input, target, log_target), {})
        return _reduced(terms, reduction, batch=input.shape[:1].numel())
    if reduction == "sum":
        return rows.sum()
    shape = input.shape
    return rows.sum() / (shape[0] if reduction == "batchmean" else shape.numel())


def _kl_terms(input: Tensor, target: Tensor, log_target: bool) -> Tensor:
    return F.kl_div(input, target, reduction="none", log_target=log_target)


def _kl_rows(input: Any, target: Any, *, log_target: bool) -> Tensor | None:
    """Return KL of each row, (N,), if both are distributions of heads."""
    if not (isinstance(input, LazyLogits) and isinstance(target, LazyLogits)):
        return None
    q, p = routing.form(input.part), routing.form(target.part)
    wanted = "log_probs" if log_target else "probs"
    if q is None or p is None or q.kind != "log_probs" or p.kind != wanted or p.terms or q.terms:
        return None
    if input.shape != target.shape or input._vdim != target._vdim:
        return None

    dtype = loss_dtype(input)

    def of(env: Env) -> tuple[Tensor, ...]:
        mine, theirs = p.leaf.bound(env), q.leaf.bound(env)
        return (mine.divergence(theirs, "kl").to(dtype),)

    return routing.answer(of, [target.part, input.part])[0]


def _reduced(terms: Any, reduction: str, batch: int = 1) -> Any:
    if reduction == "none":
        return terms
    if reduction == "batchmean":
        return reduce("sum", terms) / batch
    return reduce(reduction, terms)


def pointwise_loss(name: str) -> Any:
    """Return a handler for a loss that is a function of single entries."""
    function = getattr(F, name)

    def entries(*args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = function(*args, reduction="none", **kwargs)
        return made

    entries.__name__ = name

    def handler(
        input: Any,
        target: Any,
        *args: Any,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        **kwargs: Any,
    ) -> Any:
        if args and name not in ("binary_cross_entropy_with_logits", "binary_cross_entropy"):
            raise NotRecorded
        if args:
            kwargs["weight"] = args[0]
        if not isinstance(target, Tensor):
            raise NotRecorded
        # Each loss keeps the shape of its input, so both must have it.
        if input.shape != target.shape:
            raise NotRecorded
        if name == "l1_loss":
            kwargs.setdefault("weight", _weight_of_l1_loss())
        given = {k: v for k, v in kwargs.items() if v is not None}
        if "weight" in given and name in ("l1_loss", "mse_loss"):
            off = input - target
            error = off.abs() if name == "l1_loss" else off.square()
            return _weighted(error, given["weight"], _legacy(reduction, size_average, reduce))
        return _reduced(
            record(entries, (input, target), given), _legacy(reduction, size_average, reduce)
        )

    return handler


def _weighted(error: Tensor, weight: Tensor, reduction: str) -> Tensor:
    """Return weighted errors, their sum, or their mean over the weights."""
    if weight.shape != error.shape:
        raise ValueError("Weights and input must have the same size.")
    error = error * weight
    if reduction == "none":
        return error
    return error.sum() / weight.sum() if reduction == "mean" else error.sum()


def _weight_of_l1_loss() -> Tensor | None:
    """Return the weight of the call of `F.l1_loss` that led here, which torch does not pass on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("weight")


POINTWISE_LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "huber_loss",
    "l1_loss",
    "mse_loss",
    "smooth_l1_loss",
)
