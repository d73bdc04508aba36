"""`FactoredScores`: log-probabilities of a head whose distribution is a product of smaller ones.

A factored distribution is normalised, so its log-probabilities can be used as logits: their
logsumexp is 0, and log_softmax changes nothing. Operations after which they are not (a temperature,
soft-capping) need all tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from lmhead.scores import RowAnswers, Rows, Scores, TopRows
from lmhead.scores.protocol import by_rows, kl_by_rows, mean_finite
from lmhead.scores.row_loss import CrossEntropy
from lmhead.sweep.source import check_numbers
from lmhead.vocab.factors import Factors, Uniform


@dataclass(frozen=True)
class FactoredScores(Scores):
    """Rows of a factored head: log-probabilities from hidden states (N, D)."""

    factors: Factors
    hidden: Tensor
    normalised = True

    @property
    def max_bytes(self) -> int | None:  # type: ignore[override]
        """Bound on temporary memory; None for 128 MiB."""
        return self.factors.max_bytes

    def limited(self, max_bytes: int | None) -> Self:
        """Return the scores with another bound on temporary memory."""
        if max_bytes is None or max_bytes == self.factors.max_bytes:
            return self
        return type(self)(self.factors.bounded(max_bytes), self.hidden)

    @property
    def n_rows(self) -> int:
        """N."""
        return len(self.hidden)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.factors.vocab

    @property
    def dtype(self) -> torch.dtype:
        """float64 for float64 hidden states, else float32."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    @property
    def device(self) -> torch.device:
        """The device of the hidden states."""
        return self.hidden.device

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the hidden states and all tensors of the head."""
        return (self.hidden, *self.factors.tensors())

    def tensor_names(self) -> tuple[str, ...]:
        """Return a name for each of `tensors()`."""
        return ("hidden state", *("weight",) * len(self.factors.tensors()))

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """Return the same scores on other tensors."""
        pairs = zip(self.factors.tensors(), tensors[1:], strict=True)
        table = {id(old): new for old, new in pairs}
        return type(self)(self.factors.map(lambda t: table.get(id(t), t)), tensors[0])

    def select(self, rows: Rows) -> Self:
        """Return some of the rows."""
        return type(self)(self.factors, self.hidden[rows])

    # Questions -----------------------------------------------------------------------------------

    def answer(
        self,
        *,
        logsumexp: bool = False,  # noqa: ARG002
        entropy: bool = False,
        picked: Tensor | None = None,
        rank: Tensor | None = None,
        top_k: int = 0,
        kl_to: Scores | None = None,
        log_sum_sq: bool = False,
        mean_logit: bool = False,
    ) -> RowAnswers:
        """Answer by the factors; other answers read all tokens of a few rows at a time."""
        check_numbers(self.device)
        factors, hidden = self.factors, self.hidden
        top = factors.top(hidden, top_k) if top_k else (None, None)
        return RowAnswers(
            self._lse(),
            entropy=factors.entropy(hidden).double() if entropy else None,
            picked=None if picked is None else factors.log_prob(hidden, picked).double(),
            kl=None if kl_to is None else kl_by_rows(self, kl_to),
            log_sum_sq=by_rows(lambda z: (2 * z).logsumexp(1), self) if log_sum_sq else None,
            mean_logit=by_rows(mean_finite, self) if mean_logit else None,
            top_values=top[0],
            top_ids=top[1],
            ranks=None if rank is None else _ranks(factors, hidden, rank),
        )

    def _lse(self) -> Tensor:
        """Return the log of the sum of all probabilities: 0, or NaN for a NaN hidden state."""
        finite = self.hidden.detach().isfinite().all(-1)
        lse = torch.where(finite, 0.0, math.nan).double()
        tensors = self.tensors()
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
            return lse
        if torch._C._are_functorch_transforms_active():
            return lse + 0.0 * self.hidden.sum(-1)
        constant: Tensor = _Constant.apply(lse, *tensors)  # type: ignore[no-untyped-call]
        return constant

    def cross_entropy(self, loss: CrossEntropy, *, keep_gradients: bool = True) -> Tensor:  # noqa: ARG002
        """Return the loss, from the factors of the targets alone."""
        check_numbers(self.device)
        return self.factors.cross_entropy(self.hidden, loss)

    def columns(self, ids: Tensor) -> Tensor:
        """Return the log-probabilities of token ids (K,): (N, K)."""
        if 2 * len(ids) > self.vocab_size:
            log_probs = self.factors.log_probs
            return self.factors.by_blocks(lambda h: log_probs(h)[:, ids], self.hidden)
        return self.factors.log_prob(self.hidden, ids[None].expand(self.n_rows, -1))

    def dense(self) -> Tensor:
        """Return all log-probabilities (N, V)."""
        check_numbers(self.device)
        return self.factors.log_probs(self.hidden)

    def explain(self) -> list[str]:
        """Return what questions cost."""
        return [f"  of {self.factors.name}", *self.factors.explain(self.n_rows)]

    # Decoding ------------------------------------------------------------------------------------

    @torch.no_grad()
    def top(self, k: int, *, lse: bool = True) -> TopRows:  # noqa: ARG002
        """Return the k largest log-probabilities, their ids, and log Σ exp, which is 0."""
        check_numbers(self.device)
        values, ids = self.factors.top(self.hidden, k)
        return TopRows(values, ids, torch.where(ids[:, 0] < 0, math.nan, 0.0).double())

    @torch.no_grad()
    def at(self, ids: Tensor) -> Tensor:
        """Return the log-probabilities of token ids (N, K), each row computed by itself."""
        pairs = zip(self.hidden, ids, strict=True)
        rows = [self.factors.log_prob(h[None], i[None]) for h, i in pairs]
        return torch.cat(rows).double() if rows else ids.double()

    @torch.no_grad()
    def row_logits(self) -> Tensor:
        """Return all log-probabilities (N, V), each row computed by itself."""
        rows = [self.factors.log_probs(h[None]) for h in self.hidden]
        return torch.cat(rows) if rows else self.factors.log_probs(self.hidden)

    @torch.no_grad()
    def draw(self, uniform: Uniform) -> Tensor:
        """Return a token for each row, (N,), from the random numbers of its decisions."""
        if bool(self._lse().isnan().any()):
            raise ValueError("hidden must be finite to draw a token; got NaN or inf")
        return self.factors.draw(self.hidden, uniform)


class _Constant(torch.autograd.Function):
    """A function of some tensors that is the same for all of them: its gradients are 0."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *tensors: Tensor) -> Tensor:  # noqa: ARG004
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: ARG004
        return (None,) * len(ctx.needs_input_grad)


@torch.no_grad()
def _ranks(factors: Factors, hidden: Tensor, ids: Tensor) -> Tensor:
    """Return the number of tokens before each of `ids` (N, K): by log-probability, then by id."""
    out = torch.empty_like(ids)
    token_ids = torch.arange(factors.vocab, device=ids.device)
    start = 0
    for rows in factors.blocks(hidden):
        part = slice(start, start + len(rows))
        log_p = factors.log_probs(rows, exact=True)
        given_log_p = log_p.gather(1, ids[part])
        for k in range(ids.shape[1]):
            given, id = given_log_p[:, k : k + 1], ids[part][:, k : k + 1]
            before = (log_p > given) | ((log_p == given) & (token_ids < id))
            out[part][:, k] = before.sum(1)
        out[part] = out[part].masked_fill(log_p.isnan().any(1, keepdim=True), -1)
        start += len(rows)
    return out
