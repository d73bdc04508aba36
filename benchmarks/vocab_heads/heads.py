"""The heads that are compared, each behind the same loss and the same questions.

    full           every word, exact gradients
    filter         the same with grad_filter=0.02
    tied           full, sharing the weight of the embedding
    adaptive       frequent words in full width, rare ones in clusters; cut-offs by the cost model
    hierarchical   a Huffman tree of decisions
    sampled        full, trained against log-uniform negatives

Every head has a bias that starts at the log of the words' frequencies, so that none is ahead for
knowing them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead import LMHead
from lmhead.vocab import AdaptiveHead, HierarchicalHead, SampledLoss

HEADS = ("full", "filter", "tied", "adaptive", "hierarchical", "sampled")
QUESTIONS = ("training step", "log_prob of one id", "argmax")
TAIL_MASS = 0.02

Calls = dict[str, Callable[[], object]]


class Output(nn.Module):
    """A head under the name of its kind: the loss to train on, and the one to be judged by.

    Args:
        kind: one of `HEADS`.
        width: D.
        frequencies: (V,), how often words occur.
        samples: K, of the sampled loss.
        weight: (V, D), to be shared by a head that has one of this shape; None for one of its own.
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
        # A word that is only in the validation text counts for half of the rarest one.
        shares = frequencies.double()
        shares = torch.where(shares > 0, shares, shares[shares > 0].min() / 2)
        with torch.no_grad():
            full.bias.copy_((shares / shares.sum()).log())
        self.head = full
        if kind == "sampled":
            self.sampled = SampledLoss(full, num_samples=samples, frequencies=frequencies, seed=0)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The loss that is trained on: (N, D) and (N,)."""
        if self.sampled is None:
            return F.cross_entropy(self.head(hidden), targets)
        loss: Tensor = self.sampled(hidden, targets)
        return loss

    def total(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The sum of the loss of the whole distribution."""
        return F.cross_entropy(self.head(hidden), targets, reduction="sum")


def gradients(output: nn.Module, hidden: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """A training step: the loss, and gradients of the hidden states and of the parameters."""
    leaf = hidden.detach().requires_grad_()
    output.zero_grad()
    torch.autograd.backward(output(leaf, targets))
    assert leaf.grad is not None
    found = {name: p.grad for name, p in output.named_parameters() if p.grad is not None}
    return {**found, "hidden": leaf.grad}


def one_by_one(
    hidden: Tensor, targets: Tensor
) -> tuple[Iterator[Tensor], Iterator[tuple[Tensor, Tensor]]]:
    """States (1, D), and states with their words (1,), over and over."""
    states, words = torch.split(hidden, 1), torch.split(targets, 1)
    return cycle(states), cycle(zip(states, words, strict=True))


def questions(output: Output, hidden: Tensor, targets: Tensor) -> Calls:
    """The calls that are timed. A question is about one token after the other, all in turn."""
    states, pairs = one_by_one(hidden, targets)

    @torch.no_grad()
    def log_prob() -> object:
        state, word = next(pairs)
        return output.head(state).ask(log_prob=word).log_prob

    @torch.no_grad()
    def argmax() -> object:
        return output.head(next(states)).argmax(-1)

    calls = (lambda: gradients(output, hidden, targets), log_prob, argmax)
    return dict(zip(QUESTIONS, calls, strict=True))


@torch.no_grad()
def check(output: Output, hidden: Tensor, targets: Tensor) -> None:
    """The answers that are timed are those of the whole distribution: hidden (N, D), few."""
    logits = output.head(hidden)
    every = torch.arange(logits.shape[-1])
    log_p = logits.log_softmax(-1)[..., every].double()
    own = log_p.gather(-1, targets[:, None])[:, 0]
    assert float((log_p.logsumexp(-1)).abs().max()) < 1e-4, "the words do not sum to 1"
    assert float((logits.ask(log_prob=targets).log_prob - own).abs().max()) < 1e-3
    best = log_p.gather(-1, logits.argmax(-1)[:, None])[:, 0]
    assert bool((best >= log_p.amax(-1) - 1e-4).all()), "not the best word"
    assert abs(float(output.total(hidden, targets) + own.sum())) < 1e-3 * len(targets)
