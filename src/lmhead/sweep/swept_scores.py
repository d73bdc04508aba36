"""`SweptScores`: the logits hidden @ weight.T, answered tile by tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from lmhead import checks
from lmhead.scores import RowAnswers, Rows, Scores, TopRows
from lmhead.scores.protocol import Tile, kl_by_rows
from lmhead.scores.row_loss import CrossEntropy, RowLoss, RowSums
from lmhead.sweep import gradient_sums, run_sweep
from lmhead.sweep.divergence_terms import Kind, swept_divergence, swept_jsd_parts
from lmhead.sweep.equal_rows import EqualRows
from lmhead.sweep.kernels import Pointwise
from lmhead.sweep.questions import GradFilter, Plan, Questions
from lmhead.sweep.small_batch import FEW_LOGITS, MAX_ROWS, small_loss, small_sums
from lmhead.sweep.source import Source, without_autocast


@dataclass(frozen=True)
class SweptScores(Scores):
    """Rows of a linear layer: z = pointwise(Σ_i hiddens[i] @ weights[i].T + bias).

    Attributes:
        source: hidden states, weights, bias and elementwise map.
        grad_filter: approximate gradients of losses; None for exact ones.
        max_bytes: bound on temporary memory; None for 128 MiB.
        allowed: ascending ids of the tokens not in `mask`, if they are few: without gradients,
            nothing else is read. None for all.
        equal_rows: given where log-probabilities will be summed; see `EqualRows`.
        masked: the tokens of `mask`, (V,) bool. Their logits are constants: a target among them has
            no gradient of its own, unlike one that the bias of the head gives -inf.
    """

    source: Source
    grad_filter: GradFilter | None = None
    max_bytes: int | None = None
    allowed: Tensor | None = None
    equal_rows: EqualRows | None = None
    masked: Tensor | None = None

    # With at most this share of the vocabulary allowed, copying those rows of the weight pays.
    few_allowed: ClassVar[float] = 0.25

    # Shape ---------------------------------------------------------------------------------------

    @property
    def n_rows(self) -> int:
        """N."""
        return self.source.rows

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.source.vocab

    @property
    def dtype(self) -> torch.dtype:
        """float64 for float64 weights, else float32."""
        return self.source.dtype

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.source.device

    def tensors(self) -> tuple[Tensor, ...]:
        """Return hidden states, weights and the bias if there is one."""
        s = self.source
        return (*s.hiddens, *s.weights, *(() if s.bias is None else (s.bias,)))

    def watched(self) -> tuple[Tensor, ...]:
        """Return the tensors whose version counters show in-place changes: `tensors()`."""
        return self.tensors()

    def tensor_names(self) -> tuple[str, ...]:
        """Return a name for each of `tensors()`."""
        more = len(self.source.hiddens) - 1
        low_rank = ("low-rank product",) * more
        names = ("hidden state", *low_rank, "weight", *("low_rank_b",) * more)
        return (*names, *(() if self.source.bias is None else ("bias",)))

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """Return the same scores on other tensors."""
        n = len(self.source.hiddens)
        bias = tensors[2 * n] if len(tensors) > 2 * n else None
        return self._on(hiddens=tuple(tensors[:n]), weights=tuple(tensors[n : 2 * n]), bias=bias)

    def select(self, rows: Rows) -> Self:
        """Return some of the rows."""
        return replace(self, source=self.source.select(rows))

    def _on(self, **changes: object) -> Self:
        return replace(self, source=replace(self.source, **changes))  # type: ignore[arg-type]

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
        """Answer by one sweep."""
        allowed = None if rank is not None or kl_to is not None else self._allowed_tokens(top_k)
        if allowed is not None:
            indices = None if picked is None else torch.searchsorted(allowed.ids, picked)
            answers = allowed.scores.answer(
                logsumexp=logsumexp,
                entropy=entropy,
                picked=None if indices is None else indices.clamp(max=len(allowed.ids) - 1),
                top_k=top_k,
                log_sum_sq=log_sum_sq,
                mean_logit=mean_logit,
            )
            return allowed.restored(answers, picked, indices)
        sums_only = None
        others = top_k or rank is not None or kl_to is not None or log_sum_sq or mean_logit
        if not others and self.n_rows <= MAX_ROWS:
            sums_only = small_sums(self.source, picked, entropy=entropy, max_bytes=self.max_bytes)
        if sums_only is not None:
            found = cut_masked(sums_only, picked, self.masked).picked
            return RowAnswers(sums_only.lse, entropy=sums_only.entropy, picked=found)
        swept = isinstance(kl_to, SweptScores) and kl_to.dtype == self.dtype
        questions = Questions(
            self.source,
            other=kl_to.source if swept and isinstance(kl_to, SweptScores) else None,
            entropy=entropy,
            log_sum_sq=log_sum_sq,
            top_k=top_k,
            ids=picked,
            mix=self._mean_weights() if mean_logit else None,
            rank_ids=rank,
            grad_filter=self.grad_filter,
            max_bytes=self.max_bytes,
            equal_rows=self.equal_rows,
        )
        sums_asked = logsumexp or entropy or log_sum_sq or mean_logit
        smooth = sums_asked or picked is not None or kl_to is not None
        with torch.set_grad_enabled(smooth and torch.is_grad_enabled()):
            sums, decisions = run_sweep.row_answers(questions)
        kl = sums.kl if swept or kl_to is None else kl_by_rows(self, kl_to)
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

    def divergence(self, other: Scores, kind: str, beta: float = 0.5) -> Tensor:
        """Return a divergence of each row: two products, and two more for each gradient."""
        if (
            not isinstance(other, SweptScores)
            or other.dtype != self.dtype
            or torch._C._are_functorch_transforms_active()
        ):
            return super().divergence(other, kind, beta)
        return swept_divergence(self.source, other.source, Kind(kind, beta), self.max_bytes)

    def jsd_parts(self, other: Scores, beta: float) -> Tensor | None:
        """Return β KL(p ‖ m) and (1-β) KL(q ‖ m), (2, N), m = β p + (1-β) q; None if not swept."""
        if not isinstance(other, SweptScores) or other.dtype != self.dtype:
            return None
        return swept_jsd_parts(self.source, other.source, beta, self.max_bytes)

    def _allowed_tokens(self, top_k: int = 0) -> _AllowedTokens | None:
        """Return the scores of the allowed tokens alone, if a question can be answered by them."""
        if self.allowed is None or top_k > len(self.allowed):
            return None
        if torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors()):
            return None
        s, ids = self.source, self.allowed
        bias = None if s.bias is None else s.bias[ids]
        source = replace(s, weights=tuple(w[ids] for w in s.weights), bias=bias)
        return _AllowedTokens(ids, SweptScores(source, max_bytes=self.max_bytes))

    def _mean_weights(self) -> Tensor:
        """Return the weights of a mean over the tokens that are not masked: (V,)."""
        weights = torch.ones(self.vocab_size, dtype=self.dtype, device=self.device)
        if self.source.bias is not None:
            weights = weights.masked_fill(self.source.bias.detach() == -math.inf, 0.0)
        return weights / weights.sum()

    def cross_entropy(self, loss: CrossEntropy, *, keep_gradients: bool = True) -> Tensor:
        """Return the loss; with gradients and a reduction, three matrix products in all."""
        few = self.n_rows <= MAX_ROWS or self.n_rows * self.vocab_size <= FEW_LOGITS
        if keep_gradients and few and self.grad_filter is None:
            made = small_loss(self.source, loss, self.max_bytes)
            if made is not None:
                return made
        bias = self.source.bias
        weighted = loss.weighted(
            self.vocab_size, self.dtype, None if bias is None else bias == -math.inf
        )
        questions = Questions(
            self.source,
            ids=None if weighted.ids is None else weighted.ids[:, None],
            mix=weighted.mix,
            soft=weighted.soft,
            soft_weight=weighted.soft_weight,
            active=weighted.active,
            grad_filter=self.grad_filter,
            max_bytes=self.max_bytes,
        )

        def rows(weights: RowLoss) -> Tensor:
            sums = run_sweep.row_answers(questions)[0]
            return weights.rows(cut_masked(sums, questions.ids, self.masked))

        def total(weights: RowLoss) -> Tensor:
            if keep_gradients and not picks_masked(questions.ids, self.masked):
                return run_sweep.total_loss(questions, weights)
            return rows(weights).sum()

        return loss.reduced(
            weighted,
            rows=rows,
            total=total,
            log_probs=lambda: self.dense().detach().double().log_softmax(1),
        )

    def columns(self, ids: Tensor) -> Tensor:
        """Return the logits of token ids (K,), from K rows of the weight."""
        s = self.source
        bias = None if s.bias is None else s.bias[ids]
        weights = tuple(gradient_sums.token_rows(w, ids) for w in s.weights)
        return replace(s, weights=weights, bias=bias).dense()

    def dense(self) -> Tensor:
        """Return all logits (N, V), by plain differentiable operations."""
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            with without_autocast(self.device):
                return self.source.dense()
        s = self.source
        x = s.linear_rows(slice(0, s.rows))
        s.pointwise.apply_(x if s.bias is None else x.add_(s.bias))
        return x if s.row_scale is None else x.mul_(s.row_scale[:, None])

    def tile(self, rows: Rows) -> Tile:
        """Return some dense rows, to be differentiated by the caller."""
        return _SweptTile(self.source, rows)

    def explain(self) -> list[str]:
        """Return products, tiles and bytes of an answer and of a loss."""
        questions = Questions(self.source, max_bytes=self.max_bytes)
        s = self.source
        gflop = f"{2e-9 * s.rows * s.vocab * s.hidden_size:,.2f} GFLOP"
        loss = questions.plan(retain=True)
        return [
            f"  an answer               1 product of {gflop}; {_describe(questions.plan())}",
            f"  a loss with gradients   {3 if loss.retained else 4} products; {_describe(loss)}",
        ]

    # Decoding ------------------------------------------------------------------------------------

    def top(self, k: int, *, lse: bool = True) -> TopRows:  # noqa: ARG002
        """Return the k largest logits, their ids and the log-sum-exp: one sweep."""
        with torch.no_grad():
            if (allowed := self._allowed_tokens(k)) is not None:
                top = allowed.scores.top(k)
                return top._replace(ids=allowed.token_ids(top.ids))
            questions = Questions(self.source, top_k=k, max_bytes=self.max_bytes)
            sums, decisions = run_sweep.row_answers(questions)
        return TopRows(decisions.top_values, decisions.top_ids, sums.lse)

    def at(self, ids: Tensor) -> Tensor:
        """Return the logits of token ids (N, K) in float64."""
        with torch.no_grad():
            return self.source.at(ids)

    def row_logits(self) -> Tensor:
        """Return all logits (N, V), each row computed independently of the others."""
        with torch.no_grad():
            if (allowed := self._allowed_tokens()) is not None:
                return allowed.spread(allowed.scores.row_logits(), self.vocab_size)
        return self.source.row_logits()

    def with_exact_near(self, z: Tensor, other: Tensor) -> Tensor:
        """Return dense logits z (N, V) with those close to `other` replaced by float64 ones.

        Close means that rounding could decide a comparison of the two.
        """
        s = self.source
        with torch.no_grad():
            per_row, relative, absolute = s.error_bounds(s.take(slice(0, s.rows)), slice(0, s.rows))
            largest_norm = sum(w.detach().norm(dim=1, dtype=s.dtype).amax() for w in s.weights)
            rounding = 2 * torch.finfo(z.dtype).eps
            margin = 2 * (per_row[:, None] * largest_norm + absolute)
            margin = margin + (relative + rounding) * torch.maximum(z.abs(), other.abs())
            rows, ids = ((z - other).abs() <= margin).nonzero(as_tuple=True)
            if len(rows) == 0:
                return z
            exact = s.pairs(rows, ids).to(z.dtype)
            return z.index_put((rows, ids), exact)

    # Operations that return SweptScores ----------------------------------------------------------

    def divided(self, temperature: float | Tensor) -> Self:
        """Return the scores divided by a temperature: a number, or one per row without gradient."""
        if not isinstance(temperature, Tensor):
            return self._on(pointwise=self.source.pointwise.times(1.0 / temperature))
        rows = temperature.detach().to(self.dtype).reshape(-1).expand(self.n_rows)
        return self._on(row_scale=rows.reciprocal())

    def times(self, factor: float) -> Self | None:
        """Return the scores times a number."""
        return self._on(pointwise=self.source.pointwise.times(factor))

    def plus(self, term: float) -> Self | None:
        """Return the scores plus a finite number."""
        if not math.isfinite(term):
            return None
        return self._on(pointwise=self.source.pointwise.plus(term))

    def tanh(self) -> Self | None:
        """Return tanh of the scores; a map holds one tanh."""
        bounded = self.source.pointwise.tanh()
        return None if bounded is None else self._on(pointwise=bounded)

    def plus_bias(self, bias: Tensor) -> Self | None:
        """Return the scores plus a vector (V,), as part of the bias."""
        pointwise, old = self.source.pointwise, self.source.bias
        if pointwise.bounded or pointwise.scale == 0:
            return None
        added = bias / pointwise.scale
        return self._on(bias=added if old is None else old + added)

    def times_rows(self, factor: Tensor) -> Self | None:
        """Return the scores times a factor per row, as part of the hidden states."""
        pointwise, bias = self.source.pointwise, self.source.bias
        if pointwise.bounded or pointwise.shift != 0.0:
            return None
        if bias is not None:
            if factor.dim() > 0:
                return None
            bias = bias * factor
        dtype = self.source.hiddens[0].dtype
        hiddens = tuple(h * factor.to(dtype) for h in self.source.hiddens)
        return self._on(hiddens=hiddens, bias=bias)

    def mask(self, mask: Tensor) -> Self | None:
        """Return the scores with -inf at the tokens of a mask (V,), as part of the bias."""
        pointwise, bias = self.source.pointwise, self.source.bias
        if pointwise.lipschitz == 0 or pointwise.scale * pointwise.outer < 0:
            return None
        if bias is None:
            bias = self.source.hiddens[0].new_zeros(self.vocab_size)
        bias = bias.masked_fill(mask, -math.inf)
        allowed = None
        if not torch._C._are_functorch_transforms_active() and bias.device.type == "cpu":
            allowed = (bias.detach() != -math.inf).nonzero()[:, 0]
        few = allowed is not None and 0 < len(allowed) <= self.few_allowed * self.vocab_size
        masked = mask if self.masked is None else self.masked | mask
        return replace(self._on(bias=bias), allowed=allowed if few else None, masked=masked)

    def token_range(self, tokens: slice) -> Self | None:
        """Return the scores of a range of the vocabulary, on those rows of the weight."""
        s = self.source
        bias = None if s.bias is None else s.bias[tokens]
        part = self._on(weights=tuple(w[tokens] for w in s.weights), bias=bias)
        masked = None if self.masked is None else self.masked[tokens]
        return replace(part, allowed=None, masked=masked)


def picks_masked(ids: Tensor | None, masked: Tensor | None) -> bool:
    """Return whether some ids are masked tokens; within `vmap`, whether any could be."""
    if masked is None or ids is None:
        return False
    return torch._C._are_functorch_transforms_active() or bool(masked[ids].any())


def cut_masked(sums: RowSums, ids: Tensor | None, masked: Tensor | None) -> RowSums:
    """Return the sums without gradients of those picked tokens (N, K) that are masked."""
    if masked is None or ids is None:
        return sums
    return sums._replace(picked=sums.picked.masked_fill(masked[ids], -math.inf))


class _AllowedTokens(NamedTuple):
    """The scores of a few allowed token ids, and the mapping back to the whole vocabulary."""

    ids: Tensor  # (K,), ascending
    scores: SweptScores  # (N, K)

    def token_ids(self, indices: Tensor) -> Tensor:
        """Return the token ids at indices of `ids`; -1 stays -1."""
        return torch.where(indices < 0, indices, self.ids[indices.clamp(min=0)])

    def spread(self, z: Tensor, vocab: int) -> Tensor:
        """Return logits (N, V) with -inf for all other tokens."""
        return z.new_full((len(z), vocab), -math.inf).index_copy_(1, self.ids, z)

    def restored(
        self, answers: RowAnswers, picked: Tensor | None, indices: Tensor | None
    ) -> RowAnswers:
        """Return answers about the whole vocabulary."""
        if picked is not None and indices is not None:
            same = self.ids[indices.clamp(max=len(self.ids) - 1)] == picked
            answers = replace(answers, picked=torch.where(same, answers.picked, -math.inf))
        if answers.top_ids is not None:
            answers = replace(answers, top_ids=self.token_ids(answers.top_ids))
        return answers


def linear_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pointwise: Pointwise,
    *,
    names: tuple[str, str] = ("hidden", "weight"),
    grad_filter: GradFilter | None = None,
    max_bytes: int | None = None,
) -> SweptScores:
    """Validate the tensors of a linear layer, and return its scores in autocast's dtype."""
    hidden, weight = autocast(hidden, weight)
    checks.check_hidden_and_weight(hidden, weight, names=names)
    checks.check_vector("bias", bias, weight)
    source = Source((hidden.reshape(-1, hidden.shape[-1]),), (weight,), bias, pointwise)
    return SweptScores(source.keep_masked(), grad_filter, max_bytes)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors as `F.linear` would take them: in autocast's dtype where that is on."""
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


