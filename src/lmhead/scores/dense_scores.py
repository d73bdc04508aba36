"""`DenseScores`: logits that exist as a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from lmhead.scores.protocol import RowAnswers, Rows, Scores, TopRows, mean_finite
from lmhead.scores.row_loss import CrossEntropy


@dataclass(frozen=True)
class DenseScores(Scores):
    """The rows of a tensor (N, V)."""

    logits: Tensor
    max_bytes: int | None = None

    @property
    def n_rows(self) -> int:
        """N."""
        return self.logits.shape[0]

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.logits.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """float64 for float64 logits, else float32."""
        return torch.float64 if self.logits.dtype == torch.float64 else torch.float32

    @property
    def device(self) -> torch.device:
        """The device of the tensor."""
        return self.logits.device

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the logits."""
        return (self.logits,)

    def tensor_names(self) -> tuple[str, ...]:
        """Return a name for each of `tensors()`."""
        return ("logits",)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """Return the same on another tensor."""
        return type(self)(tensors[0], self.max_bytes)

    def select(self, rows: Rows) -> Self:
        """Return some of the rows."""
        return type(self)(self.logits[rows], self.max_bytes)

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
        """Answer by the definitions, in float64."""
        z = self.logits.double()
        lse = z.logsumexp(1)
        row_entropy = kl = values = ids = ranks = None
        if entropy or kl_to is not None:
            log_p = z - lse[:, None]
            log_p = log_p.masked_fill(log_p == -math.inf, 0.0)
            p = torch.where(z == -math.inf, 0.0, log_p.exp())
            row_entropy = -(p * log_p).sum(1)
        if kl_to is not None and row_entropy is not None:
            log_q = kl_to.dense().double().log_softmax(1)
            kl = -row_entropy - (p * log_q).masked_fill(p == 0, 0.0).sum(1)
        with torch.no_grad():
            unordered = ~(lse > -math.inf)[:, None]
            if top_k:
                values, ids = z.detach().sort(dim=1, descending=True, stable=True)
                values, ids = values[:, :top_k], ids[:, :top_k].masked_fill(unordered, -1)
            if rank is not None:
                given_logits = z.gather(1, rank)
                token_ids = torch.arange(self.vocab_size, device=self.device)
                ranks = torch.stack(
                    [
                        ((z > m[:, None]) | ((z == m[:, None]) & (token_ids < r[:, None]))).sum(1)
                        for m, r in zip(given_logits.unbind(1), rank.unbind(1), strict=True)
                    ],
                    1,
                ).masked_fill(unordered, -1)
        return RowAnswers(
            lse=lse,
            entropy=row_entropy if entropy else None,
            picked=None if picked is None else z.gather(1, picked),
            kl=kl,
            log_sum_sq=(2 * z).logsumexp(1) - 2 * lse if log_sum_sq else None,
            mean_logit=mean_finite(z) if mean_logit else None,
            top_values=values,
            top_ids=ids,
            ranks=ranks,
        )

    def cross_entropy(self, loss: CrossEntropy, *, keep_gradients: bool = True) -> Tensor:  # noqa: ARG002
        """Return the loss by its definition."""
        return loss.of_dense(self.logits)

    def columns(self, ids: Tensor) -> Tensor:
        """Return the logits of token ids (K,): (N, K)."""
        return self.logits[:, ids]

    def dense(self) -> Tensor:
        """Return the tensor."""
        return self.logits

    def explain(self) -> list[str]:
        """Return what questions cost."""
        return [f"  dense                   {self.logits.nbytes:,} bytes are allocated already"]

    def top(self, k: int, *, lse: bool = True) -> TopRows:  # noqa: ARG002
        """Return the k largest logits, their ids and the log-sum-exp."""
        with torch.no_grad():
            answers = self.answer(top_k=k)
        return TopRows(answers.top_values, answers.top_ids, answers.lse)

    def at(self, ids: Tensor) -> Tensor:
        """Return the logits of token ids (N, K)."""
        return self.logits.detach().gather(1, ids).double()

    def row_logits(self) -> Tensor:
        """Return the tensor in `dtype`."""
        return self.logits.detach().to(self.dtype)

    # Operations -----------------------------------------------------------------------------------

    def _on(self, logits: Tensor) -> Self:
        return type(self)(logits, self.max_bytes)

    def times(self, factor: float) -> Self:
        """Return the scores times a number."""
        return self._on(self.logits * factor)

    def plus(self, term: float) -> Self:
        """Return the scores plus a number."""
        return self._on(self.logits + term)

    def tanh(self) -> Self:
        """Return tanh of the scores."""
        return self._on(self.logits.tanh())

    def plus_bias(self, bias: Tensor) -> Self:
        """Return the scores plus a vector (V,)."""
        return self._on(self.logits + bias)

    def times_rows(self, factor: Tensor) -> Self:
        """Return the scores times a factor per row."""
        return self._on(self.logits * factor)

    def mask(self, mask: Tensor) -> Self:
        """Return the scores with -inf at the tokens of a mask (V,)."""
        return self._on(self.logits.masked_fill(mask, -math.inf))

    def token_range(self, tokens: slice) -> Self:
        """Return the scores of a range of the vocabulary."""
        return self._on(self.logits[:, tokens])
