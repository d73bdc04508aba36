"""`TreeFactors`: answers of a hierarchical head, from decisions on paths.

In:  rows of hidden states (N, D), the parameters of the forks.
Out: log-probabilities, losses, best tokens and samples; see `Factors`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lmhead.scores.protocol import recomputed
from lmhead.scores.row_loss import CrossEntropy
from lmhead.sweep import accumulation_dtype
from lmhead.vocab.factors import Factors, Uniform, vmapped
from lmhead.vocab.tree_paths import Forks
from lmhead.vocab.tree_search import best_tokens


@dataclass(frozen=True)
class TreeFactors(Factors):
    """A distribution over tokens as a tree of decisions."""

    forks: Forks  # the tree with its parameters
    path: Callable[[], float]  # returns the expected number of rows on a path, for `explain`
    max_bytes: int | None = None
    name: str = "HierarchicalHead"

    @property
    def vocab(self) -> int:  # type: ignore[override]
        """V."""
        return self.forks.tree.vocab

    def tensors(self) -> tuple[Tensor, ...]:
        """Return weight and bias of the forks."""
        weight, bias = self.forks.weight, self.forks.bias
        return (weight,) if bias is None else (weight, bias)

    def map(self, change: Callable[[Tensor], Tensor]) -> TreeFactors:
        """Return the same with changed parameters."""
        bias = None if self.forks.bias is None else change(self.forks.bias)
        return replace(self, forks=self.forks._replace(weight=change(self.forks.weight), bias=bias))

    def log_prob(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return log p of tokens: (N, D) and (N, K) give (N, K), in O(log V) products each."""
        row = torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
        log_p = self.forks.token_log_prob(hidden, row, ids.reshape(-1))
        return log_p.reshape(ids.shape).to(accumulation_dtype(hidden.dtype))

    def log_probs(self, hidden: Tensor, *, exact: bool = False) -> Tensor:
        """Return log p of all tokens, (N, V)."""
        return self.forks.all_log_probs(hidden, exact=exact)

    def cross_entropy(self, hidden: Tensor, loss: CrossEntropy) -> Tensor:
        """Return the cross-entropy; see `Factors`.

        Label smoothing and target probabilities are exact, and read all forks: a product with V - 1
        rows, where the plain loss has one with those on the targets' paths.
        """
        dtype = accumulation_dtype(hidden.dtype)
        if loss.targets.is_floating_point():
            rows = self._soft(hidden, loss)
            weight = rows.new_tensor(len(rows))
        else:
            rows, weight = self._hard(hidden, loss)
        if loss.reduction == "none":
            return rows.to(dtype)
        total = rows.sum()
        return (total if loss.reduction == "sum" else total / weight).to(dtype)

    def _hard(self, hidden: Tensor, loss: CrossEntropy) -> tuple[Tensor, Tensor]:
        """Return the loss of each row (N,), 0 where ignored, and the divisor of "mean"; float64."""
        kept = loss.targets != loss.ignore_index
        ids = torch.where(kept, loss.targets, 0)
        target_weight = kept.double()
        if loss.class_weight is not None:
            target_weight = target_weight * loss.class_weight.double()[ids]
        if vmapped():  # no size may depend on the targets
            row: Any = slice(None)
            log_p = self.forks.all_log_probs(hidden).gather(1, ids[:, None])[:, 0]
        else:
            row = kept.nonzero()[:, 0]
            log_p = self.forks.token_log_prob(hidden, row, ids[row])
        rows = -target_weight[row] * log_p
        if loss.label_smoothing:
            spread = self._spread(hidden[row], loss.class_weight)
            rows = (1 - loss.label_smoothing) * rows - loss.label_smoothing / self.vocab * spread
        if isinstance(row, slice):
            rows = torch.where(kept, rows, 0.0)
        else:
            rows = rows.new_zeros(len(kept)).index_copy(0, row, rows)
        return rows, target_weight[row].sum()

    def _shares(self) -> Tensor:
        """Return 1 for tokens with a share of the label smoothing, 0 for masked ones: (V,)."""
        forks = self.forks.detach()
        ones = torch.ones(self.vocab, dtype=torch.float64, device=forks.weight.device)
        if forks.bias is None or vmapped() or bool(forks.bias.isfinite().all()):
            return ones
        zero_state = forks.weight.new_zeros(1, forks.weight.shape[1])
        return ones.masked_fill(forks.all_log_probs(zero_state)[0] == -torch.inf, 0.0)

    def _spread(self, hidden: Tensor, class_weight: Tensor | None) -> Tensor:
        """Return Σ_v m_v log p_v with the class weights m, or 1: (N,), float64."""
        mass = self._shares()
        if class_weight is not None:
            mass = mass * class_weight.detach()
        below = self.forks.masses_below(mass)
        return self.by_blocks(lambda h: self.forks.sum_log_probs(h, below), hidden).double()

    def _soft(self, hidden: Tensor, loss: CrossEntropy) -> Tensor:
        """Return the loss of each row (N,) for target probabilities (N, V); float64."""
        t = (1 - loss.label_smoothing) * loss.targets
        if loss.label_smoothing:
            t = t + (loss.label_smoothing / self.vocab * self._shares()).to(t)
        if loss.class_weight is not None:
            t = t * loss.class_weight
        parts, start = [], 0
        for rows in self.blocks(hidden):
            target_rows = t[start : start + len(rows)]
            parts.append(recomputed(self._soft_rows, rows, target_rows))
            start += len(rows)
        return torch.cat(parts) if parts else self._soft_rows(hidden, t)

    def _soft_rows(self, hidden: Tensor, targets: Tensor) -> Tensor:
        log_p = self.forks.all_log_probs(hidden)
        # 0 · log 0 is 0: a token with target probability 0 may be masked.
        return -torch.where(targets == 0, 0.0, targets * log_p).double().sum(1)

    def top(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k best tokens by best-first search: see `tree_search`."""
        return best_tokens(self.forks, hidden, k)

    def draw(self, hidden: Tensor, uniform: Uniform) -> Tensor:
        """Walk from the root: the i-th decision takes the i-th random number. (N,)."""
        tree = self.forks.tree
        node = torch.full((len(hidden),), tree.vocab if tree.forks else 0, device=hidden.device)
        row = torch.arange(len(hidden), device=hidden.device)
        step = 0
        while len(row) and tree.forks:
            branches = self.forks.decide(hidden, row, node[row] - tree.vocab)
            node[row] = branches.child[_choose(branches.log_p, branches.start, uniform(step)[row])]
            row = row[node[row] >= tree.vocab]
            step += 1
        return node

    def explain(self, rows: int) -> list[str]:
        """Return the costs of questions about a number of rows, one line each."""
        width, vocab = self.forks.weight.shape[1], self.vocab
        row = width * self.forks.weight.element_size()
        path = self.path()
        pairs = path * rows
        return [
            f"  log_prob, loss          {path:.1f} rows of {row:,} bytes a token, expected: "
            f"{2e-9 * pairs * width:,.4f} GFLOP",
            f"  a loss with gradients   {6e-9 * pairs * width:,.4f} GFLOP; all tokens would take "
            f"{6e-9 * rows * vocab * width:,.2f}",
            "  argmax, top-k           as many forks as the search opens; a sample: one path",
            f"  all tokens, smoothing   1 product with {vocab - 1:,} rows: "
            f"{2e-9 * rows * vocab * width:,.2f} GFLOP",
        ]


def _choose(log_p: Tensor, start: Tensor, u: Tensor) -> Tensor:
    """Return the branch of each fork with P(before) <= u < P(up to it), as an index: (P,)."""
    p = log_p.exp()
    if bool(p.isnan().any()):
        raise ValueError("decisions must be numbers to draw a token; got NaN")
    sizes = torch.diff(start, append=start.new_tensor([len(p)]))
    branch = torch.arange(int(sizes.max()), device=p.device)
    inside = branch < sizes[:, None]
    padded = torch.where(inside, p[(start[:, None] + branch).clamp(max=len(p) - 1)], 0.0)
    total = padded.cumsum(1)
    # The sum may be below 1 by rounding; a branch of probability 0 must not be chosen.
    last = torch.where(padded > 0, branch, 0).amax(1)
    chosen = torch.minimum((total <= u[:, None]).sum(1), last)
    return start + chosen
