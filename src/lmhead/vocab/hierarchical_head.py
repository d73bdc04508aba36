"""`HierarchicalHead`: a token is a path in a tree, and costs O(log V) to train on.

In:  hidden states (..., D).
Out: `LazyLogits` of normalised log-probabilities (..., V) that are not built.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lmhead.vocab.factored_head import FactoredHead
from lmhead.vocab.frequencies import check_counts
from lmhead.vocab.tree import Tree
from lmhead.vocab.tree_factors import TreeFactors
from lmhead.vocab.tree_files import read_tree
from lmhead.vocab.tree_makers import balanced, check_arity, huffman
from lmhead.vocab.tree_paths import Forks

# Standard deviation of a decision's initial score for hidden states with entries of size 1.
_FIRST_SCORE = 0.1


class HierarchicalHead(FactoredHead):
    """The output layer as a tree: loss and log-probabilities read one path, not all tokens.

    Equivalent to: log p(token) = Σ_path log_softmax([w · h + b of the fork's rows, 0])[branch]

    Args:
        hidden_size: D.
        vocab_size: V.
        tree: "huffman" puts frequent tokens near the root and needs `frequencies`; "balanced" puts
            all at the same depth; or a tree of your own: nested lists `[[0, 1], 2]`,
            `{"forks": ...}`, a JSON file of either, or a `Tree`.
        frequencies: (V,), counts or probabilities of the tokens. The bias is initialised from
            them.
        arity: number of branches of a fork, for "huffman" and "balanced".
        bias: whether decisions have a bias.
        sparse: give the weight a sparse gradient, for `torch.optim.SparseAdam` and the like.
        device: where to put the parameters.
        dtype: the type of the parameters.

    Attributes:
        weight: (V - 1, D), whatever the tree: c - 1 rows for a fork with c branches.
        bias: (V - 1,) or None.
        parents: (tokens and forks, 2), the tree as saved in checkpoints.
        tree: the `Tree`.

    Initially the distribution is close to the frequencies if given, else to the even split of
    every fork: weights are small, and the bias is the log of the branches' ratio.

    >>> head = HierarchicalHead(16, 1000, frequencies=1 / torch.arange(1, 1001))
    >>> hidden, targets = torch.randn(4, 16), torch.tensor([0, 3, 999, -100])
    >>> loss = torch.nn.functional.cross_entropy(head(hidden), targets)
    >>> loss.backward()
    >>> head(hidden).topk(5).indices.shape
    torch.Size([4, 5])
    """

    weight: Tensor
    bias: Tensor | None
    parents: Tensor

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        tree: str | Path | Tree | dict[str, Any] | list[Any] | tuple[Any, ...] | int = "huffman",
        frequencies: Any = None,
        arity: int = 2,
        bias: bool = True,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, vocab_size)
        check_arity(arity)
        counts = None if frequencies is None else check_counts(frequencies, vocab_size)
        self.tree = _make(tree, vocab_size, counts, arity)
        self.sparse = sparse
        self._counts = counts
        rows = vocab_size - 1
        self.weight = nn.Parameter(torch.empty(rows, hidden_size, device=device, dtype=dtype))
        start = torch.empty(rows, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if start is None else nn.Parameter(start))
        self.register_buffer("parents", self.tree.parents)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set small random weights; biases to the log ratio of the branches' frequencies."""
        with torch.no_grad():
            self.weight.normal_(0.0, _FIRST_SCORE / math.sqrt(self.hidden_size))
            if self.bias is not None:
                self.bias.zero_()
                if self._counts is not None and self.tree.forks:
                    self.bias.copy_(_log_ratios(self.tree, self._counts))

    def factors(self) -> TreeFactors:
        """Return the distribution with the parameters as they are now."""
        forks = Forks(self.weight, self.bias, self.tree, self.sparse)
        return TreeFactors(forks, self._expected_path, self.max_bytes)

    @property
    def expected_path(self) -> float:
        """Mean number of rows of the weight that a token reads, by the frequencies if they are
        known, else by the even split of every fork.
        """
        return self._expected_path()

    def _expected_path(self) -> float:
        tables = self.tree.tables
        rows = _sum_over_paths(self.tree, torch.diff(tables.first_row).double())
        if self._counts is not None:
            p = self._counts / self._counts.sum()
        else:
            p = torch.exp(-_sum_over_paths(self.tree, torch.diff(tables.start).double().log()))
        return float((p * rows).sum())

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Replace the tree by that of the checkpoint."""
        parents = state_dict.get(prefix + "parents")
        tree = None
        if isinstance(parents, Tensor) and parents.device.type != "meta":
            try:
                tree = Tree.from_parents(self.vocab_size, parents)
            except ValueError as error:
                args[-1].append(f"{prefix}parents: {error}")
                return
            self.parents = torch.empty(parents.shape, dtype=torch.int64, device=self.parents.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if tree is not None and tree != self.tree:
            self.tree, self._counts = tree, None

    def explain(self) -> str:
        """Return the sizes of the head and the cost of a token."""
        weight = self.weight.numel() + (0 if self.bias is None else self.bias.numel())
        return "\n".join(
            [
                f"{self!r}",
                f"  {self.tree!r}, mean depth {float(self.tree.depths.double().mean()):.1f}",
                f"  parameters              {weight * self.weight.element_size():,} bytes; "
                f"the tree {self.parents.numel() * self.parents.element_size():,}",
                *self.factors().explain(1),
            ]
        )

    def extra_repr(self) -> str:
        """Return what `print(model)` shows in parentheses."""
        depth = int(self.tree.depths.max())
        parts = [self.hidden_size, self.vocab_size, f"arity={self.tree.arity}", f"depth={depth}"]
        parts.append(f"bias={self.bias is not None}")
        if self.sparse:
            parts.append("sparse=True")
        return ", ".join(map(str, parts))


def _make(tree: Any, vocab: int, counts: Tensor | None, arity: int) -> Tree:
    if isinstance(tree, str) and tree == "huffman":
        if counts is None:
            raise ValueError(
                "frequencies must be given for tree='huffman', one per token; got None "
                "(tree='balanced' does without)"
            )
        return huffman(counts, arity=arity)
    if isinstance(tree, str) and tree == "balanced":
        return balanced(vocab, arity=arity)
    if arity != 2:
        raise ValueError(
            f"arity is for tree='huffman' and 'balanced'; got {arity} with a given tree"
        )
    return read_tree(tree, vocab)


def _sum_over_paths(tree: Tree, per_fork: Tensor) -> Tensor:
    """Return the sum of `per_fork` (F,) along the path of every token: (V,)."""
    tables = tree.tables
    total = torch.zeros(tree.vocab + tree.forks, dtype=per_fork.dtype)
    for a, b in zip(tree.levels.tolist(), tree.levels.tolist()[1:], strict=False):
        child = tables.child[int(tree.start[a]) : int(tree.start[b])]
        parent = tables.parent[child]
        total[child] = total[tree.vocab + parent] + per_fork[parent]
    return total[: tree.vocab]


def _log_ratios(tree: Tree, counts: Tensor) -> Tensor:
    """Return the log of each branch's count over that of the last branch of its fork: (V - 1,).

    A token with count 0 gets half the count of the rarest other token.
    """
    counts = counts + 0.5 * counts[counts > 0].min()
    weight = torch.zeros(tree.vocab - 1, 1)
    below = Forks(weight, None, tree).masses_below(counts)
    log = below[tree.tables.child].log()
    last = tree.tables.start[1:] - 1
    owner = tree.tables.parent[tree.tables.child]
    ratio = log - log[last][owner]
    keep = torch.ones(len(ratio), dtype=torch.bool)
    keep[last] = False
    return ratio[keep]
