"""`linear_cross_entropy` and `query`: loss and answers from hidden states and a weight.

In:  tensors, hidden (..., D), weight (V, D), targets (...), and options.
Out: a loss, or `Answers`; no (..., V) tensor is made on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from lmhead import checks
from lmhead.loss import class_targets, probability_targets, reduce
from lmhead.sweep import GradFilter, Pointwise, Questions, Source, accumulation_dtype, row_answers
from lmhead.sweep.eager import eager

if TYPE_CHECKING:
    from lmhead.logits import LazyLogits

Reduction = Literal["mean", "sum", "none"]


@eager
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    z_loss: float = 0.0,
    num_items: int | Tensor | None = None,
    grad_filter: float | GradFilter | None = None,
    max_bytes: int | None = None,
) -> Tensor:
    """Cross-entropy of a linear layer's logits, which are never built.

    Equivalent to: F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, ...)

    Args:
        hidden: (..., D), float32, float64, bfloat16 or float16.
        weight: (V, D), of the same type. Half precisions are multiplied and summed in float32.
        targets: ids (...), or probabilities (..., V).
        bias: (V,); -inf masks a word: probability 0, no gradient, no share of label smoothing.
        class_weight: (V,), the weight of each target word.
        ignore_index: tokens with this target count for nothing and cost nothing.
        reduction: "mean" over the tokens that count, "sum", or "none" for (...).
        label_smoothing: ε in [0, 1]; ε of the target's mass is spread evenly over the words.
        softcap: logits become softcap · tanh(scale · x / softcap).
        scale: a factor of the logits, before soft-capping.
        z_loss: adds z_loss · logsumexp(logits)² to each token's loss.
        num_items: what "mean" divides by, for gradient accumulation: the tokens that count in all
            micro-batches together.
        grad_filter: τ in [0, 1), an approximation: the words that carry the last τ of the
            probability mass get their gradient from one rank-one term. About twice as fast on a
            trained model, the loss itself is exact. A `GradFilter` reports its error.
        max_bytes: bound on temporary memory; None for 128 MiB.

    Returns:
        A number, or (...) for "none"; float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: an argument of the wrong shape, type or range.

    With gradients and a reduction it costs three matrix products in all (four where `max_bytes`
    does not hold 32 tokens x V). The gradients are made in the forward pass, so call it under
    `torch.no_grad()` where they are not needed.

    >>> hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(50, 8)
    >>> targets = torch.tensor([3, 1, 4, -100, 5, 9])
    >>> loss = linear_cross_entropy(hidden, weight, targets)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(hidden @ weight.T, targets))
    True
    """
    checks.check_map(softcap, scale)
    source = make_source(hidden, weight, bias, Pointwise.of(softcap=softcap, scale=scale))
    return cross_entropy(
        source,
        hidden.shape[:-1],
        targets,
        class_weight=class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        num_items=num_items,
        grad_filter=grad_filter,
        max_bytes=max_bytes,
    ).to(result_dtype(hidden))


def cross_entropy(
    source: Source,
    lead: torch.Size,
    targets: Tensor,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_items: int | Tensor | None = None,
    grad_filter: float | GradFilter | None = None,
    max_bytes: int | None = None,
) -> Tensor:
    """`linear_cross_entropy` on a source whose rows have the shape `lead`; float64."""
    checks.check_number("z_loss", z_loss, low=0.0)
    checks.check_max_bytes(max_bytes)
    gradient_filter = as_filter(grad_filter)
    check_loss(
        lead,
        source.vocab,
        source.hiddens[0],
        targets,
        class_weight=class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    if num_items is not None and reduction != "mean":
        raise ValueError(
            f"num_items is what reduction='mean' divides by; got reduction={reduction!r}"
        )
    if targets.is_floating_point():
        weights = probability_targets(
            source,
            targets.reshape(-1, source.vocab),
            class_weight=class_weight,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            grad_filter=gradient_filter,
            max_bytes=max_bytes,
        )
    else:
        weights = class_targets(
            source,
            targets.reshape(-1).long(),
            ignore_index=ignore_index,
            class_weight=class_weight,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            grad_filter=gradient_filter,
            max_bytes=max_bytes,
        )
    return reduce(weights, reduction, num_items).reshape(lead if reduction == "none" else ())


def check_loss(
    lead: torch.Size,
    vocab: int,
    hidden: Tensor,
    targets: Tensor,
    *,
    class_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> None:
    """Targets and options of a cross-entropy over logits (*lead, vocab)."""
    checks.check_entries("class_weight", class_weight, vocab, hidden)
    checks.check_number("label_smoothing", label_smoothing, low=0.0, high=1.0)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none'; got {reduction!r}")
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets must be a torch.Tensor; got {type(targets).__name__}")
    checks.check_device("targets", targets, "hidden", hidden)
    if targets.is_floating_point():
        _check_shape("targets", targets, (*lead, vocab), "probabilities (..., V)")
    else:
        _check_shape("targets", targets, tuple(lead), "ids (...) for hidden (..., D)")
        checks.check_ids("targets", targets, vocab, ignore_index=ignore_index)


class TopK(NamedTuple):
    """The k largest logits of each token, largest first, lowest id first among equals."""

    values: Tensor
    indices: Tensor


@dataclass(frozen=True)
class Answers:
    """What `query` was asked, one field per question; None where it was not.

    Attributes:
        log_prob: log p of the given ids, with the shape of the ids.
        rank: how many words come before each given id (0 is the argmax), int64.
        entropy: of the distribution, in nats, (...).
        logsumexp: of the logits, (...).
        argmax: the id of the largest logit, (...), int64.
        top_k: `TopK(values, indices)`, (..., k) each; values are logits.
        kl: KL(p ‖ q) in nats, (...).

    Ids and ranks follow the float64 logits; they are -1 for a token whose logits hold a NaN or are
    all -inf.
    """

    log_prob: Tensor | None = None
    rank: Tensor | None = None
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None
    argmax: Tensor | None = None
    top_k: TopK | None = None
    kl: Tensor | None = None


@eager
def query(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    log_prob: Tensor | None = None,
    rank: Tensor | None = None,
    entropy: bool = False,
    logsumexp: bool = False,
    argmax: bool = False,
    top_k: int = 0,
    kl_to: LazyLogits | tuple[Tensor, Tensor] | None = None,
    max_bytes: int | None = None,
) -> Answers:
    """Any set of questions about the next-word distribution, answered by one sweep.

    Equivalent to: z = F.linear(hidden, weight, bias).float(), then z.log_softmax(-1).gather(...),
    z.argmax(-1), z.topk(k), torch.distributions.Categorical(logits=z).entropy(), and so on.

    Args:
        hidden: (..., D).
        weight: (V, D).
        bias: (V,); -inf masks a word.
        softcap: logits become softcap · tanh(scale · x / softcap).
        scale: a factor of the logits, before soft-capping.
        log_prob: ids (...) or (..., K) whose log-probability is asked.
        rank: ids (...) or (..., K) whose place in the order is asked.
        entropy: ask for the entropy.
        logsumexp: ask for the log of the sum of exp(logits).
        argmax: ask for the most probable word.
        top_k: ask for the k largest logits and their ids.
        kl_to: ask for KL(p ‖ q); q is a `LazyLogits` of the same shape, or (hidden, weight).
        max_bytes: bound on temporary memory; None for 128 MiB.

    Returns:
        `Answers`. log_prob, entropy, logsumexp and kl are differentiable, together.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, type or range.

    >>> hidden, weight = torch.randn(2, 5, 8), torch.randn(50, 8)
    >>> ids = torch.randint(50, (2, 5))
    >>> answers = query(hidden, weight, log_prob=ids, entropy=True, top_k=3)
    >>> answers.log_prob.shape, answers.entropy.shape, answers.top_k.indices.shape
    (torch.Size([2, 5]), torch.Size([2, 5]), torch.Size([2, 5, 3]))
    """
    checks.check_map(softcap, scale)
    source = make_source(hidden, weight, bias, Pointwise.of(softcap=softcap, scale=scale))
    other = None
    if isinstance(kl_to, tuple):
        if len(kl_to) != 2:
            raise ValueError(f"kl_to must be a pair (hidden, weight); got {len(kl_to)} entries")
        other_hidden, other_weight = kl_to
        checks.check_hidden_and_weight(
            other_hidden, other_weight, names=("kl_to hidden", "kl_to weight")
        )
        other = make_source(other_hidden, other_weight, None, Pointwise())
        other_lead = other_hidden.shape[:-1]
    elif kl_to is not None:
        if not hasattr(kl_to, "source"):
            raise TypeError(
                f"kl_to must be a LazyLogits or a pair (hidden, weight); got {type(kl_to).__name__}"
            )
        other, other_lead = kl_to.source(), kl_to.shape[:-1]
    if other is not None and (*other_lead, other.vocab) != (*hidden.shape[:-1], source.vocab):
        raise ValueError(
            f"kl_to must have logits of shape {(*hidden.shape[:-1], source.vocab)}; "
            f"got {(*other_lead, other.vocab)}"
        )
    return ask(
        source,
        hidden.shape[:-1],
        result_dtype(hidden),
        log_prob=log_prob,
        rank=rank,
        entropy=entropy,
        logsumexp=logsumexp,
        argmax=argmax,
        top_k=top_k,
        kl_to=other,
        max_bytes=max_bytes,
    )


def ask(
    source: Source,
    lead: torch.Size,
    dtype: torch.dtype,
    *,
    log_prob: Tensor | None = None,
    rank: Tensor | None = None,
    entropy: bool = False,
    logsumexp: bool = False,
    argmax: bool = False,
    top_k: int = 0,
    kl_to: Source | None = None,
    max_bytes: int | None = None,
) -> Answers:
    """`query` on a source whose rows have the shape `lead`; answers in `dtype`."""
    checks.check_whole("top_k", top_k, low=0, high=source.vocab)
    checks.check_max_bytes(max_bytes)
    if kl_to is not None and kl_to.dtype != source.dtype:
        raise TypeError(f"kl_to must be computed in {source.dtype}; got {kl_to.dtype}")
    answers, decisions = row_answers(
        Questions(
            source,
            other=kl_to,
            entropy=entropy,
            top_k=max(top_k, int(argmax)),
            ids=id_rows("log_prob", log_prob, lead, source.vocab, source.hiddens[0]),
            rank_ids=id_rows("rank", rank, lead, source.vocab, source.hiddens[0]),
            max_bytes=max_bytes,
        )
    )

    def shaped(answer: Tensor | None) -> Tensor | None:
        return None if answer is None else answer.reshape(lead).to(dtype)

    assert answers.lse is not None
    log_probs = ranks = top = best = None
    if log_prob is not None:
        assert answers.picked is not None
        log_probs = (answers.picked - answers.lse[:, None]).reshape(log_prob.shape).to(dtype)
    if rank is not None:
        assert decisions.ranks is not None
        ranks = decisions.ranks.reshape(rank.shape)
    if decisions.top_ids is not None and decisions.top_values is not None:
        best = decisions.top_ids[:, 0].reshape(lead) if argmax else None
        if top_k:
            values = decisions.top_values.reshape(*lead, top_k).to(dtype)
            top = TopK(values, decisions.top_ids.reshape(*lead, top_k))
    return Answers(
        log_prob=log_probs,
        rank=ranks,
        entropy=shaped(answers.entropy),
        logsumexp=shaped(answers.lse) if logsumexp else None,
        argmax=best,
        top_k=top,
        kl=shaped(answers.kl),
    )


def as_filter(grad_filter: float | GradFilter | None) -> GradFilter | None:
    """A gradient filter from its tail mass; None for exact gradients."""
    tail_mass = grad_filter.tail_mass if isinstance(grad_filter, GradFilter) else grad_filter
    if tail_mass is None:
        return None
    checks.check_number("grad_filter", tail_mass, low=0.0, high=1.0)
    if tail_mass == 1.0:
        raise ValueError("grad_filter must be below 1; got 1.0, which would keep no word")
    if tail_mass == 0.0:
        return None
    return grad_filter if isinstance(grad_filter, GradFilter) else GradFilter(tail_mass)


def make_source(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, pointwise: Pointwise
) -> Source:
    """Check the tensors of a linear layer and take them as autocast would."""
    checks.check_hidden_and_weight(*autocast(hidden, weight))
    checks.check_vector("bias", bias, weight)
    hidden, weight = autocast(hidden, weight)
    return Source((hidden.reshape(-1, hidden.shape[-1]),), (weight,), bias, pointwise)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as `F.linear` would take them: in autocast's type where that is on."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype)
        if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
        else t
        for t in tensors
    )


def result_dtype(hidden: Tensor) -> torch.dtype:
    """float64 for float64, else float32: as autocast has it for losses."""
    return accumulation_dtype(hidden.dtype)


def id_rows(
    name: str, ids: Tensor | None, lead: torch.Size, vocab: int, hidden: Tensor
) -> Tensor | None:
    """Ids (...) or (..., K) as (N, K), for logits (*lead, vocab)."""
    if ids is None:
        return None
    checks.check_ids(name, ids, vocab)
    checks.check_device(name, ids, "hidden", hidden)
    if ids.shape[: len(lead)] != lead or ids.dim() > len(lead) + 1:
        raise ValueError(
            f"{name} must have shape {tuple(lead)} or {(*lead, 'K')}; got {tuple(ids.shape)}"
        )
    k = 1 if ids.dim() == len(lead) else ids.shape[-1]
    return ids.reshape(lead.numel(), k).long()


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, {meaning}; got {tuple(tensor.shape)}")
