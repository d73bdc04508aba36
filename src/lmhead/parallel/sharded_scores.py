"""`ShardedScores`: the logits of a linear layer whose vocabulary is split over ranks.

Every rank has all rows and its slice of the weight, and asks the same questions. Answers are the
same on every rank. The gradient of the weight stays with its slice; that of the hidden states is
summed over the ranks once, where they entered (`entered`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from lmhead.parallel.vocab_shard import VocabShard
from lmhead.scores import RowAnswers, Rows, Scores, TopRows
from lmhead.scores.protocol import Tile, kl_by_rows
from lmhead.scores.row_loss import CrossEntropy, RowLoss, RowSums
from lmhead.sweep import SweptScores, run_sweep
from lmhead.sweep.questions import Decisions, Questions
from lmhead.sweep.swept_scores import cut_masked, picks_masked


@dataclass(frozen=True)
class ShardedScores(Scores):
    """Rows of a linear layer of which this rank has the tokens of `shard`."""

    local: SweptScores  # the scores of this rank's tokens
    shard: VocabShard  # which tokens, and the ranks that have the others
    # the parameters of `local`, in the order of `tensors()`: in-place changes of a `DTensor` are
    # counted there
    owners: tuple[Tensor, ...] = ()
    masked: Tensor | None = None  # the tokens of `mask`, (V,) bool: see `SweptScores`

    @property
    def max_bytes(self) -> int | None:  # type: ignore[override]
        """Bound on temporary memory; None for 128 MiB."""
        return self.local.max_bytes

    def limited(self, max_bytes: int | None) -> Self:
        """Return the scores with another bound on temporary memory."""
        return replace(self, local=self.local.limited(max_bytes))

    @property
    def n_rows(self) -> int:
        """N."""
        return self.local.n_rows

    @property
    def vocab_size(self) -> int:
        """V, over all ranks."""
        return self.shard.total

    @property
    def dtype(self) -> torch.dtype:
        """float64 for float64 weights, else float32."""
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.local.device

    def tensors(self) -> tuple[Tensor, ...]:
        """Return hidden states, this rank's weights, and its bias if there is one."""
        return self.local.tensors()

    def tensor_names(self) -> tuple[str, ...]:
        """Return a name for each of `tensors()`."""
        return self.local.tensor_names()

    def watched(self) -> tuple[Tensor, ...]:
        """Return the parameters behind `tensors()`."""
        return self.owners or self.tensors()

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """Return the same scores on other tensors."""
        return replace(self, local=self.local.with_tensors(tensors))

    def select(self, rows: Rows) -> Self:
        """Return some of the rows."""
        return replace(self, local=self.local.select(rows), owners=())

    @property
    def _swept(self) -> SweptScores:
        """The local scores; an empty slice gets one masked token.

        If a rank has no token, every rank gets a bias, so that all take the same path.
        """
        if not self.shard.has_empty:
            return self.local
        s = self.local.source
        bias = s.weights[0].new_zeros(self.shard.size) if s.bias is None else s.bias
        padded = self.shard.padded
        weights = tuple(padded(w) for w in s.weights)
        source = replace(s, weights=weights, bias=padded(bias, fill=-math.inf))
        return replace(self.local, source=source)

    # Questions -----------------------------------------------------------------------------------

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
        """Answer by one sweep and one collective; ranks take one more."""
        same_split = isinstance(kl_to, ShardedScores) and kl_to.shard == self.shard
        same_split = same_split and kl_to is not None and kl_to.dtype == self.dtype
        start = self.shard.start
        questions = Questions(
            self._swept.source,
            other=kl_to._swept.source if same_split and isinstance(kl_to, ShardedScores) else None,
            entropy=entropy,
            log_sum_sq=log_sum_sq,
            mix=self._mean_weights() if mean_logit else None,
            top_k=top_k,
            ids=None if picked is None else picked - start,
            rank_ids=None if rank is None else rank - start,
            rank_values=None if rank is None else self.at(rank),
            grad_filter=self.local.grad_filter,
            max_bytes=self.max_bytes,
            shard=self.shard,
        )
        sums_asked = logsumexp or entropy or log_sum_sq or mean_logit
        smooth = sums_asked or picked is not None or kl_to is not None
        with torch.set_grad_enabled(smooth and torch.is_grad_enabled()):
            sums, decisions = run_sweep.row_answers(questions)
        kl = sums.kl if same_split or kl_to is None else kl_by_rows(self, kl_to)
        return RowAnswers(
            sums.lse,
            entropy=sums.entropy,
            picked=cut_masked(sums, picked, self.masked).picked,
            kl=kl,
            log_sum_sq=sums.log_sum_sq,
            mean_logit=sums.mixed,
            top_values=decisions.top_values,
            top_ids=decisions.top_ids,
            ranks=decisions.ranks,
        )

    def _mean_weights(self) -> Tensor:
        """Return this rank's weights of a mean over the tokens that are not masked."""
        bias = self._swept.source.bias
        weights = torch.ones(self.shard.size, dtype=self.dtype, device=self.device)
        count: Tensor | int = self.vocab_size
        if bias is not None:
            weights.masked_fill_(bias.detach()[: self.shard.size] == -math.inf, 0.0)
            count = self.shard.add_up(weights.sum())
        return self.shard.padded(weights / count)

    def cross_entropy(self, loss: CrossEntropy, *, keep_gradients: bool = True) -> Tensor:  # noqa: ARG002
        """Return the loss: three products, and one collective per chunk of rows."""
        source, shard = self._swept.source, self.shard
        masked = None
        if source.bias is not None and loss.label_smoothing:
            masked = shard.gather_tokens((source.bias == -math.inf)[: shard.size])
        weighted = loss.weighted(self.vocab_size, self.dtype, masked)
        mix, soft, weight = weighted.mix, weighted.soft, weighted.soft_weight
        questions = Questions(
            source,
            ids=None if weighted.ids is None else weighted.ids[:, None] - shard.start,
            mix=None if mix is None else shard.of_tokens(mix),
            soft=None if soft is None else shard.of_tokens(soft, 1),
            soft_weight=None if weight is None else shard.of_tokens(weight),
            active=weighted.active,
            grad_filter=self.local.grad_filter,
            max_bytes=self.max_bytes,
            shard=shard,
        )
        ids = None if weighted.ids is None else weighted.ids[:, None]

        def rows(weights: RowLoss) -> Tensor:
            sums = run_sweep.row_answers(questions)[0]
            return weights.rows(cut_masked(sums, ids, self.masked))

        def total(weights: RowLoss) -> Tensor:
            if picks_masked(ids, self.masked):
                return rows(weights).sum()
            return run_sweep.total_loss(questions, weights)

        return loss.reduced(
            weighted,
            rows=rows,
            total=total,
            log_probs=lambda: self.dense().detach().double().log_softmax(1),
        )

    def columns(self, ids: Tensor) -> Tensor:
        """Return the logits of token ids (K,): each rank computes its own."""
        owned = self.shard.owns(ids)
        columns = self.local.columns(ids[owned] - self.shard.start)
        part = columns.new_zeros(self.n_rows, len(ids)).index_copy(
            1, owned.nonzero()[:, 0], columns
        )
        return _SumOverRanks.apply(part, self.shard)  # type: ignore[no-any-return, no-untyped-call]

    def dense(self) -> Tensor:
        """Return all logits (N, V), gathered from the ranks."""
        return _GatherTokens.apply(self.local.dense(), self.shard)  # type: ignore[no-any-return, no-untyped-call]

    def tile(self, rows: Rows) -> Tile:
        """Return some dense rows, to be differentiated by the caller."""
        return _ShardedTile(self, rows)

    def explain(self) -> list[str]:
        """Return what a question costs on this rank, and what the ranks exchange."""
        shard, n = self.shard, self.n_rows
        size, end = self.dtype.itemsize, shard.start + shard.size
        return [
            f"  vocabulary              tokens {shard.start:,} to {end:,} of {shard.total:,}, "
            f"on {shard.ranks} ranks",
            *self.local.explain(),
            f"  an answer exchanges     {8 * n:,} bytes per rank and number",
            f"  the hidden gradient     {n * self.local.source.hidden_size * size:,} bytes, once",
        ]

    # Decoding ------------------------------------------------------------------------------------

    @torch.no_grad()
    def top(self, k: int, *, lse: bool = True) -> TopRows:
        """Return the k largest logits: the largest of each rank, then the largest of those."""
        if not lse:
            # Every rank may decide by a quantized copy of its slice, or by a sweep.
            swept = self._swept
            local = swept.top(min(k, swept.vocab_size), lse=False)
            nothing = torch.where(local.values[:, 0].isnan(), math.nan, -math.inf).double()
            state = torch.where(local.ids[:, 0] < 0, nothing, 0.0)
            decisions = Decisions(local.values, local.ids)
            _, decisions = self.shard.combine(RowSums(lse=state), decisions, k)
            return TopRows(decisions.top_values, decisions.top_ids, None)
        answers = self.answer(top_k=k)
        return TopRows(answers.top_values, answers.top_ids, answers.lse)

    @torch.no_grad()
    def at(self, ids: Tensor) -> Tensor:
        """Return the logits of token ids (N, K) in float64: each rank computes its own."""
        owned = self.shard.owns(ids)
        rows, _ = owned.nonzero(as_tuple=True)
        part = torch.zeros(ids.shape, dtype=torch.float64, device=self.device)
        part[owned] = self.local.source.pairs(rows, ids[owned] - self.shard.start)
        return self.shard.add_up(part)

    @torch.no_grad()
    def row_logits(self) -> Tensor:
        """Return all logits (N, V), gathered; each row is computed independently of the others."""
        return self.shard.gather_tokens(self.local.row_logits())

    @torch.no_grad()
    def with_exact_near(self, z: Tensor, other: Tensor) -> Tensor:
        """Return z (N, V), exact close to `other`; see `SweptScores.with_exact_near`."""
        start, end = self.shard.start, self.shard.start + self.shard.size
        beside = other[:, start:end] if other.dim() and other.shape[-1] > 1 else other
        own_slice = z[:, start:end]
        return self.shard.gather_tokens(
            self.local.with_exact_near(own_slice, beside) if end > start else own_slice
        )

    def divided(self, temperature: float | Tensor) -> Self:
        """Return the scores divided by a temperature: a number, or one per row without gradient."""
        return replace(self, local=self.local.divided(temperature), owners=())

    # Operations that return ShardedScores --------------------------------------------------------

    def _on(self, local: SweptScores | None) -> Self | None:
        return None if local is None else replace(self, local=local, owners=())

    def times(self, factor: float) -> Self | None:
        """Return the scores times a number."""
        return self._on(self.local.times(factor))

    def plus(self, term: float) -> Self | None:
        """Return the scores plus a finite number."""
        return self._on(self.local.plus(term))

    def tanh(self) -> Self | None:
        """Return tanh of the scores."""
        return self._on(self.local.tanh())

    def plus_bias(self, bias: Tensor) -> Self | None:
        """Return the scores plus a vector (V,), which every rank has."""
        full_bias = entered(bias.expand(self.vocab_size), self.shard)
        part = full_bias[self.shard.start : self.shard.start + self.shard.size]
        return self._on(self.local.plus_bias(part))

    def times_rows(self, factor: Tensor) -> Self | None:
        """Return the scores times a factor per row."""
        return self._on(self.local.times_rows(entered(factor, self.shard)))

    def mask(self, mask: Tensor) -> Self | None:
        """Return the scores with -inf at the tokens of a mask (V,)."""
        full_mask = mask.expand(self.vocab_size)
        part = full_mask[self.shard.start : self.shard.start + self.shard.size]
        scores = self._on(self.local.mask(part))
        if scores is None:
            return None
        return replace(scores, masked=full_mask if self.masked is None else self.masked | full_mask)


