"""`query`, and the same on a source.

In:  hidden (..., D), weight (V, D), ids (...) or (..., K), and which questions are asked.
Out: `Answers`, one field per question.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lmhead import checks
from lmhead.functional.inputs import make_source, result_dtype
from lmhead.sweep import Pointwise, Questions, Source, row_answers
from lmhead.sweep.eager import eager

if TYPE_CHECKING:
    from lmhead.logits import LazyLogits


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
    questions = Questions(
        source,
        other=kl_to,
        entropy=entropy,
        top_k=max(top_k, int(argmax)),
        ids=id_rows("log_prob", log_prob, lead, source.vocab, source.hiddens[0]),
        rank_ids=id_rows("rank", rank, lead, source.vocab, source.hiddens[0]),
        max_bytes=max_bytes,
    )
    # Ids, ranks and the values at the top have no gradient.
    smooth = log_prob is not None or kl_to is not None or entropy or logsumexp
    with torch.set_grad_enabled(smooth and torch.is_grad_enabled()):
        answers, decisions = row_answers(questions)

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
