"""The protocol `Scores`, the form of its answers, and answers from dense rows.

A new kind of head is one new subclass that passes the contract suite (tests/contract).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import Self

from lmhead.scores.row_loss import CrossEntropy

DEFAULT_MAX_BYTES = 128 * 2**20

Rows = slice | Tensor
"""Which rows: a range, or their indices (int64)."""


class TopRows(NamedTuple):
    """The k largest logits of each row, largest first, lowest id first among equals; float64."""

    values: Tensor  # (N, k)
    ids: Tensor  # (N, k); -1 in a row that holds a NaN or only -inf
    lse: Any  # (N,), log Σ exp over the whole vocabulary; None if it was not asked for


@dataclass(frozen=True)
class RowAnswers:
    """Answers per row in float64; a field that was not asked for is None.

    `lse` is always present. All but the last three are differentiable.
    """

    lse: Tensor  # (N,)
    entropy: Any = None  # (N,)
    picked: Any = None  # (N, K), logits at the given ids
    kl: Any = None  # (N,), KL(self ‖ other)
    log_sum_sq: Any = None  # (N,), log Σ p²
    mean_logit: Any = None  # (N,), mean of the logits that are not -inf
    top_values: Any = None  # (N, k)
    top_ids: Any = None  # (N, k)
    ranks: Any = None  # (N, K), number of tokens ordered before each given id


class Tile:
    """Dense rows as the start of an autograd graph of their own.

    Attributes:
        value: (B, V).
        inputs: the tensors of the graph to differentiate by.
    """

    def __init__(self, scores: Scores, rows: Rows) -> None:
        tensors = [t.detach().requires_grad_(t.requires_grad) for t in scores.tensors()]
        with torch.enable_grad():
            self.value = scores.with_tensors(tensors).select(rows).dense()
        self.indices = [i for i, t in enumerate(tensors) if t.requires_grad]
        self.inputs = [tensors[i] for i in self.indices]

    def add(self, grads: Sequence[Tensor | None], into: list[Tensor | None]) -> None:
        """Add the gradients of `inputs` to those of all tensors of the scores."""
        for index, grad in zip(self.indices, grads, strict=True):
            old = into[index]
            if grad is not None:
                wide = grad.float() if grad.dtype.itemsize == 2 else grad
                into[index] = wide if old is None else old.add_(wide)


class Scores(ABC):
    """N rows of V logits that are not built.

    A differentiable function of `tensors()`. Answers are float64. Methods that decode (`top`,
    `at`, `row_logits`) take no part in autograd, and their numbers do not depend on which other
    rows are present.

    Attributes:
        max_bytes: bound on temporary memory; None for the default.
        normalised: True if the logits are log-probabilities already (logsumexp is 0).
    """

    max_bytes: int | None
    normalised: bool = False

    # Shape ---------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def n_rows(self) -> int:
        """N."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """V."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype in which logits are computed: float32, or float64."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of all tensors."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors that may require a gradient, in a fixed order."""

    @abstractmethod
    def tensor_names(self) -> tuple[str, ...]:
        """Return a name for each of `tensors()`, for error messages."""

    def watched(self) -> tuple[Tensor, ...]:
        """Return the tensors whose version counters show in-place changes of `tensors()`."""
        return self.tensors()

    @abstractmethod
    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """Return the same scores on other tensors, in the order of `tensors()`."""

    @abstractmethod
    def select(self, rows: Rows) -> Self:
        """Return some of the rows."""

    def limited(self, max_bytes: int | None) -> Self:
        """Return the scores with another bound on temporary memory."""
        return replace(self, max_bytes=max_bytes)  # type: ignore[type-var]

    # Questions -----------------------------------------------------------------------------------

    @abstractmethod
    def answer(
        self,
        *,
        logsumexp: bool = False,
        entropy: bool = False,
        picked: Tensor | None = None,
        rank: Tensor | None = None,
        top_k: int = 0,
        kl_to: Scores | None = None,
        log_sum_sq: bool = False,
        mean_logit: bool = False,
    ) -> RowAnswers:
        """Answer any set of questions at once.

        Args:
            logsumexp: a gradient of `lse` is wanted (its value is always there).
            entropy: -Σ p log p of each row.
            picked: ids (N, K) whose logits are wanted.
            rank: ids (N, K) whose place in the order is wanted; 0 is the argmax.
            top_k: number of largest logits wanted.
            kl_to: q of KL(p ‖ q), scores of the same shape.
            log_sum_sq: log Σ p² of each row.
            mean_logit: mean of each row's logits, without those that are -inf.
        """

    def divergence(self, other: Scores, kind: str, beta: float = 0.5) -> Tensor:
        """Return a divergence of each row from that of other scores: (N,) in float64.

        Args:
            other: q; the scores themselves are p.
            kind: "kl" (p ‖ q), "reverse_kl", "jsd" or "tvd".
            beta: weight of p in the mixture of "jsd".
        """
        if kind == "kl":
            return self.answer(kl_to=other).kl  # type: ignore[no-any-return]
        if kind == "reverse_kl":
            return other.answer(kl_to=self).kl  # type: ignore[no-any-return]
        return by_rows(lambda p, q: divergence_of(p, q, kind, beta), self, other)

    @abstractmethod
    def cross_entropy(self, loss: CrossEntropy, *, keep_gradients: bool = True) -> Tensor:
        """Return the reduced loss, or (N,) for reduction="none"; float64.

        Args:
            loss: targets and options.
            keep_gradients: gradients may be computed together with the value and kept until the
                backward pass; otherwise that pass computes them, for one more product.
        """

    @abstractmethod
    def columns(self, ids: Tensor) -> Tensor:
        """Return the logits of token ids (K,): (N, K), differentiable."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return all logits (N, V), by plain differentiable operations: the definition."""

    def tile(self, rows: Rows) -> Tile:
        """Return some dense rows, to be differentiated by the caller."""
        return Tile(self, rows)

    @abstractmethod
    def explain(self) -> list[str]:
        """Return one line per kind of question: what it costs."""

    # Decoding ------------------------------------------------------------------------------------

    @abstractmethod
    def top(self, k: int, *, lse: bool = True) -> TopRows:
        """Return the k largest logits, their ids and, if asked for, the log-sum-exp."""

    @abstractmethod
    def at(self, ids: Tensor) -> Tensor:
        """Return the logits of token ids (N, K) in float64."""

    @abstractmethod
    def row_logits(self) -> Tensor:
        """Return all logits (N, V) in `dtype`; each row is the same whatever the other rows are."""

    # Operations that return scores of the same class; None if the class cannot represent them ----

    def times(self, factor: float) -> Self | None:  # noqa: ARG002
        """Return the scores times a number."""
        return None

    def plus(self, term: float) -> Self | None:  # noqa: ARG002
        """Return the scores plus a number."""
        return None

    def tanh(self) -> Self | None:
        """Return tanh of the scores."""
        return None

    def plus_bias(self, bias: Tensor) -> Self | None:  # noqa: ARG002
        """Return the scores plus a vector (V,)."""
        return None

    def times_rows(self, factor: Tensor) -> Self | None:  # noqa: ARG002
        """Return the scores times a factor per row, (N, 1) or ()."""
        return None

    def mask(self, mask: Tensor) -> Self | None:  # noqa: ARG002
        """Return the scores with -inf at the tokens of a mask (V,)."""
        return None

    def token_range(self, tokens: slice) -> Self | None:  # noqa: ARG002
        """Return the scores of a range of the vocabulary."""
        return None


