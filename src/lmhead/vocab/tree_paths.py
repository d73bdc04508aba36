"""The probability of a token as a product of decisions.

At a fork with c branches and rows w_1 .. w_{c-1}, the scores are z_i = w_i · h + b_i, and z_c = 0:

    p(branch i | fork) = exp z_i / Σ_j exp z_j,      log p(token) = Σ_path log p(branch | fork)

With two branches that is σ(z) for the first and σ(-z) for the second. All functions here take rows
of hidden states (N, D), the weight (V - 1, D) and bias (V - 1,) of the forks; they are
differentiable.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.sweep import accumulation_dtype
from lmhead.vocab.row_pairs import pair_products
from lmhead.vocab.tree import Tree


class Decided(NamedTuple):
    """All branches of some forks, each for one hidden state."""

    start: Tensor  # (P,), index of the first branch of a fork
    log_p: Tensor  # (E,), log p(branch | fork), float64; at most 0
    child: Tensor  # (E,), the node that a branch leads to
    owner: Tensor  # (E,), index of the branch's fork among those given


class Forks(NamedTuple):
    """The tree with the parameters of all decisions."""

    weight: Tensor  # (V - 1, D)
    bias: Tensor | None  # (V - 1,) or None
    tree: Tree  # the tree of the forks
    sparse: bool = False  # whether the weight's gradient is sparse

    def detach(self) -> Forks:
        """Return the same, detached from the autograd graph."""
        bias = None if self.bias is None else self.bias.detach()
        return self._replace(weight=self.weight.detach(), bias=bias)

    def decide(self, hidden: Tensor, state: Tensor, fork: Tensor) -> Decided:
        """Return the branches of `fork` (P,) for the hidden states `state` (P,)."""
        tables = self.tree.on(hidden.device)
        edge, owner, start = _spread(tables.start, fork)
        child = tables.child[edge]
        if self.tree.is_binary:
            z = self._scores(hidden, state, fork)
            log_p = torch.stack([F.logsigmoid(z), F.logsigmoid(-z)], 1).reshape(-1)
            return Decided(start, log_p, child, owner)
        row, pair, _ = _spread(tables.first_row, fork)
        z = self._scores(hidden, state[pair], row)
        # The last branch of a fork has no row: its score is 0.
        index = torch.arange(len(row), device=row.device) + pair
        scores = torch.zeros_like(edge, dtype=z.dtype).index_copy(0, index, z)
        return Decided(start, _log_softmax(scores, owner, len(fork)), child, owner)

    def _scores(self, hidden: Tensor, state: Tensor, row: Tensor) -> Tensor:
        z = pair_products(hidden, self.weight, state, row, sparse=self.sparse)
        if self.bias is None:
            return z
        # As products with 1, so that the bias gradient is summed as precisely as the weight's.
        ones, first = self.bias.new_ones(1, 1), torch.zeros_like(row)
        return z + pair_products(ones, self.bias[:, None], first, row)

    def token_log_prob(self, hidden: Tensor, state: Tensor, ids: Tensor) -> Tensor:
        """Return log p of `ids` (M,) for the hidden states `state` (M,): (M,), float64.

        O(log V) products each. Sums run from the root down, as in `all_log_probs`.
        """
        steps = self.tree.paths(ids)
        decided = self.decide(hidden, state[steps.owner], steps.fork)
        chosen = decided.log_p[decided.start + steps.branch]
        return chosen.new_zeros(len(ids)).index_add(0, steps.owner, chosen)

    def all_log_probs(self, hidden: Tensor, *, exact: bool = False) -> Tensor:
        """Return log p of every token, (N, V): one product with all rows, then sums."""
        tree, tables = self.tree, self.tree.on(hidden.device)
        log_p = self._edges(hidden, exact=exact)  # (E, N)
        mass = log_p.new_zeros(1, len(hidden))  # of the forks of a level
        levels = []
        for a, b in zip(tree.levels.tolist(), tree.levels.tolist()[1:], strict=False):
            edges = slice(int(tree.start[a]), int(tree.start[b]))
            child = tables.child[edges]
            level_log_p = mass[tables.parent[child] - a] + log_p[edges]
            levels.append(level_log_p)
            mass = level_log_p[child >= tree.vocab]
        if not levels:
            return log_p.new_zeros(len(hidden), 1) + 0 * hidden.sum(1, keepdim=True).to(log_p)
        ids = torch.empty_like(tables.child[: tree.vocab])
        leaves = (tables.child < tree.vocab).nonzero()[:, 0]
        ids[tables.child[leaves]] = leaves
        return torch.cat(levels)[ids].T

    def sum_log_probs(self, hidden: Tensor, below: Tensor) -> Tensor:
        """Return Σ_v m_v log p_v, (N,): Σ over branches of (Σ of m below) · log p(branch | fork).

        `below` (nodes,) is `masses_below(m)`.
        """
        mass = below[self.tree.on(hidden.device).child]
        log_p = self._edges(hidden)
        if bool((mass == 0).any()):  # 0 · log 0 is 0
            log_p = log_p.masked_fill((mass == 0)[:, None], 0.0)
        return mass.to(log_p) @ log_p

    def masses_below(self, mass: Tensor) -> Tensor:
        """Return for every node the sum of `mass` (V,) over the tokens below: (nodes,), float64."""
        tree, tables = self.tree, self.tree.on(mass.device)
        total = torch.cat([mass.double(), mass.new_zeros(tree.forks, dtype=torch.float64)])
        levels = tree.levels.tolist()
        for a, b in zip(reversed(levels[:-1]), reversed(levels[1:]), strict=True):
            child = tables.child[int(tree.start[a]) : int(tree.start[b])]
            total.index_add_(0, tree.vocab + tables.parent[child], total[child])
        return total

    def _edges(self, hidden: Tensor, *, exact: bool = False) -> Tensor:
        """Return log p(branch | fork) of all branches, (E, N)."""
        tree, n = self.tree, len(hidden)
        rows = len(self.weight)
        if exact:
            row = torch.arange(rows, device=hidden.device).repeat_interleave(n)
            state = torch.arange(n, device=hidden.device).repeat(rows)
            z = pair_products(hidden, self.weight, state, row).reshape(rows, n)
        else:
            wide = accumulation_dtype(hidden.dtype)
            z = self.weight.to(wide) @ hidden.to(wide).T
        if self.bias is not None:
            z = z + self.bias.to(z.dtype)[:, None]
        if tree.is_binary:
            return torch.stack([F.logsigmoid(z), F.logsigmoid(-z)], 1).reshape(2 * rows, n)
        tables = tree.on(hidden.device)
        owner = tables.parent[tables.child]

        last = tables.start[1:] - 1
        keep = torch.ones_like(owner, dtype=torch.bool).index_fill_(0, last, False)
        scores = z.new_zeros(len(owner), n).index_copy(0, keep.nonzero()[:, 0], z)
        return _log_softmax(scores, owner, tree.forks)


def _spread(start: Tensor, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the entries of the groups `which`, one group after the other.

    Group g has the entries start[g] to start[g + 1]. Returns the entries, the index in `which` of
    each entry's group, and the index of the first entry of each group.
    """
    sizes = start[which + 1] - start[which]
    begin = sizes.cumsum(0) - sizes
    owner = torch.repeat_interleave(sizes)
    entry = torch.arange(len(owner), device=which.device) + (start[which] - begin)[owner]
    return entry, owner, begin


def _log_softmax(scores: Tensor, owner: Tensor, groups: int) -> Tensor:
    """Compute log-softmax within groups: scores (E, ...), owner (E,), ascending."""
    shape = (groups, *scores.shape[1:])
    index = owner.reshape(-1, *[1] * (scores.dim() - 1)).expand_as(scores)
    largest = (
        scores.detach()
        .new_full(shape, -torch.inf)
        .scatter_reduce(0, index, scores.detach(), "amax")
    )
    shifted = scores - largest[owner]
    total = scores.new_zeros(shape).index_add(0, owner, shifted.exp())
    return shifted - total.log()[owner]
