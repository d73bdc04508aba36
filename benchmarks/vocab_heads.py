"""Heads for huge vocabularies under one interface, and torch's own full and adaptive softmax.

    full           all tokens, exact gradients
    filter         the same with grad_filter=0.02
    tied           full, sharing the weight of the embedding
    adaptive       frequent tokens in full width, rare ones in clusters; cutoffs by the cost model
    hierarchical   a Huffman tree of decisions
    sampled        full, trained against log-uniform negatives

Every head has a bias that starts at the log of the token frequencies, so that none has an advantage
from knowing them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import Progress, mean_seconds, ratio, summary, time_calls
from lmhead import LMHead
from lmhead.vocab import AdaptiveHead, HierarchicalHead, SampledLoss

HEADS = ("full", "filter", "tied", "adaptive", "hierarchical", "sampled")
PEERS = {"full": "torch full", "adaptive": "torch adaptive"}
QUESTIONS = ("training step", "log_prob of one id", "argmax")
TAIL_MASS = 0.02

# What is timed, by question.
Calls = dict[str, Callable[[], object]]
Timing = dict[str, dict[str, Any]]


class Output(nn.Module):
    """A head of one kind: the loss that it is trained with, and the exact one.

    Args:
        kind: one of `HEADS`.
        width: D.
        frequencies: (V,), token counts.
        samples: K, of the sampled loss.
        weight: (V, D), shared by a head with a weight of this shape; None for a new one.
    """

    def __init__(
        self,
        kind: str,
        width: int,
        frequencies: Tensor,
        *,
        samples: int,
        weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        vocab = len(frequencies)
        self.head: LMHead | AdaptiveHead | HierarchicalHead
        self.sampled: SampledLoss | None = None
        if kind == "adaptive":
            self.head = AdaptiveHead(width, vocab, frequencies=frequencies, bias=True)
            return
        if kind == "hierarchical":
            self.head = HierarchicalHead(width, vocab, frequencies=frequencies)
            return
        full = LMHead(width, vocab, bias=True, grad_filter=TAIL_MASS if kind == "filter" else None)
        if weight is not None:
            full.weight = weight
        assert full.bias is not None
        # A token that is only in the validation text counts half of the rarest one.
        shares = frequencies.double()
        shares = torch.where(shares > 0, shares, shares[shares > 0].min() / 2)
        with torch.no_grad():
            full.bias.copy_((shares / shares.sum()).log())
        self.head = full
        if kind == "sampled":
            self.sampled = SampledLoss(full, num_samples=samples, frequencies=frequencies, seed=0)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the loss that is trained on, of (N, D) and (N,)."""
        if self.sampled is None:
            return F.cross_entropy(self.head(hidden), targets)
        loss: Tensor = self.sampled(hidden, targets)
        return loss

    def total(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the exact loss."""
        return F.cross_entropy(self.head(hidden), targets, reduction="sum")

    def log_prob(self, hidden: Tensor, ids: Tensor) -> Any:
        """Return the log-probability of one id per row."""
        return self.head(hidden).ask(log_prob=ids).log_prob

    def argmax(self, hidden: Tensor) -> Any:
        """Return the most probable token of each row."""
        return self.head(hidden).argmax(-1)


class _TorchFull(nn.Module):
    """All logits, `nn.Linear` and `F.cross_entropy`."""

    def __init__(self, head: LMHead) -> None:
        super().__init__()
        assert head.bias is not None
        self.weight = nn.Parameter(head.weight.detach())
        self.bias = nn.Parameter(head.bias.detach())

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(hidden), targets)

    def log_prob(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self.logits(hidden).log_softmax(-1)[:, ids]

    def argmax(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden).argmax(-1)


class _TorchAdaptive(nn.Module):
    """`nn.AdaptiveLogSoftmaxWithLoss`; its clusters have no bias, its ids are ranks."""

    def __init__(self, head: AdaptiveHead) -> None:
        super().__init__()
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(
            head.hidden_size, head.vocab_size, list(head.cutoffs), head.div_value, head_bias=True
        )
        assert head.head_bias is not None
        tails: Any = self.softmax.tail
        with torch.no_grad():
            self.softmax.head.weight.copy_(head.head_weight)
            self.softmax.head.bias.copy_(head.head_bias)
            for (down, up), p, w in zip(tails, head.projections, head.weights, strict=True):
                down.weight.copy_(p)
                up.weight.copy_(w)

    def forward(self, hidden: Tensor, ranks: Tensor) -> Any:
        return self.softmax(hidden, ranks).loss

    def log_prob(self, hidden: Tensor, ranks: Tensor) -> Any:
        return self.softmax(hidden, ranks).output

    def argmax(self, hidden: Tensor) -> Tensor:
        return self.softmax.predict(hidden)


def peer(output: Output, hidden: Tensor, targets: Tensor) -> Calls | None:
    """Return the calls of torch's own head on the same weights; None where torch has none."""
    head = output.head
    if isinstance(head, AdaptiveHead) and head.cutoffs:
        adaptive = _TorchAdaptive(head)
        ranks = head.place_of[targets]
        ours = F.cross_entropy(AdaptiveHead.from_torch(adaptive.softmax)(hidden), ranks)
        _check_loss(adaptive(hidden, ranks), ours)
        return questions(adaptive, hidden, ranks)
    if isinstance(head, LMHead):
        full = _TorchFull(head)
        _check_loss(full(hidden, targets), output.total(hidden, targets) / len(targets))
        return questions(full, hidden, targets)
    return None


def _check_loss(theirs: Tensor, ours: Tensor) -> None:
    assert float((theirs - ours).detach().abs()) < 1e-3, "torch's loss differs"


def gradients(output: nn.Module, hidden: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Compute the loss; return the gradients of the hidden states and of the parameters."""
    leaf = hidden.detach().requires_grad_()
    output.zero_grad()
    torch.autograd.backward(output(leaf, targets))
    assert leaf.grad is not None
    found = {name: p.grad for name, p in output.named_parameters() if p.grad is not None}
    return {**found, "hidden": leaf.grad}


def questions(
    output: Output | _TorchFull | _TorchAdaptive, hidden: Tensor, targets: Tensor
) -> Calls:
    """Return the calls that are timed; a query is about one row, all rows in turn."""
    rows = torch.split(hidden, 1)
    states, pairs = cycle(rows), cycle(zip(rows, torch.split(targets, 1), strict=True))

    @torch.no_grad()
    def log_prob() -> object:
        return output.log_prob(*next(pairs))

    @torch.no_grad()
    def argmax() -> object:
        return output.argmax(next(states))

    calls = (lambda: gradients(output, hidden, targets), log_prob, argmax)
    return dict(zip(QUESTIONS, calls, strict=True))


@torch.no_grad()
def check(output: Output, hidden: Tensor, targets: Tensor) -> None:
    """Compare the answers that are timed with those of the whole distribution; hidden (N, D)."""
    logits = output.head(hidden)
    every = torch.arange(logits.shape[-1])
    log_p = logits.log_softmax(-1)[..., every].double()
    own = log_p.gather(-1, targets[:, None])[:, 0]
    assert float((log_p.logsumexp(-1)).abs().max()) < 1e-4, "probabilities do not sum to 1"
    assert float((output.log_prob(hidden, targets) - own).abs().max()) < 1e-3
    best = log_p.gather(-1, output.argmax(hidden)[:, None])[:, 0]
    assert bool((best >= log_p.amax(-1) - 1e-4).all()), "not the most probable token"
    assert abs(float(output.total(hidden, targets) + own.sum())) < 1e-3 * len(targets)


def time_heads(
    heads: Mapping[str, Calls], progress: Progress, *, seconds: float, most: int
) -> dict[str, Timing]:
    """Time every question to every head in interleaved rounds: by head, then by question."""
    calls = {(name, q): heads[name][q] for q in QUESTIONS for name in heads}
    taken = time_calls(calls, most, progress, clock=mean_seconds, seconds=seconds, at_least=3)
    found: dict[str, Timing] = {name: {} for name in heads}
    for (name, question), values in taken.items():
        found[name][question] = {**asdict(summary(values)), "seconds": values}
        if "full" in heads:
            faster = ratio(taken["full", question], values)
            found[name][question]["faster"] = faster.median
    return found


def timing_columns(timings: list[Timing]) -> list[tuple[str, list[str]]]:
    """Return two columns per question: milliseconds, and how many times as fast as full."""
    columns = []
    for question in QUESTIONS:
        some = [timing[question] for timing in timings]
        columns.append((question, [milliseconds(t["median"]) for t in some]))
        if all("faster" in t for t in some):
            columns.append(("", [f"{t['faster']:.1f}x" for t in some]))
    return columns


def milliseconds(seconds: float) -> str:
    """Return a time with three digits.

    >>> milliseconds(0.0123456), milliseconds(0.25), milliseconds(0.0001), milliseconds(12.5)
    ('12.3 ms', '250 ms', '0.100 ms', '12,500 ms')
    """
    value = 1e3 * seconds
    digits = max(0, 2 - max(-1, math.floor(math.log10(value)))) if value > 0 else 0
    return f"{value:,.{digits}f} ms"
