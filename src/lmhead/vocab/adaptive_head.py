"""`AdaptiveHead`: frequent tokens in full width, rare ones in clusters of reduced width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lmhead import checks
from lmhead.vocab.cluster_loss import cluster_loss
from lmhead.vocab.cluster_top import cluster_top
from lmhead.vocab.clusters import Clusters
from lmhead.vocab.cutoffs import check_cutoffs, choose_cutoffs, widths
from lmhead.vocab.factored_head import FactoredHead
from lmhead.vocab.frequencies import check_frequencies


class AdaptiveFactors(Clusters):
    """The distribution of an adaptive head: loss and top-k read only the clusters they need."""

    cross_entropy = cluster_loss
    top = cluster_top


class AdaptiveHead(FactoredHead):
    """Adaptive softmax (Grave et al., 2017): the cost of a token depends on its frequency.

    Equivalent to: nn.AdaptiveLogSoftmaxWithLoss(hidden_size, vocab_size, cutoffs, div_value), with
    `ignore_index`, reductions, label smoothing, class weights, half precisions, any token order.

    The most frequent tokens, the shortlist, and one entry per cluster share a softmax of full width
    D. The tokens of cluster c share a softmax of width D / div_value^(c + 1).

    Args:
        hidden_size: D.
        vocab_size: V.
        cutoffs: ends of the shortlist and of the clusters, ascending: [2000, 10000] is a shortlist
            of 2000 tokens and clusters of 8000 and V - 10000. None lets `choose_cutoffs` decide.
        frequencies: (V,), how often each token occurs, for their order and the cut-offs. None
            assumes that ids are sorted by frequency, most frequent first.
        div_value: ratio of the widths of successive clusters.
        bias: True for a bias everywhere, "head" for one in the head only, as in torch. It
            is initialised to the log of `frequencies` if these are given.
        device: where to put the parameters.
        dtype: the type of the parameters.

    Attributes:
        cutoffs: as given or chosen.
        head_weight: (S + C, D), the shortlist and the clusters.
        projections: P_c, (D_c, D) each.
        weights: W_c, (V_c, D_c) each.
        head_bias: (S + C,) or None.
        biases: (V_c,) each, or empty.
        word_at: (V,), the tokens in the order of the parameters' rows; a buffer, saved with them.

    >>> head = AdaptiveHead(64, 1000, cutoffs=[100, 400])
    >>> hidden, targets = torch.randn(8, 64), torch.randint(1000, (8,))
    >>> loss = nn.functional.cross_entropy(head(hidden), targets)
    >>> loss.backward()
    >>> head(hidden).topk(3).indices.shape
    torch.Size([8, 3])
    """

    word_at: Tensor
    place_of: Tensor
    head_weight: Tensor
    head_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        cutoffs: Sequence[int] | None = None,
        frequencies: Any = None,
        div_value: float = 4.0,
        bias: bool | Literal["head"] = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, vocab_size)
        checks.check_number("div_value", div_value, low=1.0)
        if bias not in (True, False, "head"):
            raise ValueError(f"bias must be True, False or 'head'; got {bias!r}")
        word_at = _token_order(vocab_size, frequencies)
        self._shares: Tensor | None = None
        if frequencies is not None:
            self._shares = check_frequencies(frequencies, vocab_size)[word_at]
        if cutoffs is None:
            cutoffs = choose_cutoffs(
                vocab_size, hidden_size, frequencies=frequencies, div_value=div_value
            )
        self.cutoffs = check_cutoffs(cutoffs, vocab_size)
        self.div_value = div_value
        sizes = widths(hidden_size, len(self.cutoffs), div_value)
        ends = (*self.cutoffs, vocab_size)

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        counts = [b - a for a, b in pairwise(ends)]
        self.head_weight = empty(ends[0] + len(self.cutoffs), hidden_size)
        self.register_parameter("head_bias", empty(len(self.head_weight)) if bias else None)
        self.projections = nn.ParameterList(empty(d, hidden_size) for d in sizes)
        self.weights = nn.ParameterList(empty(n, d) for n, d in zip(counts, sizes, strict=True))
        self.biases = nn.ParameterList(empty(n) for n in counts if bias is True)
        self.register_buffer("word_at", word_at.to(device))
        self.register_buffer("place_of", torch.empty_like(self.word_at), persistent=False)
        self._order()
        self.reset_parameters()

    @classmethod
    def from_torch(
        cls, module: nn.AdaptiveLogSoftmaxWithLoss, *, frequencies: Any = None
    ) -> AdaptiveHead:
        """Return a head on the weights of torch's adaptive softmax: shared, not copied.

        `frequencies` (V,) gives the order of the tokens if the ids of torch's module are ranks by
        frequency; None if both use the same ids.

        >>> theirs = nn.AdaptiveLogSoftmaxWithLoss(16, 100, [10, 40])
        >>> head, hidden = AdaptiveHead.from_torch(theirs), torch.randn(5, 16)
        >>> torch.equal(head(hidden).argmax(-1), theirs.predict(hidden))
        True
        """
        if not isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
            raise TypeError(
                f"module must be an nn.AdaptiveLogSoftmaxWithLoss; got {type(module).__name__}"
            )
        bias: Literal[False, "head"] = "head" if module.head.bias is not None else False
        head = cls(
            module.in_features,
            module.n_classes,
            cutoffs=[int(c) for c in module.cutoffs[:-1]],
            frequencies=frequencies,
            div_value=float(module.div_value),
            bias=bias,
            device="meta",
        )
        head.head_weight, head.head_bias = module.head.weight, module.head.bias
        tails: Any = module.tail
        for c, (projection, linear) in enumerate(tails):
            head.projections[c], head.weights[c] = projection.weight, linear.weight
        head.word_at = _token_order(module.n_classes, frequencies).to(module.head.weight.device)
        head._order()
        return head.train(module.training)

    def reset_parameters(self) -> None:
        """Initialize as `nn.Linear`: uniform within ±1 / √(input width); biases by frequency."""
        for weight in (self.head_weight, *self.projections, *self.weights):
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        biases = [] if self.head_bias is None else [(self.head_bias, self.hidden_size)]
        biases += [(b, w.shape[1]) for b, w in zip(self.biases, self.weights, strict=False)]
        for bias, width in biases:
            nn.init.uniform_(bias, -1 / math.sqrt(width), 1 / math.sqrt(width))
        if self._shares is not None:
            self._start_from(self._shares)

    @torch.no_grad()
    def _start_from(self, shares: Tensor) -> None:
        """Set biases to the log of the shares (V,) of tokens and clusters, most frequent first.

        A token that never occurs counts for half of the rarest one.
        """
        shares = torch.where(shares > 0, shares, shares[shares > 0].min() / 2)
        first, *clusters = torch.tensor_split(shares, list(self.cutoffs))
        if self.head_bias is not None:
            masses = [part.sum()[None] for part in clusters]
            self.head_bias.copy_(torch.cat([first, *masses]).log())
        for bias, part in zip(self.biases, clusters, strict=False):
            bias.copy_((part / part.sum()).log())

    def factors(self) -> AdaptiveFactors:
        """Return the distribution with the parameters as they are now."""
        biases = tuple(self.biases) or (None,) * len(self.weights)
        return AdaptiveFactors(
            head_weight=self.head_weight,
            head_bias=self.head_bias,
            projections=tuple(self.projections),
            weights=tuple(self.weights),
            biases=biases,
            ends=(*self.cutoffs, self.vocab_size),
            place_of=None if self._sorted else self.place_of,
            word_at=None if self._sorted else self.word_at,
            max_bytes=self.max_bytes,
        )

    def _order(self) -> None:
        """Validate `word_at` and compute its inverse."""
        token_ids = torch.arange(self.vocab_size, device=self.word_at.device)
        self.place_of = torch.empty_like(self.word_at)
        if self.word_at.device.type == "meta":
            self._sorted = False
            return
        if not torch.equal(self.word_at.sort().values, token_ids):
            ends = f"{int(self.word_at.min())} to {int(self.word_at.max())}"
            raise ValueError(
                f"word_at must hold each of {self.vocab_size} tokens once; got "
                f"{len(set(self.word_at.tolist()))} tokens, {ends}"
            )
        self.place_of[self.word_at] = token_ids
        self._sorted = torch.equal(self.word_at, token_ids)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._order()

    def extra_repr(self) -> str:
        """Return what `print(model)` shows in parentheses."""
        cuts = f"cutoffs={list(self.cutoffs)}, div_value={self.div_value:g}"
        return f"{self.hidden_size}, {self.vocab_size}, {cuts}, bias={self.head_bias is not None}"


def _token_order(vocab_size: int, frequencies: Any) -> Tensor:
    """Return tokens from the most frequent to the rarest; lowest id first among equals."""
    if frequencies is None:
        return torch.arange(vocab_size)
    return check_frequencies(frequencies, vocab_size).argsort(descending=True, stable=True)
