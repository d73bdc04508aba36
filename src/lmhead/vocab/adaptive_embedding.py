"""`AdaptiveEmbedding`: the input side of an adaptive head, on the same weights."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead import checks
from lmhead.vocab.adaptive_head import AdaptiveHead


class AdaptiveEmbedding(nn.Module):
    """Token embeddings whose width follows the frequency of tokens (Baevski and Auli, 2019).

    Equivalent to: head_weight[place] in the shortlist, weights[c][place] @ projections[c] in
    cluster c, where place is the rank of the token by frequency within its part.

    Args:
        head: its weights are shared, not copied: trained from both sides.
        tie_projections: whether the projections are shared as well; False gives the embedding its
            own, (D_c, D) each.

    >>> head = AdaptiveHead(16, 100, cutoffs=[10, 40])
    >>> embedding = AdaptiveEmbedding(head)
    >>> embedding(torch.tensor([[3, 99]])).shape
    torch.Size([1, 2, 16])
    >>> embedding.head_weight is head.head_weight
    True
    """

    def __init__(self, head: AdaptiveHead, *, tie_projections: bool = True) -> None:
        super().__init__()
        if not isinstance(head, AdaptiveHead):
            raise TypeError(f"head must be an AdaptiveHead; got {type(head).__name__}")
        self.head_weight, self.weights = head.head_weight, head.weights
        self.tie_projections = tie_projections
        if tie_projections:
            self.projections = head.projections
        else:
            self.projections = nn.ParameterList(torch.empty_like(p) for p in head.projections)
            for projection in self.projections:
                bound = 1 / math.sqrt(projection.shape[0])
                nn.init.uniform_(projection, -bound, bound)
        # In a list, so that the head is not registered as a submodule.
        self._head = [head]

    @property
    def num_embeddings(self) -> int:
        """V, as `nn.Embedding` calls it."""
        return self._head[0].vocab_size

    @property
    def embedding_dim(self) -> int:
        """D, as `nn.Embedding` calls it."""
        return self._head[0].hidden_size

    def forward(self, ids: Tensor) -> Tensor:
        """Return vectors (..., D) for ids (...)."""
        checks.check_ids("ids", ids, self.num_embeddings)
        factors = self._head[0].factors()
        places = factors.places(ids.reshape(-1).long())
        part_of = factors.part_of(places)
        short = torch.where(part_of == 0, places, 0)
        out = F.embedding(short, self.head_weight) * (part_of == 0)[:, None]
        pairs = zip(factors.parts[1:], self.weights, self.projections, strict=True)
        for part, weight, projection in pairs:
            rows = (part_of == part.number).nonzero()[:, 0]
            narrow = F.embedding(places[rows] - part.start, weight)
            out = out.index_add(0, rows, (narrow @ projection).to(out.dtype))
        return out.reshape(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows in parentheses."""
        tied = f"tie_projections={self.tie_projections}"
        return f"{self.num_embeddings}, {self.embedding_dim}, {tied}"