class _SweptTile(Tile):
    """Rows of a linear layer; its gradients are two products, added up in place."""

    def __init__(self, source: Source, rows: Rows) -> None:
        self.source, self.rows = source, rows
        tensors = (*source.hiddens, *source.weights, source.bias)
        needed = any(t is not None and t.requires_grad for t in tensors)
        with torch.no_grad():
            x = source.linear_rows(self.rows)
            if source.bias is not None:
                x += source.bias
        self.inputs = [x.requires_grad_()] if needed else []
        with torch.enable_grad():
            self.value = source.pointwise(x)
            if source.bias is not None and bool((masked := source.bias == -math.inf).any()):
                self.value = self.value.masked_fill(masked, -math.inf)  # no gradient there
            if source.row_scale is not None:
                self.value = self.value * source.row_scale[self.rows][:, None]

    def add(self, grads: Sequence[Tensor | None], into: list[Tensor | None]) -> None:
        """Add the gradients of hidden states, weights and bias."""
        if not grads or grads[0] is None:
            return
        s, g, n = self.source, grads[0], len(self.source.hiddens)
        with torch.no_grad(), s.products():
            for i, (hidden, weight) in enumerate(zip(s.hiddens, s.weights, strict=True)):
                if hidden.requires_grad:
                    total = _zeros(into, i, hidden, s.dtype)
                    gathered = isinstance(self.rows, Tensor)
                    part = total.new_zeros(len(g), total.shape[1]) if gathered else total[self.rows]
                    for lo, hi in s.weight_ranges():
                        part.addmm_(g[:, lo:hi], s.weight_tile(i, lo, hi))
                    if isinstance(self.rows, Tensor):
                        total.index_add_(0, self.rows, part)
                if weight.requires_grad:
                    to_weight = _zeros(into, n + i, weight, s.dtype)
                    to_weight.addmm_(g.T, hidden[self.rows].detach().to(s.dtype))
            if s.bias is not None and s.bias.requires_grad:
                _zeros(into, 2 * n, s.bias, s.dtype).add_(g.sum(0))


def _zeros(into: list[Tensor | None], index: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient at an index; begin with zeros, or a sum of others, if it is None."""
    total = into[index]
    if total is None:
        total, held = gradient_sums.buffer(like, dtype)
        into[index] = total if held else total.zero_()
    return total


def _describe(plan: Plan) -> str:
    tiles = plan.n_chunks * plan.n_tiles
    size = f"{plan.tile_tokens:,} tokens x {plan.chunk_rows:,} rows"
    return f"{tiles:,} tiles of {size}; {plan.bytes:,} bytes"
