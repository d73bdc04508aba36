"""`Clusters`: the distribution of an adaptive head, and its answers.

Tokens are sorted by frequency (the rank of a token is its place), and split into a shortlist and
clusters. The head scores the tokens of the shortlist and, as one entry each, the clusters; a
cluster scores its own tokens, on hidden states of fewer dimensions:

    log p(token) = log softmax(W₀ h)[token]                                     in the shortlist
    log p(token) = log softmax(W₀ h)[cluster] + log softmax(W_c P_c h)[token]   in cluster c

Every softmax is one sweep, so no answer builds its logits, and a question about few tokens
does not read the other clusters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.scores.row_loss import RowSums
from lmhead.sweep import Pointwise, Questions, Source, accumulation_dtype, kernels, row_answers
from lmhead.sweep.small_batch import small_sums
from lmhead.sweep.source import without_autocast
from lmhead.vocab.factors import Factors, Uniform, inverse_cdf


@dataclass(frozen=True)
class Part:
    """The softmax of the head or of a cluster: its range in the order of frequency."""

    number: int  # 0 for the head, c + 1 for cluster c
    start: int  # place of the first token
    stop: int  # place after the last token

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True)
class Clusters(Factors):
    """The tensors of an adaptive head."""

    head_weight: Tensor  # (S + C, D), for S tokens of the shortlist and C clusters
    head_bias: Tensor | None  # (S + C,) or None
    projections: tuple[Tensor, ...]  # (D_c, D) each
    weights: tuple[Tensor, ...]  # (V_c, D_c) each
    biases: tuple[Tensor | None, ...]  # (V_c,) or None each
    ends: tuple[int, ...]  # place after the last token of the shortlist and of every cluster
    place_of: Tensor | None = None  # (V,), place of each token by frequency; None: its id
    word_at: Tensor | None = None  # (V,), its inverse
    max_bytes: int | None = None
    name: str = "AdaptiveHead"

    @property
    def vocab(self) -> int:  # type: ignore[override]
        """V."""
        return self.ends[-1]

    @property
    def shortlist(self) -> int:
        """S."""
        return self.ends[0]

    @property
    def parts(self) -> tuple[Part, ...]:
        """The shortlist, then the clusters."""
        starts = (0, *self.ends[:-1])
        return tuple(Part(i, a, b) for i, (a, b) in enumerate(zip(starts, self.ends, strict=True)))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all parameters."""
        biases = (b for b in (self.head_bias, *self.biases) if b is not None)
        return (self.head_weight, *self.projections, *self.weights, *biases)

    def map(self, change: Callable[[Tensor], Tensor]) -> Clusters:
        """Return the same with every floating tensor changed."""
        return replace(
            self,
            head_weight=change(self.head_weight),
            head_bias=None if self.head_bias is None else change(self.head_bias),
            projections=tuple(map(change, self.projections)),
            weights=tuple(map(change, self.weights)),
            biases=tuple(None if b is None else change(b) for b in self.biases),
        )

    # Places of tokens ---------------------------------------------------------------------------

    def places(self, ids: Tensor) -> Tensor:
        """Return the places of tokens in the order of frequency."""
        return ids if self.place_of is None else self.place_of[ids]

    def tokens(self, places: Tensor) -> Tensor:
        """Return the tokens at places."""
        return places if self.word_at is None else self.word_at[places]

    def part_of(self, places: Tensor) -> Tensor:
        """Return 0 for the shortlist, c + 1 for cluster c."""
        ends = torch.tensor(self.ends[:-1], device=places.device)
        return torch.bucketize(places.contiguous(), ends, right=True)

    def entries(self, places: Tensor) -> Tensor:
        """Return the entry of the head that a place goes through: its own, or its cluster's."""
        part = self.part_of(places)
        return torch.where(part == 0, places, self.shortlist + part - 1)

    # The softmaxes ------------------------------------------------------------------------------

    def source(self, part: Part, hidden: Tensor) -> Source:
        """Return the logits of a part, for rows (N, D)."""
        if part.number == 0:
            return Source((hidden,), (self.head_weight,), self.head_bias, Pointwise())
        c = part.number - 1
        return Source((self.project(c, hidden),), (self.weights[c],), self.biases[c], Pointwise())

    def project(self, c: int, hidden: Tensor) -> Tensor:
        """Return P_c h, (N, D_c), in float32 for half precisions."""
        dtype = accumulation_dtype(hidden.dtype)
        with without_autocast(hidden.device):
            return F.linear(hidden.to(dtype), self.projections[c].to(dtype))

    def answers(
        self, part: Part, hidden: Tensor, *, ids: Tensor | None = None, entropy: bool = False
    ) -> RowSums:
        """Sweep over the tokens of a part."""
        source, most = self.source(part, hidden), self.max_bytes
        if not entropy and reads_one_row(source):
            z = source.float64_row()
            lse = z.logsumexp(0, keepdim=True)
            if math.isfinite(lse.item()):
                return RowSums(lse=lse, picked=None if ids is None else z[ids])
        few = small_sums(source, ids, entropy=entropy, max_bytes=most)
        if few is not None:
            return few
        return row_answers(Questions(source, ids=ids, entropy=entropy, max_bytes=most))[0]

    # Answers ------------------------------------------------------------------------------------

    def log_prob(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return log p of tokens: (N, D) and (N, K) give (N, K). Only their clusters are read."""
        return self.token_log_prob(hidden, ids).to(accumulation_dtype(hidden.dtype))

    def token_log_prob(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return the same in float64."""
        places = self.places(ids)
        part_of = self.part_of(places)
        head = self.answers(self.parts[0], hidden, ids=self.entries(places))
        log_p = _log_softmax(head)
        counts = torch.bincount(part_of.reshape(-1), minlength=len(self.parts)).tolist()
        for part in self.parts[1:]:
            if counts[part.number] == 0:
                continue
            inside = part_of == part.number
            rows = inside.any(1).nonzero()[:, 0]
            inside = inside[rows]
            local = torch.where(inside, places[rows] - part.start, 0)
            tail = _log_softmax(self.answers(part, hidden[rows], ids=local))
            log_p = log_p.index_add(0, rows, torch.where(inside, tail, 0.0))
        return log_p

    def log_probs(self, hidden: Tensor, *, exact: bool = False) -> Tensor:
        """Return log p of all tokens: (N, D) gives (N, V)."""
        dense = _exact_logits if exact else _dense_logits
        head = dense(self, self.parts[0], hidden).log_softmax(1)
        parts = [head[:, : self.shortlist]]
        for part in self.parts[1:]:
            entry = head[:, self.shortlist + part.number - 1, None]
            parts.append(entry + dense(self, part, hidden).log_softmax(1))
        by_place = torch.cat(parts, 1)
        return by_place if self.place_of is None else by_place[:, self.place_of]

    def entropy(self, hidden: Tensor) -> Tensor:
        """Return H(head) + Σ_c p_c H(c), (N,)."""
        first = self.shortlist + torch.arange(len(self.weights), device=hidden.device)
        cluster_ids = first[None].expand(len(hidden), -1)
        head = self.answers(self.parts[0], hidden, ids=cluster_ids, entropy=True)
        total = head.entropy
        mass = _log_softmax(head).exp()
        for part in self.parts[1:]:
            inner = self.answers(part, hidden, entropy=True).entropy
            total = total + mass[:, part.number - 1] * inner
        return total.to(accumulation_dtype(hidden.dtype))  # type: ignore[no-any-return]

    def draw(self, hidden: Tensor, uniform: Uniform) -> Tensor:
        """Draw an entry of the head, then a token of its cluster; each row alone."""
        first, second = uniform(0), uniform(1)
        drawn = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        for i in range(len(hidden)):
            row = hidden[i : i + 1]
            z = self.source(self.parts[0], row).row_logits()[0]
            rank = inverse_cdf(z.double().log_softmax(0), first[i])
            if rank >= self.shortlist:
                part = self.parts[1 + int(rank) - self.shortlist]
                z = self.source(part, row).row_logits()[0]
                rank = part.start + inverse_cdf(z.double().log_softmax(0), second[i])
            drawn[i] = rank
        return self.tokens(drawn)

    def explain(self, rows: int) -> list[str]:
        """Return the costs of questions about a number of rows."""
        head, tails = self.head_weight.numel(), [w.numel() for w in self.weights]
        projected = [p.numel() for p in self.projections]
        all_entries = head + sum(tails) + sum(projected)
        widths = ", ".join(
            f"{part.size:,} x {w.shape[1]}"
            for part, w in zip(self.parts[1:], self.weights, strict=True)
        )
        full = self.vocab * self.head_weight.shape[1]
        return [
            f"  shortlist               {self.shortlist:,} tokens x {self.head_weight.shape[1]}",
            f"  clusters                {widths or 'none'}",
            f"  a token's log_prob      {_flop(rows * head)}, and outside the shortlist "
            f"up to {_flop(rows * max(map(sum, zip(tails, projected, strict=True)), default=0))}",
            f"  all tokens              {_flop(rows * all_entries)}; "
            f"a full softmax takes {_flop(rows * full)}",
        ]


def _flop(products: int) -> str:
    return f"{2e-9 * products:,.3f} GFLOP"


def _log_softmax(answers: RowSums) -> Tensor:
    """Return log-probabilities of the picked tokens within their part, (N, K), float64."""
    return answers.picked - answers.lse[:, None]  # type: ignore[no-any-return]


def _dense_logits(clusters: Clusters, part: Part, hidden: Tensor) -> Tensor:
    """Return all logits of a part, (N, tokens)."""
    with without_autocast(hidden.device):
        return clusters.source(part, hidden).dense()


def _exact_logits(clusters: Clusters, part: Part, hidden: Tensor) -> Tensor:
    """Return the same in float64, summed in the same order for any batch."""
    source = exact_source(clusters, part, hidden)
    token_ids = torch.arange(source.vocab, device=hidden.device)
    ids = token_ids.expand(len(hidden), -1)
    return source.at(ids)


def reads_one_row(source: Source) -> bool:
    """Return whether there is one row, without a gradient, that the core reads in float64.

    That takes no longer than in float32: the time goes into reading the weight.
    """
    if source.rows != 1 or source.dtype != torch.float32 or kernels.core is None:
        return False
    tensors = source.tensors()
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return False
    return kernels.readable(*tensors) and not torch._C._are_functorch_transforms_active()


def exact_source(clusters: Clusters, part: Part, hidden: Tensor) -> Source:
    """Return the source of a part with the projection computed in float64.

    It is the sum of two terms: its float32 number, and what that rounds off.
    """
    if part.number == 0:
        return clusters.source(part, hidden)
    c = part.number - 1
    projection, weight = clusters.projections[c], clusters.weights[c]
    flat = Source((hidden,), (projection,), None, Pointwise())
    dimensions = torch.arange(len(projection), device=hidden.device).expand(len(hidden), -1)
    projected = flat.float64_row()[None] if len(hidden) == 1 else flat.at(dimensions)
    if hidden.dtype == torch.float64:
        return Source((projected,), (weight,), clusters.biases[c], Pointwise())
    rounded = projected.float()
    terms = (rounded, (projected - rounded).float())
    return Source(terms, (weight, weight), clusters.biases[c], Pointwise())