class _ShardedTile(Tile):
    """Rows gathered from all ranks; each rank takes the gradient of its tokens."""

    def __init__(self, scores: ShardedScores, rows: Rows) -> None:
        self.shard, self.tensors = scores.shard, scores.tensors()
        self.inner = scores.local.tile(rows)
        self.value = self.shard.gather_tokens(self.inner.value.detach())
        self.inputs = [self.value.requires_grad_()] if self.inner.inputs else []

    def add(self, grads: Sequence[Tensor | None], into: list[Tensor | None]) -> None:
        """Add the gradients of hidden states, weights and bias."""
        if not grads or grads[0] is None:
            return
        start = self.shard.start
        own_slice = grads[0][:, start : start + self.shard.size]
        gradients = torch.autograd.grad(self.inner.value, self.inner.inputs, own_slice)
        self.inner.add(gradients, into)


class _Enter(torch.autograd.Function):
    """A tensor that every rank has; its gradients from all slices are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: VocabShard) -> Tensor:
        ctx.shard = shard
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.shard.add_up(grad), None


class _SumOverRanks(torch.autograd.Function):
    """A sum over the ranks; its gradient, the same on every rank, is passed on unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: VocabShard) -> Tensor:  # noqa: ARG004
        return shard.add_up(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: ARG004
        return grad, None


class _GatherTokens(torch.autograd.Function):
    """Columns gathered from all ranks; each takes its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, shard: VocabShard) -> Tensor:
        ctx.shard = shard
        return shard.gather_tokens(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        start = ctx.shard.start
        return grad[:, start : start + ctx.shard.size], None


def entered(x: Tensor, shard: VocabShard) -> Tensor:
    """Return a tensor that every rank has, with a gradient that is summed over the ranks."""
    if not x.requires_grad or not torch.is_grad_enabled():
        return x
    result: Tensor = _Enter.apply(x, shard)  # type: ignore[no-untyped-call]
    return result