# Answers from dense rows, a few at a time, in bounded memory --------------------------------------


def kl_by_rows(p: Scores, q: Scores) -> Tensor:
    """Return KL(p ‖ q) of each row, (N,) in float64, from dense rows."""
    return by_rows(lambda z_p, z_q: divergence_of(z_p, z_q, "kl"), p, q)


def divergence_of(z_p: Tensor, z_q: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """Return a divergence of each row of two tensors of logits (N, V), by its definition: (N,).

    kl: Σ p log(p/q); reverse_kl: Σ q log(q/p); tvd: Σ |p - q| / 2;
    jsd: β KL(p ‖ m) + (1-β) KL(q ‖ m), with m = β p + (1-β) q.
    """
    if kind == "reverse_kl":
        return divergence_of(z_q, z_p, "kl")
    log_p, log_q = z_p.log_softmax(1), z_q.log_softmax(1)
    if kind == "kl":
        return _kl(log_p, log_q)
    if kind == "tvd":
        return (log_p.exp() - log_q.exp()).abs().sum(1) / 2
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    masked = log_p == -math.inf  # 0 log 0 = 0; filled before the difference: no NaN gradient
    log_p = log_p.masked_fill(masked, 0.0)
    gap = log_p - log_q.masked_fill(masked, 0.0)
    return (log_p.exp().masked_fill(masked, 0.0) * gap).sum(1)


def by_rows(function: Callable[..., Tensor], *scores: Scores) -> Tensor:
    """Return `function` of the dense float64 rows of each of the scores, (N,)."""
    first = scores[0]
    size = max(1, (first.max_bytes or DEFAULT_MAX_BYTES) // (64 * first.vocab_size))

    def block(start: int) -> Tensor:
        rows = slice(start, start + size)
        return function(*(s.select(rows).dense().double() for s in scores))

    if first.n_rows == 0:
        return block(0)
    return torch.cat([recomputed(lambda i=i: block(i)) for i in range(0, first.n_rows, size)])


def mean_finite(z: Tensor) -> Tensor:
    """Return the mean of each row of z (N, V) without its -inf."""
    masked = z == -torch.inf
    return z.masked_fill(masked, 0.0).sum(1) / (~masked).sum(1)


def recomputed(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Return `function(*args)`, which the backward pass computes again instead of keeping it."""
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return function(*args)
    result: Tensor = checkpoint(function, *args, use_reentrant=False)
    return result
