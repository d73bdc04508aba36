"""What torch has for the same task, on the weights that our heads have learned."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.vocab_heads.heads import QUESTIONS, Calls, Output, gradients, one_by_one
from lmhead import LMHead
from lmhead.vocab import AdaptiveHead

PEERS = {"full": "torch full", "adaptive": "torch adaptive"}


class _Full(nn.Module):
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

    def log_prob(self, hidden: Tensor, word: Tensor) -> Tensor:
        return self.logits(hidden).log_softmax(-1)[:, word]

    def argmax(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden).argmax(-1)


class _Adaptive(nn.Module):
    """`nn.AdaptiveLogSoftmaxWithLoss`; its clusters have no bias."""

    def __init__(self, head: AdaptiveHead) -> None:
        super().__init__()
        self.theirs = nn.AdaptiveLogSoftmaxWithLoss(
            head.hidden_size, head.vocab_size, list(head.cutoffs), head.div_value, head_bias=True
        )
        assert head.head_bias is not None
        tails: Any = self.theirs.tail
        with torch.no_grad():
            self.theirs.head.weight.copy_(head.head_weight)
            self.theirs.head.bias.copy_(head.head_bias)
            for (down, up), p, w in zip(tails, head.projections, head.weights, strict=True):
                down.weight.copy_(p)
                up.weight.copy_(w)

    def forward(self, hidden: Tensor, places: Tensor) -> Tensor:
        loss: Tensor = self.theirs(hidden, places).loss
        return loss

    def log_prob(self, hidden: Tensor, place: Tensor) -> Tensor:
        found: Tensor = self.theirs(hidden, place).output
        return found

    def argmax(self, hidden: Tensor) -> Tensor:
        return self.theirs.predict(hidden)


def peer(output: Output, hidden: Tensor, targets: Tensor) -> Calls | None:
    """Torch's way to do what `output` does, with the same answers; None where it has none."""
    head = output.head
    made: _Adaptive | _Full | None = None
    if isinstance(head, AdaptiveHead) and head.cutoffs:
        made = adaptive = _Adaptive(head)
        # Torch wants words numbered by frequency.
        targets = head.place_of[targets]
        ours = F.cross_entropy(AdaptiveHead.from_torch(adaptive.theirs)(hidden), targets)
    elif isinstance(head, LMHead):
        made = _Full(head)
        ours = output.total(hidden, targets) / len(targets)
    if made is None:
        return None
    theirs = made(hidden, targets)
    assert float((theirs - ours).detach().abs()) < 1e-3, "torch's loss is another one"
    module = made
    states, pairs = one_by_one(hidden, targets)

    @torch.no_grad()
    def log_prob() -> object:
        return module.log_prob(*next(pairs))

    @torch.no_grad()
    def argmax() -> object:
        return module.argmax(next(states))

    calls = (lambda: gradients(module, hidden, targets), log_prob, argmax)
    return dict(zip(QUESTIONS, calls, strict=True))
