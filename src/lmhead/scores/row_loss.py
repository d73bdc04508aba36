"""Cross-entropy with all its options: one description, one formula, one reduction.

For a row with target y, smoothing ε and class weights w (1 where not given), with A = Σ_v w_v:

    loss = (1-ε) w_y (lse - z_y) + ε/V Σ_v w_v (lse - z_v) + z_loss · lse²

so every option is a choice of five weights per row (`RowLoss`):

    loss = Σ_n  lse_n · lse  -  picked_n · z[target]  -  mixed_n · Σ_v mix_v z_v
                -  softened_n · Σ_v soft_v weight_v z_v  +  squared_n · lse²

With target probabilities t in place of y, (1-ε) Σ_v w_v t_v takes the place of (1-ε) w_y.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmhead import checks


class RowSums(NamedTuple):
    """Sums over the vocabulary, one entry per row, in float64; or the gradients of these sums.

    With p = softmax(z); masked tokens (z = -inf) are left out of mixed, and of softened where
    their target probability is 0. What was not asked for is None.
    """

    lse: Any = None  # (N,), log Σ_v exp z_v
    entropy: Any = None  # (N,), -Σ_v p_v log p_v
    picked: Any = None  # (N, K), z at given ids
    mixed: Any = None  # (N,), Σ_v mix_v z_v
    softened: Any = None  # (N,), Σ_v soft_v weight_v z_v
    kl: Any = None  # (N,), Σ_v p_v (log p_v - log q_v), q from other scores
    other_lse: Any = None  # (N,), log Σ_v exp of the other scores, for the gradient of kl
    log_sum_sq: Any = None  # (N,), log Σ_v p_v²

    def at(self, rows: slice | Tensor) -> RowSums:
        """Return the sums of some rows."""
        return RowSums(*(None if a is None else a[rows] for a in self))


class RowLoss(NamedTuple):
    """The five weights of the formula above, (N,) each, in float64; None for 0."""

    lse: Tensor
    picked: Tensor | None = None
    mixed: Tensor | None = None
    softened: Tensor | None = None
    squared: Tensor | None = None

    def at(self, rows: slice | Tensor) -> RowLoss:
        """Return the weights of some rows."""
        return self.map(lambda weight: weight[rows])

    def map(self, change: Callable[[Tensor], Tensor]) -> RowLoss:
        """Map each weight that is not None; shared tensors only once."""
        changed = {id(w): w for w in self if w is not None}
        changed = {key: change(w) for key, w in changed.items()}
        return RowLoss(*(None if w is None else changed[id(w)] for w in self))  # type: ignore[arg-type]

    def rows(self, sums: RowSums) -> Tensor:
        """Return the loss of each row, (N,)."""
        total: Tensor = self.lse * sums.lse
        if self.picked is not None:
            total = total - _product(self.picked, sums.picked[:, 0])
        if self.mixed is not None:
            total = total - self.mixed * sums.mixed
        if self.softened is not None:
            total = total - _product(self.softened, sums.softened)
        if self.squared is not None:
            total = total + self.squared * sums.lse.square()
        return total

    def gradients(self, sums: RowSums) -> RowSums:
        """Return the gradient of Σ rows with respect to the sums."""
        lse = self.lse
        if self.squared is not None:
            lse = lse + 2 * self.squared * sums.lse
        return RowSums(
            lse=lse,
            picked=None if self.picked is None else -self.picked[:, None],
            mixed=None if self.mixed is None else -self.mixed,
            softened=None if self.softened is None else -self.softened,
        )


def _product(weight: Tensor, value: Tensor) -> Tensor:
    """Return weight · value, and 0 where the weight is 0 though the value is infinite."""
    return torch.where(weight == 0, 0.0, weight * value)


@dataclass(frozen=True)
class WeightedLoss:
    """A cross-entropy as weights of sums over the vocabulary, before its reduction."""

    weights: RowLoss  # for reduction="sum"
    target_weight: Tensor  # (N,), class weights of the targets: "mean" divides by their sum
    counted: Tensor  # (N,), 1 for rows that count: "mean" divides z-loss by their sum
    ids: Tensor | None = None  # (N,), the targets; 0 where ignored
    active: Tensor | None = None  # (N,) bool, rows that count; None for all
    mix: Tensor | None = None  # (V,), the weights over which ε is spread
    soft: Tensor | None = None  # (N, V), target probabilities
    soft_weight: Tensor | None = None  # (V,)


@dataclass(frozen=True)
class CrossEntropy:
    """Targets and options of a cross-entropy over N rows.

    Attributes:
        targets: ids (N,), or probabilities (N, V).
        class_weight: (V,) or None.
        ignore_index: rows with this target do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: ε in [0, 1].
        z_loss: weight of logsumexp².
        num_items: what "mean" divides by instead of the number of rows that count.
    """

    targets: Tensor
    class_weight: Tensor | None = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    num_items: int | Tensor | None = None

    @classmethod
    def checked(
        cls, lead: torch.Size, vocab: int, like: Tensor, targets: Tensor, **options: Any
    ) -> CrossEntropy:
        """Validate targets and options for logits (*lead, vocab) on the device of `like`."""
        loss = cls(targets, **options)
        checks.check_entries("class_weight", loss.class_weight, vocab, like)
        checks.check_number("label_smoothing", loss.label_smoothing, low=0.0, high=1.0)
        checks.check_number("z_loss", loss.z_loss, low=0.0)
        checks.check_integer("ignore_index", loss.ignore_index, low=-(2**63), high=2**63 - 1)
        checks.check_num_items(loss.num_items)
        if loss.reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none'; got {loss.reduction!r}")
        if loss.num_items is not None and loss.reduction != "mean":
            raise ValueError(
                f"num_items is what reduction='mean' divides by; got reduction={loss.reduction!r}"
            )
        if not isinstance(targets, Tensor):
            raise TypeError(f"targets must be a torch.Tensor; got {type(targets).__name__}")
        checks.check_device("targets", targets, "hidden", like)
        if targets.is_floating_point():
            _check_shape(targets, (*lead, vocab), "probabilities (..., V)")
            flat = targets.reshape(-1, vocab)
        else:
            _check_shape(targets, tuple(lead), "ids (...) for hidden (..., D)")
            checks.check_ids("targets", targets, vocab, ignore_index=loss.ignore_index)
            flat = targets.reshape(-1).long()
        object.__setattr__(loss, "targets", flat)
        return loss

    @property
    def has_probabilities(self) -> bool:
        """Whether the targets are distributions."""
        return self.targets.is_floating_point()

    def weighted(self, vocab: int, dtype: torch.dtype, masked: Tensor | None) -> WeightedLoss:
        """Return the weights of the sums; tokens of `masked` (V,) get no share of ε."""
        mix, mix_sum = self._smoothing(vocab, dtype, masked)
        ε, spread = self.label_smoothing, self.label_smoothing / vocab
        if self.has_probabilities:
            soft = self.targets.detach()
            ones = torch.ones(len(soft), dtype=torch.float64, device=soft.device)
            weights = RowLoss(
                lse=(1 - ε) * _row_sums(soft, self.class_weight) + spread * mix_sum * ones,
                mixed=None if mix is None else spread * ones,
                softened=(1 - ε) * ones,
                squared=self.z_loss * ones if self.z_loss else None,
            )
            soft_weight = None if self.class_weight is None else self.class_weight.to(dtype)
            return WeightedLoss(weights, ones, ones, mix=mix, soft=soft, soft_weight=soft_weight)
        active = None
        ids, counted = self.targets, torch.ones_like(self.targets, dtype=torch.float64)
        if not self._counts_all():
            active = self.targets != self.ignore_index
            ids, counted = torch.where(active, self.targets, 0), active.double()
        target_weight = (
            counted if self.class_weight is None else counted * self.class_weight.double()[ids]
        )
        weights = RowLoss(lse=target_weight, picked=target_weight)
        if mix is not None:
            picked = (1 - ε) * target_weight
            weights = RowLoss(picked + spread * counted * mix_sum, picked, mixed=spread * counted)
        if self.z_loss:
            weights = weights._replace(squared=self.z_loss * counted)
        return WeightedLoss(weights, target_weight, counted, ids=ids, active=active, mix=mix)

    def reduced(
        self,
        weighted: WeightedLoss,
        *,
        rows: Callable[[RowLoss], Tensor],
        total: Callable[[RowLoss], Tensor],
        log_probs: Callable[[], Tensor],
    ) -> Tensor:
        """Return the loss, a scalar or (N,) for "none", in float64.

        Args:
            weighted: what `weighted` returned.
            rows: gives Σ of the formula per row, (N,).
            total: gives its sum over the rows, perhaps cheaper.
            log_probs: gives log p (N, V) without a gradient; called if the targets require one.
        """
        weights, to_targets = weighted.weights, self._target_gradient(weighted, log_probs)
        if self.reduction == "none":
            return rows(weights) if to_targets is None else rows(weights) + to_targets
        if self.reduction == "sum":
            return total(weights) if to_targets is None else total(weights) + to_targets.sum()
        if isinstance(self.num_items, int) and self.num_items > 0:
            by_weight: Any = 1 / self.num_items
            result = total(weights.map(lambda w: w * by_weight))
            return result if to_targets is None else result + to_targets.sum() * by_weight
        weight = count = weighted.target_weight.sum()
        if weighted.counted is not weighted.target_weight:
            count = weighted.counted.sum()
        if self.num_items is not None:
            weight = count = torch.as_tensor(
                self.num_items, dtype=torch.float64, device=weighted.target_weight.device
            )
        # Rows that do not count have weight 0, also if no row counts: not 0 / 0 = NaN.
        empty = weight == 0
        by_weight = torch.where(empty, 0.0, weight.reciprocal())
        mean = weights.map(lambda w: w * by_weight)
        if weights.squared is not None and count is not weight:
            by_count = torch.where(count == 0, 0.0, count.reciprocal())
            mean = mean._replace(squared=weights.squared * by_count)
        result = total(mean)
        if to_targets is not None:
            result = result + to_targets.sum() * by_weight
        return torch.where(empty, math.nan, result)

    def of_dense(self, logits: Tensor) -> Tensor:
        """Return the loss of logits (N, V), by its definition; float64."""
        z = logits.double()
        weighted = self.weighted(z.shape[1], z.dtype, None)
        masked = z == -math.inf
        sums = RowSums(lse=z.logsumexp(1))
        if weighted.ids is not None:
            sums = sums._replace(picked=z.gather(1, weighted.ids[:, None]))
        if weighted.mix is not None:
            sums = sums._replace(mixed=(z.masked_fill(masked, 0.0) * weighted.mix).sum(1))
        if weighted.soft is not None:
            soft = weighted.soft.double()
            soft = soft if weighted.soft_weight is None else soft * weighted.soft_weight
            sums = sums._replace(softened=(z.masked_fill(masked & (soft == 0), 0.0) * soft).sum(1))
        if weighted.active is not None:
            sums = RowSums(
                *(
                    None
                    if s is None
                    else torch.where(weighted.active.view(-1, *(1,) * (s.dim() - 1)), s, 0.0)
                    for s in sums
                )
            )
        return self.reduced(
            weighted,
            rows=lambda weights: weights.rows(sums),
            total=lambda weights: weights.rows(sums).sum(),
            log_probs=lambda: z.detach().log_softmax(1),
        )

    def _target_gradient(
        self, weighted: WeightedLoss, log_probs: Callable[[], Tensor]
    ) -> Tensor | None:
        """Return (N,) of value 0 with the gradient of target probabilities, -(1-ε) w log p."""
        if not (self.has_probabilities and self.targets.requires_grad):
            return None
        change = (self.targets - self.targets.detach()) * (self.label_smoothing - 1)
        weight = 1.0 if weighted.soft_weight is None else weighted.soft_weight
        return (change * log_probs() * weight).sum(1)

    def _counts_all(self) -> bool:
        """Return True if no target is ignore_index; False if that is unknown."""
        if self.targets.device.type == "meta" or torch._C._are_functorch_transforms_active():
            return False
        return not bool((self.targets == self.ignore_index).any())

    def _smoothing(
        self, vocab: int, dtype: torch.dtype, masked: Tensor | None
    ) -> tuple[Tensor | None, Tensor | float]:
        """Return the weights over which ε is spread, (V,), and their sum."""
        if self.label_smoothing == 0.0:
            return None, 0.0
        if self.class_weight is None:
            mix = torch.ones(vocab, dtype=dtype, device=self.targets.device)
        else:
            mix = self.class_weight.detach().to(dtype)
        if masked is not None:
            mix = mix.masked_fill(masked, 0.0)
        return mix, mix.double().sum()


def _row_sums(targets: Tensor, class_weight: Tensor | None) -> Tensor:
    """Return Σ_v w_v t_v in float64, (N,), a few rows at a time."""
    n, vocab = targets.shape
    block = max(1, min(-(-n // 8), 2**20 // vocab))
    weight = 1.0 if class_weight is None else class_weight.double()
    return torch.cat([(part.double() * weight).sum(1) for part in torch.split(targets, block)])


def _check_shape(targets: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if tuple(targets.shape) != shape:
        raise ValueError(f"targets must have shape {shape}, {meaning}; got {tuple(targets.shape)}")
