"""`SampledLoss`: train a full head on the target and a few other tokens."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead import checks
from lmhead.head import LMHead
from lmhead.scores.protocol import recomputed
from lmhead.scores.row_loss import CrossEntropy
from lmhead.sweep import DEFAULT_MAX_BYTES, Source, SweptScores, accumulation_dtype
from lmhead.sweep.source import without_autocast
from lmhead.vocab.proposals import draw_negatives, log_proposal

METHODS = ("sampled_softmax", "nce")


class SampledLoss(nn.Module):
    """The loss of a token against K random tokens, shared by the batch, instead of all V.

    With negatives w₁ … w_K drawn from q, and s(w) = z(w) - log(K q(w)):

        sampled_softmax    -log( exp s(y) / (exp s(y) + Σ_j exp s(w_j)) )
        nce                -log σ(s(y)) - Σ_j log σ(-s(w_j))

    With the correction by log q the logits converge to those of the full softmax (with NCE:
    normalised ones). In `eval()` mode, and for every question to the head, the softmax is the full
    one: a sampled loss cannot be compared with a perplexity.

    Args:
        head: an `LMHead`; its bias, scale, soft-capping and low-rank delta are applied.
        num_samples: K.
        proposal: "log_uniform" (ranks by frequency), "unigram" or "uniform".
        method: "sampled_softmax" or "nce".
        frequencies: (V,), how often tokens occur; needed for "unigram". None takes tokens to be
            sorted by frequency.
        remove_hits: whether negatives that equal the row's target are left out. None does so for
            sampled softmax, not for noise-contrastive estimation.
        sparse: whether the weight's gradient is sparse, for `torch.optim.SparseAdam`.
        seed: the negatives are a function of seed and step; None draws a seed.

    Attributes:
        step: number of training batches so far; a buffer, saved with the model.
        log_q: (V,), float64.

    >>> head = LMHead(16, 1000)
    >>> loss = SampledLoss(head, num_samples=50, seed=0)
    >>> hidden, targets = torch.randn(8, 16), torch.randint(1000, (8,))
    >>> loss(hidden, targets).backward()
    >>> full = F.cross_entropy(head(hidden), targets)
    >>> torch.equal(loss.eval()(hidden, targets), full)
    True
    """

    step: Tensor
    log_q: Tensor
    _cumulated: Tensor

    def __init__(
        self,
        head: LMHead,
        *,
        num_samples: int,
        proposal: Literal["log_uniform", "unigram", "uniform"] = "log_uniform",
        method: Literal["sampled_softmax", "nce"] = "sampled_softmax",
        frequencies: Any = None,
        remove_hits: bool | None = None,
        sparse: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(head, LMHead):
            raise TypeError(f"head must be an LMHead; got {type(head).__name__}")
        checks.check_integer("num_samples", num_samples, low=1)
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
        if seed is not None:
            checks.check_integer("seed", seed, low=-(2**63), high=2**64 - 1)
        log_q = log_proposal(proposal, head.vocab_size, frequencies).to(head.weight.device)
        self.head, self.num_samples = head, num_samples
        self.proposal, self.method, self.sparse = proposal, method, sparse
        self.remove_hits = method == "sampled_softmax" if remove_hits is None else remove_hits
        self.seed = int(torch.randint(2**63 - 1, ())) if seed is None else seed
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("log_q", log_q, persistent=False)
        self.register_buffer("_cumulated", log_q.exp().cumsum(0), persistent=False)

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> Tensor:
        """Return the sampled loss in training, the full cross-entropy otherwise.

        Args:
            hidden: (..., D).
            targets: ids (...).
            ignore_index: rows with this target do not count.
            reduction: "mean" over the tokens that count, "sum", or "none" for (...).
        """
        scores = self.head.scores(hidden)
        lead, vocab = hidden.shape[:-1], scores.vocab_size
        if isinstance(targets, Tensor) and targets.is_floating_point():
            raise TypeError(f"targets must be ids for a sampled loss; got {targets.dtype}")
        options = {"ignore_index": ignore_index, "reduction": reduction}
        loss = CrossEntropy.checked(lead, vocab, hidden, targets, **options)
        ids = loss.targets
        if not self.training:
            value = scores.cross_entropy(loss).to(accumulation_dtype(hidden.dtype))
            return value.reshape(lead) if reduction == "none" else value
        negatives = draw_negatives(self._cumulated, self.num_samples, self.seed, int(self.step))
        self.step += 1
        # Ignored rows are removed: a NaN in them must not reach the weight.
        keep = (ids != ignore_index).nonzero()[:, 0]
        if not isinstance(scores, SweptScores):
            raise TypeError(
                "head must have its whole weight on this rank for a sampled loss; it is "
                "vocabulary-parallel, where the full loss costs each rank a part"
            )
        rows = self.rows(scores.select(keep).source, ids[keep], negatives)
        if reduction == "none":
            return rows.new_zeros(len(ids)).index_copy(0, keep, rows).reshape(lead)
        return rows.sum() if reduction == "sum" else rows.sum() / len(keep)

    def rows(self, source: Source, targets: Tensor, negatives: Tensor) -> Tensor:
        """Return the loss of each row, (N,), against given negatives (K,)."""
        n, k = len(targets), len(negatives)
        dtype = accumulation_dtype(source.hiddens[0].dtype)
        # One look-up for both: one gradient of the size of the weight.
        ids = torch.cat([targets, negatives])
        vectors = [F.embedding(ids, w, sparse=self.sparse).to(dtype) for w in source.weights]
        bias = None if source.bias is None else source.bias[ids].to(dtype)
        log_q = (self.log_q[ids] + math.log(k)).to(dtype)

        def block(lo: int, hi: int) -> Tensor:
            target, others = source.hiddens[0].new_zeros(2, dtype=dtype)
            with without_autocast(source.device):
                for h, v in zip(source.hiddens, vectors, strict=True):
                    rows = h[lo:hi].to(dtype)
                    target = target + (rows * v[lo:hi]).sum(1)
                    others = others + rows @ v[n:].T
            if bias is not None:
                target, others = target + bias[lo:hi], others + bias[n:]
            target = source.pointwise(target) - log_q[lo:hi]
            others = source.pointwise(others) - log_q[n:]
            hits = negatives[None] == targets[lo:hi, None] if self.remove_hits else None
            return _LOSSES[self.method](target, others, hits)

        budget = DEFAULT_MAX_BYTES if self.head.max_bytes is None else self.head.max_bytes
        size = max(1, budget // (4 * k * dtype.itemsize))
        if n <= size:
            return block(0, n)
        cuts = [(lo, min(n, lo + size)) for lo in range(0, n, size)]
        return torch.cat([recomputed(lambda lo=lo, hi=hi: block(lo, hi)) for lo, hi in cuts])

    def extra_repr(self) -> str:
        """Return what `print(model)` shows in parentheses."""
        return f"num_samples={self.num_samples}, proposal={self.proposal!r}, method={self.method!r}"


def _sampled_softmax(target: Tensor, others: Tensor, hits: Tensor | None) -> Tensor:
    """Return -log of the target's share: target (N,), others (N, K)."""
    if hits is not None:
        # Not -inf: where all negatives are hits, loss and gradient must be 0, not NaN.
        others = others.masked_fill(hits, torch.finfo(others.dtype).min / 2)
    # logaddexp of the target and the rest; softplus is exact where the rest is tiny.
    return F.softplus(others.logsumexp(1) - target)


def _nce(target: Tensor, others: Tensor, hits: Tensor | None) -> Tensor:
    """Return -log σ(target) - Σ log σ(-others)."""
    noise = F.softplus(others)
    if hits is not None:
        noise = noise.masked_fill(hits, 0.0)
    return F.softplus(-target) + noise.sum(1)


_LOSSES = {"sampled_softmax": _sampled_softmax, "nce": _nce}
