"""`TreeFactors`: answers of a hierarchical head, from decisions on paths.

In:  rows of hidden states (N, D), the parameters of the forks.
Out: log-probabilities, losses, best tokens and samples; see `Factors`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmhead.scores.protocol import recomputed
from lmhead.scores.row_loss import CrossEntropy, RowSums, WeightedLoss
from lmhead.sweep import accumulation_dtype, kernels
from lmhead.vocab.factors import Factors, Uniform, vmapped
from lmhead.vocab.tree_paths import Forks


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
        masked = self._masked() if loss.label_smoothing else None
        weighted = loss.weighted(self.vocab, torch.float64, masked)
        counted, index = self.counted(hidden, weighted.active)
        sums = RowSums()
        if weighted.mix is not None:
            below = self.forks.masses_below(weighted.mix)
            mixed = self.by_blocks(lambda h: self.forks.sum_log_probs(h, below), counted)
            sums = sums._replace(mixed=mixed.double())
        if weighted.ids is None:
            sums = sums._replace(softened=self._softened(hidden, weighted))
        elif vmapped():  # no size may depend on the targets
            log_p = self.forks.all_log_probs(counted).gather(1, weighted.ids[:, None])
            sums = sums._replace(picked=log_p.double())
        else:
            state = torch.arange(len(counted), device=hidden.device)
            log_p = self.forks.token_log_prob(counted, state, weighted.ids[index])
            sums = sums._replace(picked=log_p[:, None])
        made = self.reduced(hidden, loss, weighted, index, sums)
        return made.to(accumulation_dtype(hidden.dtype))

    def _masked(self) -> Tensor | None:
        """Return the tokens of probability 0, (V,) bool, if there are any."""
        forks = self.forks.detach()
        if forks.bias is None or vmapped() or bool(forks.bias.isfinite().all()):
            return None
        zero_state = forks.weight.new_zeros(1, forks.weight.shape[1])
        return forks.all_log_probs(zero_state)[0] == -torch.inf

    def _softened(self, hidden: Tensor, weighted: WeightedLoss) -> Tensor:
        """Return Σ_v t_v log p_v for target probabilities, with their class weights: (N,)."""
        t = weighted.soft
        assert t is not None
        t = t if weighted.soft_weight is None else t * weighted.soft_weight
        parts, start = [], 0
        for rows in self.blocks(hidden):
            parts.append(recomputed(self._soft_rows, rows, t[start : start + len(rows)]))
            start += len(rows)
        return torch.cat(parts) if parts else self._soft_rows(hidden, t)

    def _soft_rows(self, hidden: Tensor, targets: Tensor) -> Tensor:
        log_p = self.forks.all_log_probs(hidden)
        # 0 · log 0 is 0: a token with target probability 0 may be masked.
        return torch.where(targets == 0, 0.0, targets * log_p).double().sum(1)

    @torch.no_grad()
    def top(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k best tokens by best-first search in the core; see `Factors`.

        A subtree's probability bounds that of each of its tokens. A heap per row opens forks in the
        order of their probability, and once k tokens are found, none below the k-th: in a trained
        distribution tens of tens of thousands. If a decision that was read is NaN, the ids of that
        row are -1 and its values NaN.
        """
        forks, hidden = self.forks.detach(), hidden.detach().contiguous()
        weight, bias, tree, _ = forks
        core = kernels.for_pairs(hidden, weight)
        plain = bias is None or (bias.dtype == weight.dtype and kernels.readable(bias))
        if core is None or not plain or not tree.forks:
            return super().top(hidden, k)
        values = torch.empty(len(hidden), k, dtype=torch.float64)
        ids = torch.empty(len(hidden), k, dtype=torch.int64)
        opened = torch.empty(len(hidden), dtype=torch.int64)
        arrays = (hidden, weight, None if bias is None else bias.contiguous())
        tables = (tree.tables.start, tree.tables.child, tree.vocab)
        core.tree_best(*arrays, *tables, values, ids, opened, kernels.threads())
        return values, ids

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
